"""KV events of an engine without a model: what its stores state. What it publishes of the daemon: test_kv_events_daemon.py, test_announcer.py."""

from __future__ import annotations

from array import array

import pytest
from kv_events_log import Log, events_on
from made_up_model import BLOCK, prompt

from kvserver.protocol import Store, TakeKVEvents

CHUNK = 64
PER_CHUNK = CHUNK // BLOCK
TOKENS = prompt(1, 5 * CHUNK + 3)


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


# ---- contents ---------------------------------------------------------------------------------


def hashes_of(stores: list[Store]) -> set[bytes]:
    found: set[bytes] = set()
    for store in stores:
        assert store.contents is not None
        assert store.contents.hash_bytes == 32
        found |= {store.contents.hashes[at : at + 32] for at in range(0, len(store.contents.hashes), 32)}
    return found


def test_stores_state_of_their_blocks_what_the_engine_published_of_them(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint, adjust=events_on, max_tokens_per_step=100)
    log = Log(engine)
    engine.generate("r", TOKENS, cache_salt="pepper")
    stored = log.stored("GPU")
    tokens = [token for event in stored for token in event.token_ids]
    stores = tap.of(Store)
    assert len(stores) > 1, "the prompt took several steps"
    assert hashes_of(stores) == {h for event in stored for h in event.block_hashes}
    assert [t for store in stores for t in array("I", store.contents.tokens)] == tokens
    assert stores[0].contents.parent == b""
    assert [store.contents.parent for store in stores[1:]] == [store.contents.hashes[-32:] for store in stores[:-1]]
    assert [store.contents.extra_keys != b"" for store in stores] == [True] + [False] * (len(stores) - 1)


@pytest.mark.parametrize(
    ("daemon_asks", "engine_publishes", "sent"),
    [(True, False, True), (False, True, True), (True, True, True), (False, False, False)],
)
def test_contents_are_sent_where_anyone_wants_them(
    make_daemon, make_tap, make_engine, daemon_asks, engine_publishes, sent
):
    tap = make_tap(make_daemon(**({"kv_events": "on"} if daemon_asks else {})))
    engine = make_engine(tap.endpoint, **({"adjust": events_on} if engine_publishes else {}))
    engine.generate("r", TOKENS)
    assert tap.of(Store)
    assert all((store.contents is not None) == sent for store in tap.of(Store))


def test_of_several_ranks_the_first_one_sends_contents(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon(kv_events="on"))
    engine = make_engine(tap.endpoint, world_size=2)
    engine.generate("r", TOKENS)
    assert sorted(store.contents is not None for store in tap.of(Store)) == [False, True]


def test_chunks_that_cannot_be_described_are_stored_all_the_same(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon(kv_events="on"))
    engine = make_engine(tap.endpoint)
    engine.generate("r", TOKENS, cache_salt="s" * 100_000)
    assert [store.contents for store in tap.of(Store)] == [None]
    assert engine.connector.scheduler.counters["undescribed_chunks"] == 5
    other = make_engine(tap.endpoint)
    assert other.generate("warm", TOKENS, cache_salt="s" * 100_000).external == 5 * CHUNK


def test_a_model_of_windows_shorter_than_a_chunk_is_stored_where_contents_are_wanted(make_daemon, make_engine):
    """Contents are of whole chunks, also where the objects of the first group are not."""
    daemon = make_daemon(kv_events="on")
    make_engine(daemon, window=20).generate("cold", TOKENS)
    assert make_engine(daemon, window=20).generate("warm", TOKENS).external == 5 * CHUNK


def test_a_store_of_a_very_long_prompt_goes_in_parts(make_daemon, make_tap, make_engine, monkeypatch):
    """A message has a limit, which hashes and tokens would soon reach."""
    monkeypatch.setattr("kvserver.adapters.vllm.store_plans._STORE_TOKENS", 2 * CHUNK)
    daemon = make_daemon(kv_events="on")
    tap = make_tap(daemon)
    make_engine(tap.endpoint).generate("r", TOKENS)
    assert [len(store.contents.tokens) // 4 for store in tap.of(Store)] == [2 * CHUNK, 2 * CHUNK, CHUNK]
    assert make_engine(daemon).generate("warm", TOKENS).external == 5 * CHUNK


# ---- the daemon's events ------------------------------------------------------------------------


def test_an_engine_without_kv_events_requests_none(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon())
    make_engine(tap.endpoint).generate("r", TOKENS)
    assert tap.of(Store)
    assert not tap.of(TakeKVEvents)


def test_an_idle_engine_does_not_step_for_events(make_daemon, make_tap, make_engine):
    """They are published at its next step."""
    tap = make_tap(make_daemon(kv_events="on"))
    engine = make_engine(tap.endpoint, adjust=events_on)
    engine.generate("r", TOKENS)
    assert tap.of(TakeKVEvents)
    assert not engine.connector.has_pending_push_work()
    assert not engine.busy
