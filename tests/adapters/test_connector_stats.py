"""What the connector reports to vLLM's own metrics and log, by way of vLLM's own classes."""

from __future__ import annotations

import pytest
from made_up_model import BLOCK, prompt
from modelless import IMPATIENT, Engine, configure
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvserver.adapters.common.stats import TIERS, WITHDRAWN_REASONS, WITHDRAWN_TOKENS
from kvserver.adapters.vllm import KVServerConnector
from kvserver.adapters.vllm.stats import KVServerStats
from kvserver.protocol import Error, Lookup, LookupReply, Retrieve, Store

CHUNK = 64


def payloads(engine: Engine) -> list[dict]:
    """Of each step that had one, as the front end gets it."""
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(SchedulerStats)
    decoded = [decoder.decode(encoder.encode(stats)) for stats in engine.stats]
    return [stats.kv_connector_stats for stats in decoded if stats.kv_connector_stats is not None]


def sums(engine: Engine) -> KVServerStats:
    total = KVServerStats()
    for payload in payloads(engine):
        total.aggregate(KVServerConnector.build_kv_connector_stats(payload))
    return total


def serve(engine: Engine, name: str, seed: int, length: int = 4 * CHUNK + 5) -> None:
    engine.generate(name, prompt(seed, length))


def counts_of(daemon):
    return daemon.status()["instances"][0]["requests"]


def stored_and_loaded(daemon, engine):
    """One prompt stored, forgotten by the engine, and loaded."""
    serve(engine, "cold", 1)
    assert engine.scheduler.reset_prefix_cache()
    serve(engine, "warm", 1)
    assert engine.answers["warm"].external == 4 * CHUNK


@pytest.mark.parametrize("world_size", [1, 2])
def test_bytes_are_those_that_the_daemon_copied(make_daemon, make_forgetful_engine, world_size):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_forgetful_engine(daemon, world_size=world_size)
    stored_and_loaded(daemon, engine)
    data, counts = sums(engine).data, counts_of(daemon)
    assert counts["stored_bytes"] > 0
    assert (data["store_bytes"], data["load_bytes"]) == (counts["stored_bytes"], counts["loaded_bytes"])
    assert (len(data["store_seconds"]), len(data["load_seconds"])) == (counts["stores"], counts["loads"])
    assert len(data["load_seconds"]) == world_size
    assert all(seconds > 0 for seconds in data["load_seconds"] + data["store_seconds"])
    assert (data["lookups"], data["lookup_hits"]) == (2, 1)
    assert "load_failures" not in data
    assert "store_failures" not in data


def test_a_load_counts_only_the_blocks_it_filled(make_daemon, make_forgetful_engine):
    """The engine had the first blocks of the chunk itself."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_forgetful_engine(daemon)
    serve(engine, "long", 1)
    engine.scheduler.reset_prefix_cache()
    serve(engine, "short", 1, 2 * BLOCK + 1)
    serve(engine, "warm", 1)
    assert (engine.answers["warm"].local, engine.answers["warm"].external) == (2 * BLOCK, 4 * CHUNK - 2 * BLOCK)
    data = sums(engine).data
    per_block = data["store_bytes"] // counts_of(daemon)["stored_chunks"] // (CHUNK // BLOCK)
    assert data["load_bytes"] == per_block * (4 * CHUNK // BLOCK - 2)


def test_chunks_that_were_there_are_no_stored_bytes(make_daemon, make_forgetful_engine, make_tap):
    """The second engine's lookup was too early, so it computes all; most of that is there when it stores."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    first = make_forgetful_engine(daemon)
    serve(first, "cold", 1)
    tap = make_tap(daemon)
    tap.instead = lambda message: LookupReply(hit_chunks=0) if isinstance(message, Lookup) else None
    second = make_forgetful_engine(tap.endpoint)
    serve(second, "early", 1, 6 * CHUNK + 5)
    assert sums(first).data["store_bytes"] == 2 * sums(second).data["store_bytes"] > 0
    assert len(sums(second).data["store_seconds"]) == len(tap.of(Store))
    assert sum(instance["requests"]["stored_chunks"] for instance in daemon.status()["instances"]) == 6


def test_refused_copies_are_failures(make_daemon, make_forgetful_engine, make_tap):
    daemon = make_daemon(chunk_tokens=CHUNK)
    tap = make_tap(daemon)
    engine = make_forgetful_engine(tap.endpoint)
    serve(engine, "cold", 1)
    engine.scheduler.reset_prefix_cache()
    tap.instead = lambda message: (
        Error(code="not_found", message="gone") if isinstance(message, (Retrieve, Store)) else None
    )
    serve(engine, "warm", 1)
    data = sums(engine).data
    assert data["load_failures"] == 1
    assert data["store_failures"] == len(tap.of(Store)) - len(data["store_seconds"]) > 0
    assert "load_seconds" not in data


def test_lookups_without_an_answer_are_reported(make_daemon, make_forgetful_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_forgetful_engine(daemon, extra={"kvserver.store_timeout_ms": 200, **IMPATIENT})
    daemon.freeze()
    try:
        serve(engine, "a", 1)
    finally:
        daemon.thaw()
    data = sums(engine).data
    assert (data["lookups"], data["lookup_timeouts"]) == (1, 1)
    assert data["store_failures"] > 0


def test_a_step_in_which_nothing_ended_has_nothing_to_report(make_daemon, make_forgetful_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_forgetful_engine(daemon)
    serve(engine, "a", 1)
    assert 0 < len(payloads(engine)) < len(engine.stats)
    assert all(payloads(engine))


def test_vllms_prometheus_has_the_sums(make_daemon, make_forgetful_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_forgetful_engine(daemon)
    logger = PrometheusStatLogger(engine.config, [0])
    stored_and_loaded(daemon, engine)
    for stats in engine.stats:
        logger.record(stats, None, engine_idx=0)
    labels = {"model_name": engine.config.model_config.served_model_name, "engine": "0"}

    def value(name, **more):
        return REGISTRY.get_sample_value(name, labels | more)

    data = sums(engine).data
    assert value("vllm:kvserver_load_bytes_total") == data["load_bytes"] > 0
    assert value("vllm:kvserver_store_bytes_total") == data["store_bytes"] > 0
    assert value("vllm:kvserver_load_seconds_count") == 1
    assert value("vllm:kvserver_load_seconds_sum") == pytest.approx(sum(data["load_seconds"]))
    assert value("vllm:kvserver_lookups_total") == 2
    assert value("vllm:kvserver_lookup_hits_total") == 1
    assert value("vllm:kvserver_load_failures_total") == 0
    assert value("vllm:external_prefix_cache_hits_total") == 4 * CHUNK
    assert value("vllm:prompt_tokens_cached_by_source_total", source="host") == 4 * CHUNK
    for what in ("promised", "loaded"):
        by_tier = [value(f"vllm:kvserver_{what}_tokens_total", tier=tier) for tier in TIERS]
        assert by_tier == [4 * CHUNK, 0], what
    withdrawn = [
        value("vllm:kvserver_withdrawn_tokens_total", tier=tier, reason=reason)
        for tier in TIERS
        for reason in WITHDRAWN_REASONS
    ]
    assert withdrawn == [0] * 8, "all series exist from the start"
    logger.kv_connector_prom.observe({WITHDRAWN_TOKENS: {"l2 load_failed": 3, "l9 of another version": 4}}, 0)
    assert value("vllm:kvserver_withdrawn_tokens_total", tier="l2", reason="load_failed") == 3
    assert value("vllm:kvserver_withdrawn_tokens_total", tier="other", reason="other") == 4


def test_hits_are_labelled_as_the_hosts(make_daemon, make_forgetful_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_forgetful_engine(daemon)
    stored_and_loaded(daemon, engine)
    hits = [stats.connector_prefix_cache_stats.hits_by_source for stats in engine.stats]
    assert [{source.value: tokens for source, tokens in found.items()} for found in hits if found] == [
        {"host": 4 * CHUNK}
    ]


def test_vllms_log_has_a_line_with_the_sums(model_folder):
    config, _ = configure(model_folder, "ipc:///nobody")
    logging = KVConnectorLogging(config.kv_transfer_config)
    logging.observe({"load_seconds": [0.25], "load_bytes": 100, "lookups": 2})
    logging.observe({"load_seconds": [0.5, 0.25], "load_bytes": 50, "store_failures": 1})
    lines = []
    logging.log(lambda text, *words: lines.append(text % words))
    assert lines == ["KV Transfer metrics: lookups=2, load_bytes=150, store_failures=1, loads=3, load_seconds=1.0"]
    logging.log(lines.append)
    assert len(lines) == 1, "a line with nothing in it"


def test_aggregating_leaves_what_was_added_as_it_was():
    one, two = KVServerStats({"load_seconds": [1.0]}), KVServerStats({"load_seconds": [2.0], "lookups": 1})
    assert KVServerStats().aggregate(one).aggregate(two).data == {"load_seconds": [1.0, 2.0], "lookups": 1}
    assert (one.data, two.data) == ({"load_seconds": [1.0]}, {"load_seconds": [2.0], "lookups": 1})


def test_a_payload_that_makes_no_sense_does_not_reach_the_engine(model_folder, caplog):
    config, _ = configure(model_folder, "ipc:///nobody")
    logger = PrometheusStatLogger(config, [0])
    for _ in range(2):
        logger.kv_connector_prom.observe({"load_seconds": 7, "of another version": []}, 0)
    assert caplog.text.count("vllm:kvserver_* in vLLM's metrics are not complete") == 1
