"""Every check of `kvserver doctor` on machines that are well and on machines that are not."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvserver import __version__
from kvserver.cli import checks, checks_daemon, checks_service, doctor
from kvserver.cli.checks import Finding, Level, Machine
from kvserver.config import Settings, bytes_beside_l1
from kvserver.config.settings import GiB, MiB


def machine(root: Path, **values: Any) -> Machine:
    """A machine of which only `root` and `values` are there."""
    settings = values.pop("settings", {})
    return Machine(Settings(**{"endpoint": f"ipc://{root}/run/kv.sock", **settings}), root, **{"environ": {}, **values})


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def is_problem(finding: Finding, *words: str) -> None:
    assert finding.level is Level.PROBLEM, finding
    assert [word for word in words if word not in f"{finding.text} -> {finding.fix}"] == [], finding
    assert finding.fix


def is_warning(finding: Finding, *words: str) -> None:
    assert finding.level is Level.WARNING, finding
    assert [word for word in words if word not in f"{finding.text} -> {finding.fix}"] == [], finding
    assert finding.fix


def is_ok(finding: Finding, *words: str) -> None:
    assert finding.level is Level.OK, finding
    assert [word for word in words if word not in finding.text] == [], finding


# ---- memory -------------------------------------------------------------------------------------


def shm(total: int, free: int) -> Any:
    return lambda path: SimpleNamespace(f_frsize=4096, f_blocks=total // 4096, f_bavail=free // 4096)


def test_the_shared_memory_of_a_default_container_is_a_problem(tmp_path: Path) -> None:
    found = checks.shared_memory(machine(tmp_path, statvfs=shm(64 * MiB, 64 * MiB)))
    is_problem(found, "/dev/shm has 64 MiB", "4.0 GiB does not fit", "--shm-size 5g", "--ipc=host")


def test_shared_memory_is_measured_against_the_configured_kv_cache_of_vllm(tmp_path: Path) -> None:
    statvfs = shm(8 * GiB, 8 * GiB)
    is_ok(checks.shared_memory(machine(tmp_path, statvfs=statvfs)), "8.0 GiB free")
    environ = {"VLLM_CPU_KVCACHE_SPACE": "40"}
    found = checks.shared_memory(machine(tmp_path, statvfs=statvfs, environ=environ))
    is_problem(found, "VLLM_CPU_KVCACHE_SPACE=40", "size=41G")


def test_shared_memory_that_is_nearly_full_is_a_warning(tmp_path: Path) -> None:
    is_warning(checks.shared_memory(machine(tmp_path, statvfs=shm(8 * GiB, GiB))), "1.0 GiB of 8.0 GiB free")


def test_a_machine_without_shared_memory_is_a_problem(tmp_path: Path) -> None:
    is_problem(checks.shared_memory(machine(tmp_path)), "dev/shm: No such file", "mount -t tmpfs")


def test_an_l1_that_the_cgroup_does_not_hold_is_a_problem_with_a_size_that_fits(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemAvailable: {64 * GiB // 1024} kB\n")
    is_ok(checks.l1_memory(machine(tmp_path, settings={"l1_size": "20GiB"})), "20.0 GiB of 64.0 GiB left")
    write(tmp_path, "proc/self/cgroup", "0::/pod\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", str(4 * GiB))
    write(tmp_path, "sys/fs/cgroup/pod/memory.current", "0")
    found = checks.l1_memory(machine(tmp_path, settings={"l1_size": "20GiB"}))
    is_problem(found, "--l1-size 20GiB", "memory.max of the cgroup", "kvserver serve --l1-size 2048MiB")


def in_a_container(root: Path, limit: int, used: int = 0, **settings: Any) -> Machine:
    """With 64 GiB of memory, of which the container may use `limit`."""
    write(root, "proc/meminfo", f"MemTotal: {64 * GiB // 1024} kB\nMemAvailable: {64 * GiB // 1024} kB\n")
    write(root, "proc/self/cgroup", "0::/pod\n")
    write(root, "sys/fs/cgroup/pod/memory.max", str(limit))
    write(root, "sys/fs/cgroup/pod/memory.current", str(used))
    return machine(root, settings=settings)


def test_a_limit_that_holds_l1_but_not_what_the_daemon_needs_beside_it_is_a_warning_with_the_request(
    tmp_path: Path,
) -> None:
    beside = bytes_beside_l1(Settings(), 20 * GiB)
    tight = in_a_container(tmp_path, 20 * GiB + beside - 1, l1_size="20GiB")
    is_ok(checks.l1_memory(tight), "20.0 GiB of 20.7 GiB left")
    needed = 20 * 1024 + beside // MiB
    is_warning(checks.memory_beside_l1(tight), "memory.max of the cgroup", "20.0 GiB and 752 MiB", f"memory {needed}Mi")
    is_ok(checks.memory_beside_l1(in_a_container(tmp_path, needed * MiB, l1_size="20GiB")), f"{needed} MiB are needed")


def test_a_daemon_that_runs_in_the_container_does_not_hide_its_limit(tmp_path: Path) -> None:
    """Its L1 is used already, so that another daemon would not find space for one."""
    running = in_a_container(tmp_path, 20 * GiB, used=19 * GiB, l1_size="20GiB")
    is_problem(checks.l1_memory(running), "are left")
    is_warning(checks.memory_beside_l1(running), "memory 21232Mi", "--l1-size")
    is_ok(checks.memory_beside_l1(in_a_container(tmp_path, 64 * MiB)), "not known")


def test_without_a_limit_the_memory_for_a_request_is_named(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * GiB // 1024} kB\nMemAvailable: {64 * GiB // 1024} kB\n")
    is_ok(checks.memory_beside_l1(machine(tmp_path, settings={"l1_size": "1GiB"})), "1700 MiB are needed", "no limit")


def test_what_needs_memory_beside_l1_counts(tmp_path: Path) -> None:
    def needed(**settings: Any) -> int:
        return bytes_beside_l1(Settings(**settings), 20 * GiB)

    assert needed(l2=("file:///x?size=128GiB",)) - needed() == 128 * MiB
    assert needed(kv_index_size="1GiB") - needed() == 768 * MiB
    assert needed(kv_events_endpoint="tcp://127.0.0.1:5557") - needed() == 320 * MiB
    assert bytes_beside_l1(Settings(), 20 * GiB, uses_gpus=True) > needed()


def test_l1_in_reserved_huge_pages_is_not_counted_against_the_limit(tmp_path: Path) -> None:
    found = in_a_container(tmp_path, 64 * GiB - 1, l1_size="1GiB", l1_huge_pages="2MiB")
    for name, count in {"free_hugepages": 1024, "resv_hugepages": 0}.items():
        write(tmp_path, f"sys/kernel/mm/hugepages/hugepages-2048kB/{name}", str(count))
    is_ok(checks.memory_beside_l1(found), "676 MiB are needed: L1 in huge pages")


def test_the_limit_of_a_cgroup_of_the_first_version_counts_too(tmp_path: Path) -> None:
    """A container sees its own folder as the root of the hierarchy, under a path that is not there."""
    write(tmp_path, "proc/meminfo", f"MemAvailable: {64 * GiB // 1024} kB\n")
    write(tmp_path, "proc/self/cgroup", "9:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(4 * GiB))
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(GiB))
    found = checks.l1_memory(machine(tmp_path, settings={"l1_size": "3GiB"}))
    is_problem(found, f"only {3 * GiB} are left by memory.limit_in_bytes of the cgroup", "sys/fs/cgroup/memory")
    write(
        tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"
    )  # the kernel's way to write "no limit"
    is_ok(checks.l1_memory(machine(tmp_path, settings={"l1_size": "3GiB"})), "MemAvailable")


def test_a_low_limit_of_locked_memory_is_reported_beside_a_gpu_and_blamed_for_nothing(tmp_path: Path) -> None:
    def limited(count: int, **settings: str) -> Finding:
        rlimit = lambda which: (count, count) if which == resource.RLIMIT_MEMLOCK else (0, 0)  # noqa: E731
        return checks.locked_memory(machine(tmp_path, rlimit=rlimit, settings={"l1_size": "1GiB", **settings}))

    write(tmp_path, "proc/meminfo", f"MemAvailable: {64 * GiB // 1024} kB\n")
    is_ok(limited(8 * MiB), "at most 8 MiB", "only pinning for GPUs")
    write(tmp_path, "dev/nvidiactl", "")
    is_ok(
        limited(8 * MiB),
        "8 MiB may be locked, L1 is 1.0 GiB",
        "not known to check",
        "ulimit -l unlimited",
        "memlock=-1",
    )
    is_ok(limited(8 * MiB, pin="off"), "only pinning for GPUs")
    is_ok(limited(8 * MiB, gpus="none"), "only pinning for GPUs")
    is_ok(limited(8 * MiB, l1_size="100GiB"), "L1 itself cannot be allocated")
    assert "ulimit" not in limited(GiB).text
    assert limited(resource.RLIM_INFINITY).text == "unlimited"


def test_little_shared_memory_is_no_problem_where_engines_run_on_gpus(tmp_path: Path) -> None:
    write(tmp_path, "dev/nvidiactl", "")
    found = checks.shared_memory(machine(tmp_path, statvfs=shm(64 * MiB, 64 * MiB)))
    is_warning(found, "an engine on CPU would run without cache")
    is_problem(checks.shared_memory(machine(tmp_path, statvfs=shm(64 * MiB, 64 * MiB), settings={"gpus": "none"})))


def test_small_pages_for_l1_are_a_warning(tmp_path: Path) -> None:
    folder = "sys/kernel/mm/transparent_hugepage/"
    write(tmp_path, folder + "enabled", "always madvise [never]\n")
    write(tmp_path, folder + "shmem_enabled", "always within_size [advise] never deny force\n")
    write(tmp_path, "proc/meminfo", "HugePages_Total:     512\n")
    write(tmp_path, "proc/mounts", "proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs rw,huge=within_size,size=1k 0 0\n")
    found = checks.huge_pages(machine(tmp_path))
    is_warning(found, "never for anonymous", "advise for shared", "within_size on /dev/shm", "explicit ones: 512")
    assert found.fix == "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    write(tmp_path, folder + "enabled", "always [madvise] never\n")
    is_ok(checks.huge_pages(machine(tmp_path)), "madvise for anonymous")


def test_several_memory_nodes_are_a_warning_until_the_process_is_bound_to_one(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    is_ok(checks.numa(machine(tmp_path)), "one memory node")
    (tmp_path / "sys/devices/system/node/node1").mkdir()
    write(tmp_path, "proc/self/status", "Mems_allowed_list:\t0-1\n")
    is_warning(checks.numa(machine(tmp_path)), "2 memory nodes", "numactl --cpunodebind=0 --membind=0")
    write(tmp_path, "proc/self/status", "Mems_allowed_list:\t1\n")
    is_ok(checks.numa(machine(tmp_path)), "bound to node 1")


# ---- the process and its machine ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("hard", "level"),
    [(256, Level.PROBLEM), (1024, Level.WARNING), (65536, Level.OK), (resource.RLIM_INFINITY, Level.OK)],
)
def test_the_limit_of_open_files_is_reported_in_workers(tmp_path: Path, hard: int, level: Level) -> None:
    found = checks.open_files(machine(tmp_path, rlimit=lambda which: (256, hard)))
    assert found.level is level
    assert ("LimitNOFILE" in found.fix) == (level is not Level.OK)


def test_a_container_gets_hints_and_no_blame(tmp_path: Path) -> None:
    is_ok(checks.container(machine(tmp_path)), "not in a known kind of container")
    write(tmp_path, "run/.containerenv", "")
    is_ok(checks.container(machine(tmp_path)), "podman", "shared volume", "same user id")


def test_a_misspelt_variable_is_a_warning_with_the_right_spelling(tmp_path: Path) -> None:
    found = checks.environment(machine(tmp_path, environ={"KVSERVER_L1_SYZE": "1GiB"}))
    is_warning(found, "KVSERVER_L1_SYZE", "write KVSERVER_L1_SIZE")
    foreign = {"KVSERVER_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}  # Kubernetes makes such for a service `kvserver`
    is_ok(checks.environment(machine(tmp_path, environ=foreign)), "no KVSERVER_* variables")
    is_ok(checks.environment(machine(tmp_path, environ={"KVSERVER_L1_SIZE": "1GiB"})), "KVSERVER_L1_SIZE")


# ---- the installation, the daemon, vLLM ---------------------------------------------------------


def test_a_native_module_that_does_not_load_is_a_problem(tmp_path: Path) -> None:
    def load(name: str) -> object:
        raise ImportError(f"{name}: libstdc++.so.6: version `GLIBCXX_3.4.32' not found")

    is_problem(checks_service.native_module(machine(tmp_path, load=load)), "GLIBCXX_3.4.32", "pip install")
    is_ok(checks_service.native_module(machine(tmp_path)))


def test_the_folder_of_the_endpoint_must_be_ours(tmp_path: Path) -> None:
    is_ok(checks_service.endpoint_folder(machine(tmp_path)), "not there yet")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    is_ok(checks_service.endpoint_folder(machine(tmp_path)), "is yours")
    if os.getuid() == 0:
        os.chown(folder, 4711, -1)  # the check accepts a folder of root
    found = checks_service.endpoint_folder(machine(tmp_path, uid=4712))
    is_problem(found, f"belongs to user {folder.stat().st_uid}", "chown 4712")
    if os.getuid() == 0:
        os.chown(folder, 0, -1)
    folder.chmod(0o777)
    is_problem(checks_service.endpoint_folder(machine(tmp_path)), "is writable for every user", f"chmod 700 {folder}")


def test_an_endpoint_that_is_too_long_or_no_folder_is_a_problem(tmp_path: Path) -> None:
    found = checks_service.endpoint_folder(machine(tmp_path, settings={"endpoint": "ipc:///tmp/" + "x" * 100}))
    is_problem(found, "too long", "--endpoint")
    write(tmp_path, "run", "")
    is_problem(checks_service.endpoint_folder(machine(tmp_path)), "no folder", "--endpoint")


def test_no_daemon_is_a_warning_with_the_command_that_starts_it(tmp_path: Path) -> None:
    is_warning(checks_daemon.daemon(machine(tmp_path)), "none at ipc://", "kvserver serve")


def test_the_socket_of_a_dead_daemon_is_distinguished_from_one_that_hangs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(checks_daemon, "_HELLO_SECONDS", 0.3)
    monkeypatch.chdir(tmp_path)  # a path that fits into a socket's name
    (tmp_path / "run").mkdir()
    settings = {"endpoint": "ipc://run/kv.sock"}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("run/kv.sock")
        listening.listen()
        is_problem(checks_daemon.daemon(machine(tmp_path, settings=settings)), "does not answer", "restart")
    is_warning(checks_daemon.daemon(machine(tmp_path, settings=settings)), "dead daemon's socket", "kvserver serve")


def test_a_port_that_another_program_has_is_a_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        other.settimeout(0)
        found = checks_daemon.http_port(machine(tmp_path, settings={"http_port": port}))
        is_problem(found, f"127.0.0.1:{port} is in use", "--http-port 0")
    is_ok(checks_daemon.http_port(machine(tmp_path, settings={"http_port": port})), "is free")
    is_ok(checks_daemon.http_port(machine(tmp_path, settings={"http_port": 0})), "any free one")


def test_an_address_that_is_not_of_this_machine_is_a_problem(tmp_path: Path) -> None:
    found = checks_daemon.http_port(machine(tmp_path, settings={"http_host": "203.0.113.7"}))
    is_problem(found, "203.0.113.7", "--http-host 127.0.0.1")


def interpreter(folder: Path, answer: str) -> str:
    """A program that stands for the Python of some environment."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncat <<'END'\nINFO something of the engine\n{answer}\nEND\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"vllm_error": "libtorch.so: no such file"}', ["does not import", "pip install --upgrade vllm"]),
        ('{"vllm": "0.27.0", "kvserver": "0.1.0"}', ["vLLM 0.27.0 is too old", "vllm>=0.27.1"]),
        ('{"vllm": "0.30.0", "kvserver_error": "ImportError: no"}', ["not in its environment", "pip install"]),
        (
            '{"vllm": "0.30.0", "kvserver": "0.1.0", "kvserver_error": "TypeError: broken"}',
            ["does not import: TypeError: broken"],
        ),
        ("no JSON", ["does not run", "--python PATH"]),
    ],
)
def test_an_environment_of_vllm_that_does_not_fit_is_a_problem(tmp_path: Path, answer: str, words: list[str]) -> None:
    is_problem(checks_service.vllm(machine(tmp_path, python=interpreter(tmp_path, answer))), *words)


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0rc1.dev7+cpu", "0.1.dev1+g1234567"])
def test_a_vllm_that_imports_the_connector_is_well(tmp_path: Path, version: str) -> None:
    answer = f'{{"vllm": "{version}", "kvserver": "{__version__}"}}'
    is_ok(checks_service.vllm(machine(tmp_path, python=interpreter(tmp_path, answer))), f"vLLM {version}")


def test_an_environment_without_vllm_is_a_problem_only_if_it_was_named(tmp_path: Path) -> None:
    answer = """{"vllm_error": "No module named 'vllm'"}"""
    python = interpreter(tmp_path, answer)
    is_problem(checks_service.vllm(machine(tmp_path, python=python)), "no vLLM", "--python PATH")


def test_a_connector_of_another_version_is_a_warning(tmp_path: Path) -> None:
    python = interpreter(tmp_path, '{"vllm": "0.30.0", "kvserver": "9.9"}')
    is_warning(checks_service.vllm(machine(tmp_path, python=python)), "kvserver 9.9", f"{python} -m pip install")


def test_an_interpreter_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    is_problem(checks_service.vllm(machine(tmp_path, python=f"{tmp_path}/none")), "does not run", "--python PATH")


# ---- all of them --------------------------------------------------------------------------------


def test_a_check_that_fails_itself_hides_nothing(tmp_path: Path) -> None:
    def broken(machine: Machine) -> Finding:
        raise KeyError("MemAvailable")

    found = dict(doctor.run_checks(machine(tmp_path), {"broken": broken, "files": checks.open_files}))
    is_warning(found["broken"], "could not be checked", "MemAvailable")
    assert found["files"] == checks.open_files(machine(tmp_path))


def test_a_finding_is_one_line_with_its_fix() -> None:
    shown = doctor.line("GPU", Finding(Level.PROBLEM, "it\nburns", "put it out"))
    assert shown == "problem  GPU            it burns -> put it out"
