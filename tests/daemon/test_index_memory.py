"""What a daemon with its defaults uses for each chunk beside the chunk's bytes: index, observers and telemetry together."""

from __future__ import annotations

from support.daemon import wait_until
from support.memory import Geometry
from support.worker import make_keys

from kvserver.protocol import Plane

PAGE, AT_ONCE = 4096, 1024
CHUNKS, MOST = 100 * AT_ONCE, 350
ONE_BLOCK = Geometry(1 + AT_ONCE, 64, sizes=((1 + AT_ONCE) * 64,), planes=(Plane(0, 0, 64, 64),))


def test_a_daemon_uses_at_most_350_bytes_a_chunk_beside_its_page(make_daemon, make_worker) -> None:
    daemon = make_daemon(l1_size=f"{CHUNKS * PAGE}B")
    worker = make_worker(daemon, geometry=ONE_BLOCK)
    blocks = worker.blocks_for(AT_ONCE)
    before = daemon.rss_bytes()
    for number in range(CHUNKS // AT_ONCE):
        assert worker.store(make_keys(AT_ONCE, number), blocks).stored == AT_ONCE
        assert worker.lookup(make_keys(AT_ONCE, number)) == AT_ONCE
    wait_until(lambda: daemon.status()["events"]["queue_depth"] == 0)
    status = daemon.status()
    assert (status["l1"]["chunks"], status["l1"]["used_bytes"]) == (CHUNKS, CHUNKS * PAGE)
    found = (daemon.rss_bytes() - before) / CHUNKS - PAGE
    print(f"{found:.0f} bytes a chunk")
    assert 100 < found <= MOST
