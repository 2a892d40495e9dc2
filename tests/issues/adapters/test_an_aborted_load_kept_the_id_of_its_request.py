"""A request that is aborted during its load keeps its id in vLLM until the load has ended. Beside a daemon that hung that was the load's
timeout, and a client that used the id again meanwhile ended the engine core, where ids are not made unique by vLLM."""

from __future__ import annotations

import pytest
from made_up_model import prompt
from support.daemon import wait_until

from kvserver.adapters.common.specs import ids_of
from kvserver.adapters.vllm.support import TransferResults

pytestmark = pytest.mark.skipif(TransferResults is None, reason="this vLLM lets no block be kept out of use")

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_the_id_of_a_request_that_was_aborted_during_its_load_is_soon_free(
    make_daemon, make_engine, asynchronous, ranks
):
    daemon = make_daemon(pauses=True)
    make_engine(daemon, world_size=ranks).generate("cold", TOKENS)
    extra = {"kvserver.load_timeout_ms": 60_000}
    engine = make_engine(daemon, asynchronous=asynchronous, world_size=ranks, extra=extra)
    with daemon.paused_copies():
        engine.begin_load("warm", TOKENS)
        written = set(ids_of(engine.loads[0]))
        daemon.freeze()
        engine.lose_patience()
        engine.abort("warm")
        engine.run(5, until=lambda: engine.status_of("warm") == "GONE")  # of a timeout of 60 s
        assert engine.free_blocks <= engine.num_blocks - 1 - len(written), "the daemon may still write them"
        again = engine.add("warm", prompt(2, CHUNK))
        engine.run(5, until=lambda: again.finish_reason is not None)
        assert again.right
        assert not engine.use_free_blocks(3) & written
    daemon.thaw()
    wait_until(lambda: engine.generate_free("tick") == engine.num_blocks - 1, 10, "the blocks come back")


def test_a_cancel_that_the_daemon_acknowledges_keeps_no_block_out_of_use(make_daemon, make_engine):
    daemon = make_daemon(copy_delay_us=5_000)
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon)
    engine.begin_load("warm", TOKENS)
    engine.abort("warm")
    engine.run()
    wait_until(lambda: engine.generate_free("tick") == engine.num_blocks - 1, 10, "all blocks are free")
    assert engine.connector.scheduler.quarantined_blocks == 0
