"""A list named the errors of CUDA that leave a GPU usable, and every other one ended the daemon: so a GPU that an engine had to itself
made it restart for ever, and engines on other GPUs lost their cache with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import mortal_gpus
from support.daemon import GPUS, Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver.protocol import Error
from kvserver.protocol.client import RequestFailed

BUSY = "cudaSetDevice: cudaErrorDevicesUnavailable (46)"


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    """See mortal_gpus.py."""
    return tmp_path / "plans"


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon], plans: Path) -> Daemon:
    return make_daemon(gpu_orders=plans, simulated_gpus=2)


def fail_next(plans: Path, call: str, text: str) -> None:
    mortal_gpus.order(plans, f"fail {call} {text}")
    wait_until(lambda: not plans.exists())


@pytest.mark.parametrize(("call", "text"), [("enter", BUSY), ("open", "cudaIpcOpenMemHandle: odd (999)")])
def test_a_registration_that_cuda_refuses_harms_that_engine_only(
    daemon: Daemon, plans: Path, make_worker: Callable[..., Worker], call: str, text: str
) -> None:
    others = [make_worker(daemon, gpu=GPUS[0]), make_worker(daemon, gpu=GPUS[1])]
    first = daemon.pid
    fail_next(plans, call, text)
    with pytest.raises(RequestFailed, match=re.escape(text)) as refused:
        make_worker(daemon, gpu=GPUS[0])
    assert refused.value.code == "bad_memory"
    for worker in others:
        worker.round_trip()
    make_worker(daemon, gpu=GPUS[0]).round_trip()
    assert daemon.pid == first
    assert [gpu["lost"] for gpu in daemon.status()["gpus"]] == ["", ""]


def test_a_gpu_that_an_engine_has_to_itself_is_refused_until_it_is_free(
    make_daemon: Callable[..., Daemon], plans: Path, make_worker: Callable[..., Worker]
) -> None:
    """From the first call on: there was never a context."""
    plans.write_text(f"fail enter {BUSY}")
    daemon = make_daemon(gpu_orders=plans, simulated_gpus=2)
    for _ in range(3):
        with pytest.raises(RequestFailed, match="46") as refused:
            make_worker(daemon, gpu=GPUS[0])
        assert refused.value.code == "bad_memory"
        wait_until(lambda: daemon.status()["gpus"] == [])  # else the next registration finds this GPU, which fails once
    make_worker(daemon, gpu=GPUS[1]).round_trip()
    plans.unlink()
    make_worker(daemon, gpu=GPUS[0]).round_trip()


def test_event_that_fails_fails_its_copy_and_no_other(
    daemon: Daemon, plans: Path, make_worker: Callable[..., Worker]
) -> None:
    worker = make_worker(daemon, gpu=GPUS[0])
    worker.round_trip()
    fail_next(plans, "wait", "cudaEventSynchronize: odd (999)")
    reply = worker.begin_store(keys := make_keys(1), worker.blocks_for(1)).reply()
    assert isinstance(reply, Error)
    assert (reply.code, reply.message) == ("internal", "cudaEventSynchronize: odd (999)")
    assert worker.lookup(keys) == 0
    worker.round_trip()


def test_memory_that_cannot_be_unmapped_is_logged_and_its_engine_may_come_back(
    daemon: Daemon, plans: Path, make_worker: Callable[..., Worker]
) -> None:
    worker = make_worker(daemon, gpu=GPUS[0])
    fail_next(plans, "close", "cudaIpcCloseMemHandle: odd (999)")
    worker.unregister()
    worker.close()
    wait_until(lambda: "stays allocated until this daemon ends: cudaIpcCloseMemHandle: odd (999)" in daemon.log)
    make_worker(daemon, gpu=GPUS[0]).round_trip()
    daemon.wait_for_accounting(tickets=0)
