"""Trainers change weights in place and reset the prefix cache without the connector: another engine attended to the trained KV."""

from __future__ import annotations

import logging

import pytest
from made_up_model import continuation, prompt
from support.daemon import wait_until
from vllm.config import WeightTransferConfig

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)
WARM = 3 * CHUNK


def train(engine, weights: int, version: str | None = None, **options) -> bool:
    """What a trainer does: other weights, then the reset."""
    engine.weights = weights
    if version is not None:
        engine.config.kv_transfer_config.kv_connector_extra_config["kvserver.weights_version"] = version
    return engine.scheduler.reset_prefix_cache(**options)


def generate(engine, name, tokens=TOKENS, count=4):
    answer = engine.add(name, tokens, count)
    engine.run()
    assert answer.tokens == continuation(tokens, count, engine.weights)
    return answer


def transfers_weights(config, caches):
    config.weight_transfer_config = WeightTransferConfig(backend="nccl")


def private_of(daemon, engine) -> str:
    """The engine's `private` in /status, once its next step has reported to the daemon."""
    name = engine.config.kv_transfer_config.engine_id
    return next(found["private"] for found in daemon.status()["instances"] if found["instance_id"] == name)


def test_plain_reset_hides_trained_kv_from_others_and_old_kv_from_the_engine(make_daemon, make_engine):
    daemon = make_daemon()
    engine, other = make_engine(daemon), make_engine(daemon)
    generate(other, "old", prompt(2, 3 * CHUNK + 10))
    assert train(engine, weights=7)
    generate(engine, "trained")
    assert generate(other, "untrained").external == 0
    assert generate(engine, "old", prompt(2, 3 * CHUNK + 10)).external == 0


def test_engine_finds_its_own_kv_after_a_plain_reset(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon)
    train(engine, weights=7)
    generate(engine, "trained")
    generate(engine, "evicts", prompt(3, 99 * 16 - 10))
    assert generate(engine, "again").external == WARM


def test_plain_reset_is_warned_of_once_counted_and_shown(make_daemon, make_engine, caplog):
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    daemon = make_daemon()
    engine = make_engine(daemon)
    generate(engine, "old")
    wait_until(lambda: engine.generate_free("r") and daemon.status()["instances"][0]["private"] == "")
    for weights in (7, 8):
        train(engine, weights)
        generate(engine, f"trained{weights}")
    assert caplog.text.count("shares KV with itself only") == 1
    assert engine.connector.scheduler.counters["prefix_resets"] == 2
    reported = [stats.kv_connector_stats for stats in engine.stats if stats.kv_connector_stats]
    assert sum(data.get("prefix_resets", 0) for data in reported) == 2
    wait_until(lambda: daemon.status()["instances"][0]["private"] == "epoch: private since prefix reset")


@pytest.mark.parametrize("options", [{}, {"reset_connector": True}], ids=["plain", "with the connector"])
def test_engines_with_the_same_new_weights_version_share_after_a_plain_reset(make_daemon, make_engine, options):
    """A reset that reaches the connector too is one reset: the version counts for it."""
    daemon = make_daemon()
    engine, other = make_engine(daemon), make_engine(daemon)
    for one in (engine, other):
        assert train(one, weights=7, version="step-7", **options)
    generate(engine, "new")
    assert generate(other, "warm").external == WARM
    assert engine.connector.scheduler.counters["prefix_resets"] == 0
    assert private_of(daemon, engine) == ""
    train(other, weights=9, **options)
    assert generate(other, "the same version does not name these").external == 0


def test_reset_with_the_connector_is_not_counted_as_a_plain_reset(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon)
    train(engine, weights=7, reset_connector=True)
    generate(engine, "new")
    assert engine.connector.scheduler.counters["prefix_resets"] == 0
    wait_until(lambda: engine.generate_free("r") and private_of(daemon, engine) == "epoch: private since reset_cache")


def test_engine_with_on_prefix_reset_keep_goes_on_sharing(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon, extra={"kvserver.on_prefix_reset": "keep"})
    generate(engine, "cold")
    assert train(engine, weights=0)
    assert generate(engine, "warm").external == WARM
    assert engine.connector.scheduler.counters["prefix_resets"] == 0


def wait_for_the_store(daemon):
    """Of the prompt: a reset would end it."""
    wait_until(lambda: daemon.status()["totals"]["stored_bytes"] > 0, 20, "the store of the prompt")


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_plain_reset_that_vllm_refuses_stops_stores_until_a_reset_succeeds(make_daemon, make_engine, asynchronous):
    """Weights have changed all the same: nothing is stored, and nothing of the old ones found, until a reset succeeds."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine, other = make_engine(daemon, asynchronous=asynchronous), make_engine(daemon)
    answer = engine.add("r", TOKENS, count=2 * CHUNK)
    engine.run(until=lambda: len(answer.tokens) > 10)
    wait_for_the_store(daemon)
    before = len(engine.stores)
    assert not train(engine, weights=0)
    engine.run()
    assert len(engine.stores) == before, "of KV that is older than the reset"
    assert generate(other, "all tokens", TOKENS + answer.tokens).external == WARM, "what was stored before"
    assert train(engine, weights=7)
    generate(engine, "new")
    assert len(engine.stores) > before


def test_running_requests_of_a_reset_that_preempts_them_begin_anew(make_daemon, make_engine):
    daemon = make_daemon()
    engine, other = make_engine(daemon), make_engine(daemon)
    answer = engine.add("r", TOKENS, count=CHUNK)
    engine.run(until=lambda: len(answer.tokens) > 10)
    wait_for_the_store(daemon)
    engine.finish_steps()
    count = len(answer.tokens)
    assert train(engine, weights=7, reset_running_requests=True)
    engine.run()
    assert answer.external == 0
    everything = TOKENS + answer.tokens
    assert generate(other, "untrained", everything[: len(TOKENS) + count]).external == WARM
    assert len(engine.stores) > 1, "stored again, under another name"


def test_where_weights_are_transferred_nothing_is_shared_from_the_start(make_daemon, make_engine):
    daemon = make_daemon()
    other = make_engine(daemon)
    generate(other, "cold")
    version = {"kvserver.weights_version": "one", "kvserver.on_prefix_reset": "keep"}
    engine = make_engine(daemon, adjust=transfers_weights, extra=version)
    assert generate(engine, "cold too").external == 0
    more = prompt(4, 3 * CHUNK + 10)
    generate(engine, "more", more)
    assert generate(other, "more", more).external == 0
    wait_until(lambda: private_of(daemon, engine) == "epoch: weight_transfer_config is set")
    train(engine, weights=7)
    assert generate(engine, "trained", more).external == 0, "whatever a setting states of resets"
