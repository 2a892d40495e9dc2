"""The first thing to run on a machine with a GPU: in a few seconds, whether copies to memory of this process work at all.

Prints each step before it is done, so that one that hangs or kills is seen. Exits with 0 if every byte arrived, with 3 if
there is no GPU. The memory is
mapped by its descriptor, as another process's is; with KVSERVER_VMM=child another process makes it. Needs no torch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from native.rig import L0, Device, Job, l0_after_load, l1_after_store
from support.gpu_memory import BY_CHILD, SIMULATED, by_fd, found, open_gpu
from support.memory import awkward

from kvserver._native import Outcome, Way, built_with_cuda

began = time.monotonic()


def step(what: str) -> None:
    print(f"{time.monotonic() - began:5.1f} s  {what}", flush=True)


def copy(way: Way, pinned: bool) -> None:
    device = Device(64, 509, gpu=open_gpu(), way=way, batch_bytes=30_000, pinned=pinned, allocate=by_fd)
    step("  map it")
    l0 = L0(device, awkward(24))
    l1 = device.fill_l1()
    job = Job([3, 17, 5, 20, 9], range(63), 21, 2, 1)
    step("  store")
    end = device.store(l0, job)
    assert end.outcome == Outcome.DONE, end.what
    after = device.read_l1()
    assert after == l1_after_store(l1, job, l0.memory, 509), "a store moved other bytes"
    step("  load")
    l0.memory.fill()
    expected = l0_after_load(after, job, l0.memory, 509)
    end = device.load(l0, job)
    assert end.outcome == Outcome.DONE, end.what
    assert l0.memory.image() == expected, "a load moved other bytes"


def main() -> None:
    step(
        f"smoke, {'SIMULATED' if SIMULATED else 'a real GPU'}, memory made by {'a child' if BY_CHILD else 'this process'}"
    )
    if not SIMULATED and not built_with_cuda():
        sys.exit("kvserver was built without CUDA: there was no working nvcc")
    uuid, why_not = found()
    if not uuid:
        step(why_not)
        sys.exit(3)
    step(f"GPU {uuid}")
    for way in (Way.DMA, Way.STAGED):
        for pinned in (False, True):
            step(f"{way.name.lower()}, L1 {'pinned' if pinned else 'not pinned'}")
            copy(way, pinned)
    step("all bytes arrived")


if __name__ == "__main__":
    main()
