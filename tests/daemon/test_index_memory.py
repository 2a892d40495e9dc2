"""What a daemon with its defaults uses for each chunk beside the chunk's bytes: index, observers and telemetry together.

Measured from a quarter of the chunks on, so that what has a bound of its own is there already: samples of ages and lifetimes, the keys
of open requests. The what-if curve, which uses 12 MiB at most, still grows then, and is not counted.
"""

from __future__ import annotations

from typing import Any

from support.daemon import wait_until
from support.memory import Geometry
from support.worker import make_keys

from kvserver.protocol import Plane

PAGE, AT_ONCE = 4096, 1024
CHUNKS, MOST = 100 * AT_ONCE, 350
ONE_BLOCK = Geometry(1 + AT_ONCE, 64, sizes=((1 + AT_ONCE) * 64,), planes=(Plane(0, 0, 64, 64),))


def test_a_daemon_uses_at_most_350_bytes_a_chunk_beside_its_page(make_daemon: Any, make_worker: Any) -> None:
    daemon = make_daemon(l1_size=f"{CHUNKS * PAGE}B")
    worker = make_worker(daemon, geometry=ONE_BLOCK)
    blocks = worker.blocks_for(AT_ONCE)

    def store(first: int, end: int) -> int:
        """The bytes that count, with chunks [0, end) in L1."""
        for number in range(first // AT_ONCE, end // AT_ONCE):
            assert worker.store(make_keys(AT_ONCE, number), blocks).stored == AT_ONCE
            assert worker.lookup(make_keys(AT_ONCE, number)) == AT_ONCE
            wait_until(lambda: daemon.status()["events"]["queue_depth"] == 0)  # events that wait use memory, too
        wait_until(lambda: daemon.status()["what_if"]["listed_chunks"] == end)  # as of the last second
        status = daemon.status()
        assert (status["l1"]["chunks"], status["l1"]["used_bytes"]) == (end, end * PAGE)
        assert 0 < status["what_if"]["memory_bytes"] < 12 << 20
        return int(daemon.rss_bytes() - status["what_if"]["memory_bytes"])

    before = store(0, CHUNKS // 4)
    found = (store(CHUNKS // 4, CHUNKS) - before) / (CHUNKS * 3 / 4) - PAGE
    print(f"{found:.0f} bytes a chunk")
    assert 100 < found <= MOST
