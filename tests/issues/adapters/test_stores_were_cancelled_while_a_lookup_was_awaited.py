"""A request that waited for the daemon's answer counted as one that waits for blocks: stores that kept more than a sixteenth of the
pool were cancelled for it, though blocks were free and it could not use them yet."""

from __future__ import annotations

from late_gpu import LateGpu
from made_up_model import prompt

CHUNK = 64


def test_stores_go_on_while_another_request_awaits_its_answer(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    gpu = LateGpu(on_hold=True)  # stores wait for it, and keep their blocks
    engine = make_engine(
        daemon, gpu=gpu, extra={"kvserver.lookup_timeout_ms": 60_000, "kvserver.store_timeout_ms": 60_000}
    )
    first = engine.add("first", prompt(1, 4 * CHUNK), count=1)
    engine.run(until=lambda: first.finish_reason is not None)
    daemon.freeze()
    second = engine.add("second", prompt(2, 2 * CHUNK))
    for _ in range(3):
        engine.step()
    assert engine.status_of("second") == "WAITING"
    assert engine.free_blocks > engine.num_blocks // 2
    daemon.thaw()
    engine.run(until=lambda: second.finish_reason is not None)
    gpu.release()
    engine.run()
    assert engine.worker.worker.counters["cancelled_stores"] == 0
    assert make_engine(daemon).generate("warm", prompt(1, 4 * CHUNK)).external > 0
