"""Which pages and nodes L1 uses, on machines made up of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvserver.config import Placement, Settings, choose_l1, gpu_node, interleaved_nodes
from kvserver.config.placement import memory_nodes, node_cpus
from kvserver.config.settings import GiB, KiB, MiB
from kvserver.protocol import ConfigError


class Machine:
    """A root folder with ordinary memory; huge pages and nodes as a test writes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemAvailable: {8 * GiB // KiB} kB")

    def write(self, path: str, text: object) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def huge(self, page_bytes: int, free: int, promised: int = 0, total: int | None = None, node: str = "") -> None:
        folder = f"devices/system/node/{node}" if node else "kernel/mm"
        base = f"sys/{folder}/hugepages/hugepages-{page_bytes // KiB}kB"
        self.write(f"{base}/free_hugepages", free)
        self.write(f"{base}/nr_hugepages", free if total is None else total)
        if not node:
            self.write(f"{base}/resv_hugepages", promised)

    def nodes(self, count: int, allowed: str = "", has_cpu: str = "", free: int = 8 * GiB) -> None:
        everywhere = f"0-{count - 1}"
        for node in range(count):
            text = f"Node {node} MemFree: {free // 2 // KiB} kB\nNode {node} Inactive(file): {free // 2 // KiB} kB\n"
            self.write(f"sys/devices/system/node/node{node}/meminfo", text)
        self.write("sys/devices/system/node/has_memory", everywhere)
        self.write("sys/devices/system/node/has_cpu", has_cpu or everywhere)
        self.write("proc/self/status", f"Name:\tx\nMems_allowed_list:\t{allowed or everywhere}")

    def choose(self, own_policy: bool = False, **settings: Any) -> tuple[int, Placement]:
        return choose_l1(Settings(**settings), self.root, own_policy)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class TestPages:
    def test_without_reserved_pages_auto_uses_transparent_ones(self, machine: Machine) -> None:
        assert machine.choose() == (2 * GiB, Placement())
        machine.huge(2 * MiB, free=0)
        assert machine.choose(l1_size="1GiB")[1].pages == "transparent"

    def test_auto_uses_reserved_pages_if_all_of_l1_fits(self, machine: Machine) -> None:
        machine.huge(2 * MiB, free=512)
        assert machine.choose(l1_size="1GiB") == (GiB, Placement(2 * MiB, transparent=False))
        assert machine.choose(l1_size="1025MiB")[1].pages == "transparent"

    def test_pages_that_are_promised_to_others_are_not_free(self, machine: Machine) -> None:
        machine.huge(2 * MiB, free=512, promised=1)
        assert machine.choose(l1_size="1GiB")[1].pages == "transparent"
        assert machine.choose(l1_size="1022MiB")[1].pages == "2MiB"

    def test_auto_uses_large_pages_only_if_it_fills_them(self, machine: Machine) -> None:
        machine.huge(GiB, free=4)
        machine.huge(2 * MiB, free=2048)
        assert machine.choose(l1_size="3GiB")[1].pages == "1GiB"
        assert machine.choose(l1_size="2.5GiB")[1].pages == "2MiB"

    def test_reserved_pages_hold_an_l1_that_ordinary_memory_would_not(self, machine: Machine) -> None:
        machine.huge(GiB, free=20)
        assert machine.choose(l1_size="20GiB") == (20 * GiB, Placement(GiB, transparent=False))
        with pytest.raises(ConfigError, match="MemAvailable"):
            machine.choose(l1_size="20GiB", l1_huge_pages="transparent")

    @pytest.mark.parametrize(("setting", "transparent"), [("transparent", True), ("off", False)])
    def test_reserved_pages_are_left_to_others_if_the_setting_names_another_kind(
        self, machine: Machine, setting: str, transparent: bool
    ) -> None:
        machine.huge(2 * MiB, free=5000)
        assert machine.choose(l1_huge_pages=setting) == (2 * GiB, Placement(0, transparent))
        assert machine.choose(l1_huge_pages=setting)[1].pages == setting

    def test_an_explicit_size_that_cannot_be_had_names_the_command(self, machine: Machine) -> None:
        machine.huge(2 * MiB, free=100, total=130)
        with pytest.raises(ConfigError) as refused:
            machine.choose(l1_size="1GiB", l1_huge_pages="2MiB")
        for words in (
            "--l1-huge-pages 2MiB",
            "needs 512",
            "100 are free",
            "echo 542 | sudo tee /proc/sys/vm/nr_hugepages",
        ):
            assert words in str(refused.value)

    def test_pages_of_another_size_have_a_file_of_their_own(self, machine: Machine) -> None:
        with pytest.raises(ConfigError, match=r"echo 2 \| sudo tee .*hugepages-1048576kB/nr_hugepages"):
            machine.choose(l1_size="1.5GiB", l1_huge_pages="1GiB")

    def test_auto_with_an_explicit_page_size_uses_all_free_reserved_pages(self, machine: Machine) -> None:
        machine.huge(2 * MiB, free=700, promised=100)
        assert machine.choose(l1_huge_pages="2MiB")[0] == 1200 * MiB
        machine.huge(2 * MiB, free=0)
        with pytest.raises(ConfigError, match="nr_hugepages"):
            machine.choose(l1_huge_pages="2MiB")

    @pytest.mark.parametrize(
        ("group", "folder", "limit", "usage"),
        [("0::/kv", "kv", "max", "current"), ("7:hugetlb:/kv", "hugetlb/kv", "limit_in_bytes", "usage_in_bytes")],
    )
    def test_a_limit_of_the_cgroup_counts_because_the_kernel_would_kill(
        self, machine: Machine, group: str, folder: str, limit: str, usage: str
    ) -> None:
        machine.huge(2 * MiB, free=5000)
        machine.write("proc/self/cgroup", group)
        machine.write(f"sys/fs/cgroup/{folder}/hugetlb.2MB.{limit}", GiB)
        machine.write(f"sys/fs/cgroup/{folder}/hugetlb.2MB.{usage}", 2 * MiB)
        assert machine.choose(l1_size="1GiB")[1].pages == "transparent"
        assert machine.choose(l1_size="1022MiB")[1].pages == "2MiB"


class TestNodes:
    def test_l1_of_a_machine_with_one_node_is_bound_to_no_node(self, machine: Machine) -> None:
        machine.nodes(1)
        assert machine.choose()[1].nodes == ()

    def test_a_machine_that_shows_no_nodes_is_left_alone(self, machine: Machine) -> None:
        assert machine.choose()[1].nodes == ()

    def test_several_nodes_share_l1(self, machine: Machine) -> None:
        machine.nodes(2)
        assert machine.choose()[1] == Placement(nodes=(0, 1))

    def test_only_nodes_that_this_process_may_use_share_l1(self, machine: Machine) -> None:
        machine.nodes(4, allowed="0,2-3")
        assert machine.choose()[1].nodes == (0, 2, 3)
        machine.nodes(4, allowed="3")
        assert machine.choose()[1].nodes == ()

    def test_memory_without_processors_is_left_to_its_gpu(self, machine: Machine) -> None:
        machine.nodes(6, has_cpu="0-1")
        assert machine.choose()[1].nodes == (0, 1)
        assert interleaved_nodes(machine.root) == [0, 1]
        assert memory_nodes(machine.root) == [0, 1, 2, 3, 4, 5]

    def test_a_process_that_was_bound_by_its_operator_stays_so(self, machine: Machine) -> None:
        machine.nodes(2)
        assert machine.choose(own_policy=True)[1].nodes == ()

    def test_l1_with_numa_off_is_bound_to_no_node(self, machine: Machine) -> None:
        machine.nodes(2)
        assert machine.choose(l1_numa="off")[1].nodes == ()

    def test_l1_may_stay_on_one_node(self, machine: Machine) -> None:
        machine.nodes(2)
        assert machine.choose(l1_numa="bind:1")[1] == Placement(nodes=(1,), bound=True)

    @pytest.mark.parametrize("node", [2, 9999])
    def test_a_node_that_is_not_there_is_refused(self, machine: Machine, node: int) -> None:
        machine.nodes(2)
        with pytest.raises(ConfigError, match=rf"--l1-numa bind:{node}.*\[0, 1\]"):
            machine.choose(l1_numa=f"bind:{node}")

    def test_a_node_that_is_too_full_is_refused(self, machine: Machine) -> None:
        machine.nodes(2, free=GiB)
        with pytest.raises(ConfigError, match=f"node 1 has {GiB} left"):
            machine.choose(l1_numa="bind:1", l1_size="1025MiB")
        assert machine.choose(l1_numa="bind:1", l1_size="1GiB")[0] == GiB

    def test_a_bound_l1_uses_only_the_huge_pages_of_its_node(self, machine: Machine) -> None:
        machine.nodes(2)
        machine.huge(2 * MiB, free=1000)
        machine.huge(2 * MiB, free=400, node="node1")
        machine.huge(2 * MiB, free=600, node="node0")
        assert machine.choose(l1_numa="bind:1", l1_size="1GiB")[1].pages == "transparent"
        assert machine.choose(l1_numa="bind:0", l1_size="1GiB")[1].pages == "2MiB"
        with pytest.raises(ConfigError, match=r"echo 512 \| sudo tee .*/node1/hugepages"):
            machine.choose(l1_numa="bind:1", l1_size="1GiB", l1_huge_pages="2MiB")


class TestGpus:
    def test_a_gpu_is_next_to_the_node_of_its_bus(self, machine: Machine) -> None:
        machine.write("sys/bus/pci/devices/0000:1a:00.0/numa_node", 1)
        assert gpu_node("0000:1A:00.0", machine.root) == 1, "the driver may write capitals"
        assert gpu_node("0000:1a:00.0", machine.root) == 1

    @pytest.mark.parametrize("text", ["-1", "", "none"])
    def test_a_gpu_may_be_next_to_no_node(self, machine: Machine, text: str) -> None:
        machine.write("sys/bus/pci/devices/0000:1a:00.0/numa_node", text)
        assert gpu_node("0000:1a:00.0", machine.root) is None

    def test_a_machine_without_that_bus_is_next_to_no_node(self, machine: Machine) -> None:
        assert gpu_node("0000:1a:00.0", machine.root) is None

    @pytest.mark.parametrize(
        ("text", "cpus"),
        [("0-3,8-11", {0, 1, 2, 3, 8, 9, 10, 11}), ("5", {5}), ("", set())],
        ids=["two", "one", "none"],
    )
    def test_processors_of_a_node_are_read_from_its_list(self, machine: Machine, text: str, cpus: set[int]) -> None:
        machine.write("sys/devices/system/node/node1/cpulist", text)
        assert node_cpus(1, machine.root) == cpus

    def test_absent_node_has_no_processors(self, machine: Machine) -> None:
        assert node_cpus(7, machine.root) == set()

    def test_l1_is_spread_over_all_nodes_wherever_the_gpus_are(self, machine: Machine) -> None:
        machine.nodes(2)
        machine.write("sys/bus/pci/devices/0000:1a:00.0/numa_node", 1)
        assert machine.choose(gpus="auto")[1].nodes == (0, 1)
