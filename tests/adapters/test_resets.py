"""reset_prefix_cache(reset_connector=True): the weights may have changed in place."""

from __future__ import annotations

import pytest
from made_up_model import continuation, prompt

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)


def reset(engine, weights: int, version: str | None = None, running: bool = False) -> bool:
    """What an operator does who trains: other weights, then the reset."""
    engine.weights = weights
    if version is not None:
        engine.config.kv_transfer_config.kv_connector_extra_config["kvserver.weights_version"] = version
    return engine.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True)


def generate(engine, name, tokens=TOKENS, count=4):
    answer = engine.add(name, tokens, count)
    engine.run()
    assert answer.tokens == continuation(tokens, count, engine.weights)
    return answer


def test_after_a_reset_nothing_old_is_found(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon)
    generate(engine, "old")
    assert reset(engine, weights=7)
    answer = generate(engine, "new")
    assert (answer.local, answer.external) == (0, 0)


def test_after_a_reset_the_engine_shares_with_itself_only(make_daemon, make_engine):
    daemon = make_daemon()
    engine, other = make_engine(daemon), make_engine(daemon)
    generate(engine, "old")
    reset(engine, weights=7)
    generate(engine, "new")
    generate(engine, "evicts", prompt(2, 99 * 16 - 10))  # so that it has nothing of its own
    assert generate(engine, "again").external == 3 * CHUNK
    assert generate(other, "unchanged").external == 3 * CHUNK
    reset(other, weights=7)
    assert generate(other, "reset too").external == 0


def test_every_reset_begins_an_epoch_of_its_own(make_daemon, make_engine):
    engine = make_engine(make_daemon())
    for weights in (7, 9, 11):
        assert reset(engine, weights=weights)
        answer = generate(engine, f"with {weights}")
        assert (answer.local, answer.external) == (0, 0)


def test_a_weights_version_shares_again(make_daemon, make_engine):
    daemon = make_daemon()
    engine, other, old = make_engine(daemon), make_engine(daemon), make_engine(daemon)
    generate(engine, "old")
    for one in (engine, other):
        assert reset(one, weights=7, version="step-7")
    generate(engine, "new")
    assert generate(other, "warm").external == 3 * CHUNK
    assert generate(old, "old").external == 3 * CHUNK
    assert reset(other, weights=9)  # the same version once more does not name these weights
    assert generate(other, "newer").external == 0


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_running_requests_begin_anew(make_daemon, make_engine, asynchronous):
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous)
    answer = engine.add("r", TOKENS, count=2 * CHUNK)
    engine.run(until=lambda: len(answer.tokens) > CHUNK)
    engine.finish_steps()  # vLLM refuses while a step is under way
    assert reset(engine, weights=7, running=True)
    engine.run()
    old = len(answer.tokens) - 1
    while answer.tokens[:old] != continuation(TOKENS, old):
        old -= 1
    tokens = TOKENS + answer.tokens[:old]
    assert answer.tokens[old:] == continuation(tokens, 2 * CHUNK - old, 7)
    reset(engine, weights=7, version="seven")
    generate(engine, "next")


def test_what_was_computed_before_a_reset_is_not_stored_after_it(make_daemon, make_engine):
    """A reset that leaves requests running leaves their KV too, of the weights before."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon)
    answer = engine.add("r", TOKENS, count=2 * CHUNK)
    engine.run(until=lambda: len(answer.tokens) > 10)
    before = len(engine.stores)
    reset(engine, weights=0, version="v2")
    engine.run()
    assert len(engine.stores) == before
    assert generate(engine, "local").local > 0
    assert len(engine.stores) == before, "what vLLM kept in its own cache is of the weights before, too"

    assert reset(engine, weights=9, version="v3")
    generate(engine, "new")
    assert len(engine.stores) > before


def test_a_load_under_way_at_a_reset_is_given_up(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon)
    with daemon.paused_copies():
        answer = engine.add("warm", TOKENS)
        engine.run(until=lambda: engine.status_of("warm") == "WAITING_FOR_REMOTE_KVS")
        assert not reset(engine, weights=0)
        engine.step()
    engine.run()
    assert answer.right
    assert engine.received == ["warm"]
    assert engine.worker.worker.counters["load_failures"] == 1
