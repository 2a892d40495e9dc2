"""deploy/kubernetes: the daemon's containers run as they are written, without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.containers import OVERLAYS, Container, built, container, forbidden
from support.daemon import fetch, wait_until
from support.pods import Pod

# As a container of its own runs it: the same user and folder, its own /dev/shm, no common namespace.
ENGINE = """
import sys
sys.path.insert(0, sys.argv[1])
from support.worker import Worker
worker = Worker(sys.argv[2])
worker.round_trip()
print("round trip", flush=True)
sys.stdin.read()
"""


FORBIDDEN = forbidden()
needs_containers = pytest.mark.skipif(bool(FORBIDDEN), reason=f"Bubblewrap may not make containers here: {FORBIDDEN}")


@pytest.fixture(params=["plain", pytest.param("contained", marks=needs_containers)])
def contained(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "contained")


@pytest.fixture(params=["sidecar", "node"])
def pod(request: pytest.FixtureRequest, contained: bool) -> Iterator[Pod]:
    made = Pod(request.param, contained)
    yield made
    made.close()


def test_daemon_container_serves_an_engine_as_its_manifest_is_written(pod: Pod, contained: bool) -> None:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if name in pod.container.spec:
            pod.wait_for(name)
    code, text = wait_until(lambda: fetch(f"http://127.0.0.1:{pod.port}/metrics"))
    assert (code, "kvserver_ready 1.0" in text) == (200, True)
    assert fetch(f"http://127.0.0.1:{pod.port}/status")[0] == 401, "the token is required"
    environment = {"PATH": "/usr/bin:/bin"}
    script = [sys.executable, "-c", ENGINE, str(Path(__file__).parents[1])]
    if contained:
        engine = container(built(OVERLAYS / "node"), "vllm")
        spec = {**pod.container.spec, "command": [*script, pod.environment["KVSERVER_ENDPOINT"]],
                "volumeMounts": [engine.mounts["socket"]]}  # fmt: skip
        words = Container(pod.container.pod, spec).command(pod.folders, environment)
        words.insert(1, "--unshare-net")
    else:
        words = [*script, pod.mapped(pod.environment["KVSERVER_ENDPOINT"])]
    engine_process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert engine_process.stdout is not None
        assert engine_process.stdout.readline() == "round trip\n", pod.log
        assert instances(pod) == 1
    finally:
        engine_process.kill()
        engine_process.communicate()
    wait_until(lambda: instances(pod) == 0, what="the end of the lifeline is seen in another pid namespace")
    assert pod.end() < pod.container.pod["terminationGracePeriodSeconds"]


def instances(pod: Pod) -> float:
    found = re.search(r"^kvserver_instances ([\d.]+)$", fetch(f"http://127.0.0.1:{pod.port}/metrics")[1], re.M)
    assert found is not None
    return float(found[1])


@needs_containers
def test_the_root_of_the_container_is_read_only_and_its_user_the_pods(tmp_path: Path) -> None:
    """So that the test above means something."""
    daemon = container(built(OVERLAYS / "node"), "kvserver")
    spec = {
        **daemon.spec,
        "command": [
            "sh",
            "-c",
            "id -u; touch /etc/x /run/x /tmp/x; touch /run/kvserver/x && echo own; grep Cap /proc/self/status",
        ],
    }
    folders = dict.fromkeys(daemon.mounts, tmp_path)
    shown = subprocess.run(
        Container(daemon.pod, spec).command(folders, {"PATH": os.environ["PATH"]}), capture_output=True, text=True
    )
    lines = shown.stdout.split()
    assert lines[:2] == ["1000", "own"]
    assert set(lines[3::2]) == {"0" * 16}
    assert shown.stderr.count("Read-only file system") == 3


def test_the_folder_of_a_node_is_made_with_the_one_capability_that_is_given(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    first = container(built(OVERLAYS / "node"), "folder")
    assert first.setting("capabilities") == {"drop": ["ALL"], "add": ["CHOWN"]}
    where = first.mounts["socket"]["mountPath"]
    words = [word.replace(where, str(tmp_path)) for word in first.spec["command"]]
    few = ["setpriv", "--bounding-set=-all,+chown", "--inh-caps=-all", "--no-new-privs"]
    for _ in range(2):  # a second pod finds the folder of the first
        subprocess.run([*few, *words], check=True, timeout=20)
    found = (tmp_path / "socket").stat()
    daemon = container(built(OVERLAYS / "node"), "kvserver")
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (
        daemon.setting("runAsUser"),
        daemon.setting("runAsGroup"),
        0o700,
    )
    assert Path(daemon.environment["KVSERVER_ENDPOINT"].removeprefix("ipc://")).parent == Path(where) / "socket"
