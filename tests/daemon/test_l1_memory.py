"""The pages and nodes of L1, as a daemon takes and shows them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from support.daemon import Daemon
from support.worker import Worker

from kvserver._native import process_numa_policy
from kvserver.config import interleaved_nodes
from kvserver.config.capacity import free_huge_bytes
from kvserver.config.placement import memory_nodes
from kvserver.config.settings import MiB

HUGE = 2 * MiB
THE_KERNEL = "the kernel chooses the nodes"  # in the log where mbind is refused
Make = Callable[..., Daemon]
reserved = pytest.mark.skipif(free_huge_bytes(HUGE) < 8 * HUGE, reason="no huge pages: sysctl vm.nr_hugepages=16")


def test_status_shows_pages_and_nodes(make_daemon: Make) -> None:
    daemon = make_daemon(l1_huge_pages="transparent")
    l1, nodes = daemon.status()["l1"], interleaved_nodes()
    spread = len(nodes) > 1 and THE_KERNEL not in daemon.log and process_numa_policy()[0] == "default"
    assert (l1["huge_pages"], l1["numa_nodes"]) == ("transparent", nodes if spread else [])
    l1 = make_daemon(l1_huge_pages="off", l1_numa="off").status()["l1"]
    assert (l1["huge_pages"], l1["numa_nodes"]) == ("off", [])


def test_l1_may_stay_on_one_node(make_daemon: Make) -> None:
    node = memory_nodes()[0]
    daemon = make_daemon(l1_numa=f"bind:{node}")
    if THE_KERNEL in daemon.log:
        assert daemon.status()["l1"]["numa_nodes"] == []
        pytest.skip("this container forbids mbind")
    assert daemon.status()["l1"]["numa_nodes"] == [node]


def test_huge_pages_that_cannot_be_had_are_reported_with_the_command(make_daemon: Make) -> None:
    size = free_huge_bytes(HUGE) + HUGE
    daemon = make_daemon(start=False, l1_huge_pages="2MiB", l1_size=size)
    ended = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    for words in ("--l1-huge-pages 2MiB", "/proc/sys/vm/nr_hugepages", "sudo tee"):
        assert words in line


@reserved
@pytest.mark.parametrize("setting", ["2MiB", "auto"])
def test_reserved_huge_pages_serve(make_daemon: Make, setting: str) -> None:
    before = free_huge_bytes(HUGE)
    daemon = make_daemon(l1_huge_pages=setting, l1_size=8 * HUGE)
    assert daemon.status()["l1"]["huge_pages"] == "2MiB"
    assert free_huge_bytes(HUGE) == before - 8 * HUGE
    with Worker(daemon.endpoint) as worker:
        worker.round_trip()
