"""Native calls of a process that may make no more threads: they go on with those there are, or raise; the process goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIGESTS = """
import resource, sys
from array import array
from kvserver._native import HostRegion, digest_objects
region, count = HostRegion(64 << 20), 16384
counts, extents = array("I", [1] * count).tobytes(), array("I", [word for page in range(count) for word in (page, 1)]).tobytes()
alone = digest_objects(region, 4096, counts, extents, 1)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * (1 << 20),) * 2)
assert digest_objects(region, 4096, counts, extents, 16) == alone
"""


@pytest.mark.parametrize("left_mib", [4, 20, 80])
def test_digests_are_made_with_the_threads_that_there_are(left_mib: int) -> None:
    """A thread has 8 MiB of stack."""
    ended = subprocess.run([sys.executable, "-c", DIGESTS, str(left_mib)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


DEVICES = """
import resource, sys
from kvserver._native import CpuDevice, GpuDevice, HostRegion
from support.gpu_memory import FAKE_UUID
from support.simulators import FakeGpu
region, gpu, refused = HostRegion(1 << 20), FakeGpu(FAKE_UUID), 0
make = {"cpu": lambda: CpuDevice(region, 4096, 16), "gpu": lambda: GpuDevice(region, 4096, gpu)}[sys.argv[1]]
used = int(open("/proc/self/statm").read().split()[0]) * 4096
for left_mib in range(2, 60, 4):  # each number of threads
    resource.setrlimit(resource.RLIMIT_AS, (used + left_mib * (1 << 20), -1))
    try:
        make()
    except RuntimeError:
        refused += 1
assert refused
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
make()
"""


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_device_whose_threads_cannot_all_be_made_is_refused(device: str) -> None:
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", DEVICES, device]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": tests})
    assert ended.returncode == 0, ended.stderr
