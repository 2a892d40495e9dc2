"""What each model has in L1, as a daemon's /metrics shows it: it stays when its engines have disconnected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.daemon import Daemon
from support.registration import identity
from support.worker import Worker, make_keys


def of(daemon: Daemon, model_name: str = "") -> list[float | None]:
    """Bytes, chunks and evicted chunks in L1, of one model or of all."""
    labels = {"model_name": model_name} if model_name else {}
    names = ("model_used_bytes", "model_chunks", "model_evicted_chunks_total")
    return [daemon.metric(f"kvserver_l1_{name}", **labels) for name in names]


def l1(daemon: Daemon) -> list[float | None]:
    return [daemon.metric(f"kvserver_l1_{name}") for name in ("used_bytes", "chunks", "evicted_chunks_total")]


@pytest.mark.parametrize("sizes", [(3, 2), (8, 40)], ids=["both fit", "one evicts the other"])
def test_models_add_up_to_l1_also_without_their_engines(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], sizes: tuple[int, int]
) -> None:
    daemon = make_daemon(l1_size="1MiB")
    assert of(daemon) == [None, None, None]
    for number, chunks in enumerate(sizes):
        worker = make_worker(daemon, model_name=f"model-{number}", identity=identity(model=str(number)))
        for key in make_keys(chunks):
            worker.store([key], worker.blocks_for(1))
        worker.unregister()
    assert daemon.metric("kvserver_instances") == 0
    assert of(daemon) == l1(daemon)
    assert of(daemon, "model-1")[1]
    evicted = of(daemon, "model-0")[2]
    assert (evicted == 0) == (sizes == (3, 2))
    if not evicted:
        assert [of(daemon, f"model-{number}")[1] for number in range(2)] == [3, 2]
    daemon.http("/cache/clear", "POST")
    daemon.wait_for_accounting(used_pages=0)
    assert of(daemon)[:2] == l1(daemon)[:2] == [0, 0]
    assert of(daemon, "model-0")[2] == evicted, "a counter goes on"
    daemon.audit()


def test_chunks_that_no_engine_ever_loaded_are_shown_when_they_are_evicted(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon(l1_size="1MiB")
    worker = make_worker(daemon, model_name="m")
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    worker.load(keys[:1], worker.blocks_for(1))

    def shown() -> list[float | None]:
        names = ("model_evicted_chunks_total", "never_loaded_chunks_total")
        return [daemon.metric(f"kvserver_l1_{name}", model_name="m") for name in names]

    assert shown() == [0, 0]
    for number in range(1000):
        worker.store(make_keys(1, f"more {number}"), worker.blocks_for(1))
        if (evicted := daemon.status()["l1"]["evictions"]) >= 3:
            break
    assert shown() == [evicted, evicted - 1]
