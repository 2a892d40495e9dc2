"""A lane of a GPU that was destroyed while it queued a batch could request one more slot when the thread that makes slots had
ended, and waited for it forever. A daemon ends its copies first; a test of the devices hung, once in very many runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own, for the destructor keeps the interpreter's lock.
PROGRAM = """
from native.rig import L0, Device, Job, flat
from support.daemon import wait_until
from support.simulators import FakeGpu
from kvserver._native import GPU_SLOTS, Direction, Way

KiB = 1 << 10
gpu = FakeGpu("GPU-0", delay_micros=100_000)  # half a second a batch
device = Device(400, gpu=gpu, way=Way.STAGED, batch_bytes=32 * KiB, pinned=True)
l0 = L0(device, flat(100, 16 * KiB))
job = Job(range(1, 97), range(384), 4, 1)
before = gpu.calls.get("record", 0)
gpu.delay_next("record", 200_000, after=GPU_SLOTS)  # the one of the last idle slot: the first is of the copy's begin
device.submit_with_word(Direction.LOAD, l0, job)
wait_until(lambda: gpu.calls.get("record", 0) == before + GPU_SLOTS + 1)
del device.native
print(gpu.faults)
"""


def test_a_device_that_is_destroyed_as_its_lane_grows_ends() -> None:
    tests = Path(__file__).parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tests, env={"PYTHONPATH": str(tests)}, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")
