"""L1's memory: the pages it is made of and the nodes it lies on, as the kernel reports them."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
from support.simulators import FakeDevice

from kvserver._native import CpuDevice, Direction, HostRegion
from kvserver.config.capacity import free_huge_bytes

from .rig import L0, Device, Job, flat

MiB = 1 << 20
HUGE = 2 * MiB
NODE = int(next(Path("/sys/devices/system/node").glob("node[0-9]*")).name[4:])  # any one
reserved = pytest.mark.skipif(free_huge_bytes(HUGE) < 8 * HUGE, reason="no huge pages: sysctl vm.nr_hugepages=16")


def mapped_bytes(flag: str) -> int:
    """Of this process, with this one of VmFlags. The kernel joins neighbours whose flags are equal, so no mapping is a region's own."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?VmFlags: ([^\n]*)", text, re.MULTILINE | re.DOTALL)
    return sum(int(last, 16) - int(first, 16) for first, last, flags in found if flag in flags.split())


def mapped_shared_bytes() -> int:
    """Memory of files on tmpfs that this process maps."""
    (kib,) = re.findall(r"^Pss_Shmem:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(kib) << 10


class TestNodes:
    def test_memory_is_the_kernels_to_place_by_default(self) -> None:
        assert HostRegion(MiB).numa_policy == ("default", [])
        assert HostRegion(MiB).numa_error == ""

    @pytest.mark.parametrize(("bound", "mode"), [(False, "interleave"), (True, "bind")])
    def test_kernel_reports_the_numa_policy_of_the_region(self, bound: bool, mode: str) -> None:
        region = HostRegion(MiB, nodes=[NODE], bound=bound)
        if "not permitted" in region.numa_error:
            pytest.skip("this container forbids mbind")
        assert (region.numa_policy, region.numa_error) == ((mode, [NODE]), "")

    @pytest.mark.parametrize("nodes", [[1023], [1024], [NODE, 1 << 30]])
    def test_a_policy_that_the_kernel_refuses_is_reported_and_the_memory_works(self, nodes: list[int]) -> None:
        region = HostRegion(MiB, nodes=nodes, bound=True)
        assert region.numa_error or set(region.numa_policy[1]) < set(nodes)
        device = FakeDevice(region, 4096, seed=1)
        assert len(set(device.read_l1(255))) > 16


class TestPages:
    @pytest.mark.parametrize(("transparent", "flag"), [(True, "hg"), (False, "nh")])
    def test_transparent_pages_are_advised_for_or_against(self, transparent: bool, flag: str) -> None:
        gc.collect()
        before = mapped_bytes(flag)
        regions = [HostRegion(34 * MiB + 12288, transparent=transparent) for _ in range(2)]
        assert mapped_bytes(flag) - before == 2 * (34 * MiB + 12288), "the kernel knows no transparent pages"
        del regions

    def test_huge_pages_that_are_not_reserved_are_refused_when_mapped(self) -> None:
        with pytest.raises(RuntimeError, match=r"in huge pages: "):
            HostRegion(free_huge_bytes(HUGE) + HUGE, huge_page_bytes=HUGE)

    def test_populated_bytes_of_a_file_have_memory_and_others_have_none(self) -> None:
        fd = os.memfd_create("l1")
        os.ftruncate(fd, 8 * MiB)
        region = HostRegion(8 * MiB, transparent=False, fd=fd)
        assert region.populate(4096, 2 * MiB)
        assert os.fstat(fd).st_blocks * 512 == 2 * MiB
        assert os.pread(fd, 3 * MiB, 0) == bytes(3 * MiB)
        with pytest.raises(ValueError, match="beyond L1"):
            region.populate(6 * MiB, 2 * MiB + 1)
        os.ftruncate(fd, 4 * MiB)
        assert not region.populate(0, 8 * MiB), "no memory, and no signal"
        os.close(fd)

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_pages_of_a_file_that_are_unmapped_keep_their_bytes(self, threads: int) -> None:
        fd, content = os.memfd_create("l1"), os.urandom(MiB)
        os.ftruncate(fd, 130 * MiB)  # three parts
        region = HostRegion(130 * MiB, transparent=False, fd=fd)
        assert region.populate(0, 130 * MiB)
        os.pwrite(fd, content, 129 * MiB)
        before = mapped_shared_bytes()
        region.unmap_pages(threads)
        assert before - mapped_shared_bytes() >= 130 * MiB
        assert os.pread(fd, MiB, 129 * MiB) == content
        os.close(fd)

    @pytest.mark.parametrize("page_bytes", [1, 3, 4096 + 1, 3 * MiB, (1 << 64) - 1])
    def test_impossible_huge_page_size_is_refused(self, page_bytes: int) -> None:
        with pytest.raises(RuntimeError, match="huge page"):
            HostRegion(MiB, huge_page_bytes=page_bytes)

    @reserved
    def test_reserved_pages_are_allocated_at_once_and_freed(self) -> None:
        gc.collect()
        before, mapped = free_huge_bytes(HUGE), mapped_bytes("ht")
        region = HostRegion(3 * HUGE - 5, huge_page_bytes=HUGE)
        assert region.size == 3 * HUGE - 5
        assert free_huge_bytes(HUGE) == before - 3 * HUGE
        assert mapped_bytes("ht") - mapped == 3 * HUGE
        del region
        assert free_huge_bytes(HUGE) == before

    @reserved
    @pytest.mark.parametrize("nodes", [[], [NODE]])
    def test_copies_go_through_reserved_pages_to_their_last_byte(self, nodes: list[int]) -> None:
        device = Device(8 * HUGE // 4096)
        device.native = CpuDevice(HostRegion(8 * HUGE, HUGE, False, nodes, False), 4096, 2)
        l0 = L0(device, flat(3, HUGE))
        content = l0.memory.blocks([1, 2])
        job = Job([1, 2], [*range(512), *range(7 * 512, 8 * 512)], 512, 1)
        assert device.wait(device.submit(Direction.STORE, l0, job)).bytes == 2 * HUGE
        l0.memory.fill()
        assert device.wait(device.submit(Direction.LOAD, l0, job)).bytes == 2 * HUGE
        assert l0.memory.blocks([1, 2]) == content
