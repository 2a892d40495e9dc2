"""What `pip install` brings: kvserver as engines have it, which is a wheel."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path

from support import simulators

SIMULATORS = {b"FakeDevice", b"FakeGpu", b"a simulated GPU was misused", b"the caller broke a rule"}


def found_in(module: Path) -> set[bytes]:
    content = module.read_bytes()
    return {name for name in SIMULATORS if name in content}


def test_the_wheel_has_one_native_module_and_no_simulators() -> None:
    (native,) = [file for file in files("kvserver") or () if file.suffix == ".so"]
    assert native.name.startswith("_native.")
    assert found_in(Path(native.locate())) == set()
    assert found_in(Path(simulators.MODULE)) == SIMULATORS
