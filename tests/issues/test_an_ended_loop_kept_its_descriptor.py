"""The loop's eventfd was never closed: a process with many servers, as a test's, ran out of descriptors."""

from __future__ import annotations

import gc
import os

from support.server import L1_BYTES, PAGE_BYTES, running_server

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices


def eventfds() -> set[str]:
    return {fd for fd in os.listdir("/proc/self/fd") if "eventfd" in os.path.realpath(f"/proc/self/fd/{fd}")}


def test_a_server_that_ended_leaves_no_eventfd() -> None:
    gc.collect()
    before = eventfds()
    for _ in range(2):
        region = HostRegion(L1_BYTES)
        with running_server(Devices(CpuDevice(region, PAGE_BYTES, 1))):
            assert len(eventfds()) > len(before)
    gc.collect()
    assert eventfds() <= before
