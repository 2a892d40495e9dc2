"""Engines at one daemon: those that disagree find nothing of each other, and their status states why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from made_up_model import BLOCK, prompt
from vllm.v1.core import kv_cache_utils

from kvserver.cli.status import table
from kvserver.protocol.status import DaemonStatus

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)


def adjusted(part: str, name: str, value: Any) -> dict[str, Any]:
    return {"adjust": lambda config, caches: setattr(getattr(config, part), name, value)}


@pytest.mark.parametrize(
    "options",
    [
        adjusted("cache_config", "cache_dtype", "fp8"),
        adjusted("model_config", "quantization", "awq"),
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"drafts": 2},
    ],
    ids=["KV dtype", "quantization", "overrides", "speculation"],
)
def test_engines_that_disagree_find_nothing_of_each_other(make_daemon, make_engine, options):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    assert make_engine(daemon, **options).generate("warm", TOKENS).external == 0
    namespaces = {instance["namespace"] for instance in daemon.status()["instances"]}
    assert len(namespaces) == 2
    assert {instance["private"] for instance in daemon.status()["instances"]} == {""}


def test_a_private_engine_finds_its_own_and_reports_why_it_shares_nothing(make_daemon, make_engine):
    daemon = make_daemon()
    dummy = adjusted("load_config", "load_format", "dummy")
    one = make_engine(daemon, extra={"kvserver.on_prefix_reset": "keep"}, **dummy)
    one.generate("cold", TOKENS)
    assert make_engine(daemon, **dummy).generate("another", TOKENS).external == 0
    assert one.scheduler.reset_prefix_cache()
    assert one.generate("again", TOKENS).external == 2 * CHUNK
    reasons = {instance["private"] for instance in daemon.status()["instances"]}
    assert reasons == {
        "weights: load_format dummy does not take them from the model's files; kvserver.model_version may name them"
    }
    assert "shares KV with no other engine: weights: load_format dummy" in table(
        msgspec.convert(daemon.status(), DaemonStatus)
    )


def test_weights_that_have_a_name_are_shared(make_daemon, make_engine):
    daemon = make_daemon()
    dummy = adjusted("load_config", "load_format", "dummy")
    for version, expected in (("v1", 0), ("v1", 2 * CHUNK), ("v2", 0)):
        engine = make_engine(daemon, extra={"kvserver.model_version": version}, **dummy)
        assert engine.generate(version, TOKENS).external == expected


def test_engines_whose_hashes_start_elsewhere_find_nothing_of_each_other(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    other = make_engine(daemon)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"\7" * 32)
    assert other.generate("warm", TOKENS).external == 0


def test_a_cache_salt_separates_requests(make_daemon, make_engine):
    daemon = make_daemon()
    cold, warm = make_engine(daemon), make_engine(daemon)
    for engine, salt, expected in [(cold, "a", 0), (warm, "b", 0), (warm, "a", 2 * CHUNK), (warm, None, 0)]:
        answer = engine.add(f"{salt}", TOKENS, cache_salt=salt)
        engine.run()
        assert answer.right
        assert answer.external == expected


def test_the_daemon_decides_how_long_chunks_are(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=BLOCK)
    make_engine(daemon).generate("cold", TOKENS)
    assert daemon.status()["instances"][0]["chunk_tokens"] == BLOCK
    assert make_engine(daemon).generate("warm", TOKENS).external == 8 * BLOCK
