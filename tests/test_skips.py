"""A run fails on a skip that is not on the list of support/skips.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LISTED = {
    "a_skip": "def test_it():\n    pytest.skip('no huge pages: sysctl vm.nr_hugepages=16')\n",
    "an_expected_failure": "@pytest.mark.xfail(reason='issue 1: it fails')\ndef test_it():\n    raise AssertionError\n",
}
OTHERS = {
    "in_a_test": "def test_it():\n    pytest.skip('no time')\n",
    "by_a_mark": "@pytest.mark.skip(reason='no time')\ndef test_it(): ...\n",
    "of_a_module": "pytest.skip('no time', allow_module_level=True)\n",
    "by_a_fixture": "@pytest.fixture\ndef missing():\n    pytest.skip('no time')\n\n\ndef test_it(missing): ...\n",
    "without_a_reason": "@pytest.mark.skip\ndef test_it(): ...\n",
    "that_begins_like_a_listed_one": "def test_it():\n    pytest.skip('a simulated GPU has no memory of its own, but no time')\n",
    "as_an_expected_failure": "@pytest.mark.xfail\ndef test_it():\n    raise AssertionError\n",
}


def run(folder: Path, modules: dict[str, str], lanes: int, **environment: str) -> tuple[int, str]:
    """pytest's exit status and output over these modules and a test that passes."""
    for name, body in {**modules, "passes": "def test_it(): ...\n"}.items():
        (folder / f"test_{name}.py").write_text(f"import pytest\n\n{body}")
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "KVSERVER_STRICT_SKIPS")}
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "support.skips", "-p", "xdist", "-n", str(lanes), "."],
        cwd=folder, env={**clean, "PYTHONPATH": str(HERE), **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def listed(output: str) -> list[str]:
    """The modules of the skips that are not on the list."""
    _, _, section = output.partition("skips that are not on the list")
    return sorted(name for name in OTHERS if f"test_{name}.py" in section)


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("environment", [{"CI": "true"}, {"KVSERVER_STRICT_SKIPS": "1"}, {}], ids=str)
def test_a_skip_that_is_not_on_the_list_is_named_and_fails_a_strict_run(
    tmp_path: Path, environment: dict[str, str], lanes: int
) -> None:
    status, output = run(tmp_path, OTHERS, lanes, **environment)
    assert (status, listed(output)) == (1 if environment else 0, sorted(OTHERS)), output


def test_what_is_on_the_list_fails_no_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, LISTED, 0, CI="true")
    assert status == 0, output
    assert "not on the list" not in output
