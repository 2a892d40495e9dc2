"""What `make wheel` and `make sdist` make, installed into environments of their own: no kvserver, compiler or CUDA of the checkout is in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from support.daemon import Daemon
from support.nvcc import find_nvcc
from support.worker import Worker

import kvserver

ROOT = Path(__file__).parent.parent.parent
VERSION = kvserver.__version__
EXTRAS = {"valkey": "valkey-glide-sync", "s3": "obstore", "mooncake": "mooncake-transfer-engine-non-cuda"}
# What a C++ compiler is, and the shell with which CMake's rules and pip's scripts run.
COMPILER = ["c++", "g++", "as", "ld", "ar", "ranlib", "nm", "objcopy", "objdump", "readelf", "strip", "sh", "uname"]


def run(*command: str | Path, **environment: str) -> str:
    """What it prints, on either stream. It runs outside of the checkout."""
    done = subprocess.run(
        command,
        cwd="/",
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def made(folders: pytest.TempPathFactory, target: str) -> Path:
    """The file that `make` makes, by the recipe alone: what that needs is there, or being built by no test."""
    folder = folders.mktemp(target)
    run("make", "-C", ROOT, "-o", "build/wheel/.built", "-o", ".venv/.installed", target, f"DIST={folder}")
    (found,) = folder.iterdir()
    return found


def tracked(*paths: str) -> set[str]:
    """Files of the next commit, without the link to `adapters`."""
    return set(run("git", "-C", ROOT, "ls-files", *paths).split()) - {"kvserver/adapters"}


def metadata_of_wheel(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(f"kvserver-{VERSION}.dist-info/METADATA"))


def metadata_of_sdist(sdist: Path) -> Message:
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"kvserver-{VERSION}/PKG-INFO")
        assert member is not None
        return message_from_bytes(member.read())


def new_environment(folder: Path) -> Path:
    """The `bin` of a virtual environment with pip alone."""
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin"


def check_store_and_load(programs: Path) -> None:
    """With the daemon and the client of that environment; of the checkout is the made-up engine alone."""
    assert run(programs / "kvserver", "--version") == f"kvserver {VERSION}\n"
    daemon = Daemon(program=[str(programs / "kvserver")]).start()
    try:
        code = f"from support.worker import Worker\nwith Worker({daemon.endpoint!r}) as worker: worker.round_trip()"
        run(programs / "python", "-c", code, PYTHONPATH=str(ROOT / "tests"))
        assert [daemon.http(page)[0] for page in ("/", "/assets/main.js", "/assets/METRICS.md")] == [200] * 3
        assert daemon.metric("kvserver_store_bytes_total") == daemon.metric("kvserver_load_bytes_total") != 0
        assert daemon.terminate() == 0
    finally:
        daemon.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, "sdist")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of a new environment with the wheel and all of its extras."""
    programs = new_environment(tmp_path_factory.mktemp("installed"))
    run(programs / "python", "-m", "pip", "install", "-q", "--no-compile", f"{wheel}[{','.join(EXTRAS)}]")
    return programs


def test_the_wheel_is_for_systems_with_the_glibc_that_its_name_states(wheel: Path) -> None:
    stated = re.fullmatch(rf"kvserver-{re.escape(VERSION)}-(cp\d+)-\1-manylinux_2_(\d+)_\w+\.whl", wheel.name)
    assert stated, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (module,) = [name for name in archive.namelist() if ".so" in name]
        native = Path(archive.extract(module, wheel.parent.parent / "native"))
    symbols = run("objdump", "-T", native)
    assert max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", symbols)) <= int(stated[2])
    assert not re.findall(r"GLIBCXX_|CXXABI_", symbols), "the C++ runtime is inside"
    exported = re.findall(r" g .*\.text\s.* (\S+)$", symbols, re.MULTILINE)
    assert exported == ["PyInit__native"]


def test_a_wheel_stores_and_loads_in_a_new_environment(installed: Path) -> None:
    check_store_and_load(installed)


def test_a_wheel_has_the_gpu_path_if_there_was_nvcc(installed: Path) -> None:
    code = "import kvserver._native as native; print(native.built_with_cuda())"
    assert run(installed / "python", "-c", code) == f"{find_nvcc() is not None}\n"


def test_each_extra_brings_the_client_of_its_storage(installed: Path) -> None:
    names = run(
        installed / "python", "-c", "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    )
    expected = set(EXTRAS.values()) if sys.version_info >= (3, 11) else set(EXTRAS.values()) - {"obstore"}
    assert expected <= {name.lower() for name in names.split()}


def test_wheel_and_sdist_state_the_same_version_requirements_and_extras(wheel: Path, sdist: Path) -> None:
    stated = metadata_of_wheel(wheel)
    assert stated["Version"] == VERSION
    assert set(stated.get_all("Provides-Extra", [])) == set(EXTRAS)
    for extra, client in EXTRAS.items():
        (requirement,) = [line for line in stated.get_all("Requires-Dist", []) if f'extra == "{extra}"' in line]
        assert re.match(r"[\w-]+", requirement)[0] == client  # type: ignore[index]
    assert not [line for line in stated.get_all("Requires-Dist", []) if line.startswith(("torch", "vllm"))]
    other = metadata_of_sdist(sdist)
    for name in ("Name", "Version", "Requires-Python", "License-Expression"):
        assert other[name] == stated[name]
    for name in ("Requires-Dist", "Provides-Extra"):
        assert set(other.get_all(name, [])) == set(stated.get_all(name, []))


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """Pages, tables and whatever else lies beside the Python; and the types of the native module, which the build makes."""
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename for info in archive.infolist() if not info.is_dir()}
    names = {name for name in files if ".dist-info/" not in name and ".so" not in name}
    expected = {re.sub(r"^adapters/", "kvserver/adapters/", name) for name in tracked("kvserver", "adapters")}
    assert names == expected | {"kvserver/_native.pyi"}


def test_the_sdist_has_all_that_a_build_reads_and_nothing_else(sdist: Path) -> None:
    top = ["pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "CHANGELOG.md"]
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert names - {"PKG-INFO"} == tracked("csrc", "kvserver", "adapters", *top)


def test_the_version_is_in_one_place() -> None:
    """Wheel and sdist: above. The image: test_operator_deploy.py."""
    assert f'"{VERSION}"' not in (ROOT / "pyproject.toml").read_text()
    daemon = Daemon().start()
    try:
        assert run(Path(sys.executable).with_name("kvserver"), "--version") == f"kvserver {VERSION}\n"
        assert daemon.ready_line.startswith(f"kvserver {VERSION} ready: ")
        assert daemon.status()["version"] == VERSION
        assert daemon.metric("kvserver_build_info", version=VERSION) == 1
        with Worker(daemon.endpoint) as worker:
            assert worker.client.hello().server_version == VERSION
    finally:
        daemon.close()
    image = run("make", "-C", ROOT, "image", "DOCKER=echo")
    assert f"--build-arg VERSION={VERSION} -t kvserver:{VERSION}" in image


@pytest.mark.long
def test_an_sdist_is_built_with_nothing_but_a_compiler(sdist: Path, tmp_path: Path) -> None:
    """No nvcc, CMake, ninja, git or kvserver: pip brings what pyproject.toml names."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in COMPILER:
        (tools / name).symlink_to(shutil.which(name) or pytest.fail(f"there is no {name}"))
    programs = new_environment(tmp_path / "environment")
    alone = {"PATH": str(tools), "CUDACXX": "/nowhere/nvcc", "CMAKE_CXX_COMPILER_LAUNCHER": ""}
    output = run(programs / "python", "-m", "pip", "install", "-v", sdist, **alone)
    assert "CUDA is left out: no working nvcc was found" in output
    check_store_and_load(programs)
