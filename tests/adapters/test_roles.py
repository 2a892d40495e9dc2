"""Roles of engines (kv_role): who loads and who stores, also where the connector's role and the one that vLLM reads differ."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from made_up_model import BLOCK, prompt
from modelless import Engine
from support.daemon import Daemon, wait_until
from vllm.config import KVTransferConfig

ROLES = ("kv_both", "kv_producer", "kv_consumer")
CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 20)
MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]
Adjust = Callable[[Any, Any], None]


def plain(role: str) -> Adjust:
    def adjust(config: Any, caches: Any) -> None:
        config.kv_transfer_config.kv_role = role

    return adjust


def nested(inner: str, outer: str) -> Adjust:
    """Adjust a configuration: MultiConnector of one role with kvserver's connector of another."""

    def adjust(config: Any, caches: Any) -> None:
        own = config.kv_transfer_config
        mine = {
            "kv_connector": own.kv_connector,
            "kv_connector_module_path": own.kv_connector_module_path,
            "kv_role": inner,
            "kv_connector_extra_config": own.kv_connector_extra_config,
        }
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector", kv_role=outer, kv_connector_extra_config={"connectors": [mine]}
        )

    return adjust


ALL = {role: (plain(role), role, role) for role in ROLES} | {
    f"{inner} in {outer}": (nested(inner, outer), inner, outer) for inner in ROLES for outer in ROLES
}


@pytest.mark.parametrize("name", ALL)
def test_engine_of_each_role_stores_and_loads_unless_a_producer_is_among_its_roles(
    make_daemon: MakeDaemon, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    adjust, inner, outer = ALL[name]
    daemon = make_daemon()
    first = make_engine(daemon)
    first.generate("cold", TOKENS)
    engine = make_engine(daemon, adjust=adjust)
    loaded = engine.generate("warm", TOKENS).external
    engine.generate("own", prompt(2, 2 * CHUNK))
    if {inner, outer} == {"kv_producer", "kv_consumer"}:
        assert "one inside the other" in caplog.text
        assert (loaded, engine.stores) == (0, [])
        return
    assert loaded == (0 if "kv_producer" in (inner, outer) else 3 * CHUNK)
    assert first.generate("of the other", prompt(2, 2 * CHUNK) + [5] * 20).external == 2 * CHUNK


def test_producer_sends_no_lookup_and_explains_it_as_save_only(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    daemon = make_daemon()
    engine = make_engine(daemon, adjust=plain("kv_producer"))
    engine.generate("a", TOKENS)
    engine.generate("b", TOKENS[:CHUNK] + prompt(3, CHUNK))
    daemon.wait_for_accounting(tickets=0)
    (row,) = daemon.status()["instances"]
    assert row["requests"]["lookups"] == 0
    wait_until(lambda: daemon.http("/explain?request_id=b")[0] == 200)
    (request,) = json.loads(daemon.http("/explain?request_id=b")[1])["requests"]
    assert (request["outcome"], request["not_loaded"]) == ("no_lookup", "save_only")
    assert "kv_producer" in request["advice"][0]


@pytest.mark.parametrize("store_generated", [True, False])
def test_consumer_stores_generated_tokens_unless_store_generated_is_false(
    make_daemon: MakeDaemon, make_engine: MakeEngine, store_generated: bool
) -> None:
    daemon = make_daemon()
    producer = make_engine(daemon, adjust=plain("kv_producer"))
    consumer = make_engine(daemon, adjust=plain("kv_consumer"), extra={"kvserver.store_generated": store_generated})
    asked = prompt(4, CHUNK)
    producer.generate("prefill", asked, count=1)
    answer = consumer.generate("decode", asked, count=2 * CHUNK)
    assert answer.external in (CHUNK - 1, CHUNK - BLOCK)
    next_turn = make_engine(daemon).generate("next", asked + answer.tokens + [3] * BLOCK)
    assert next_turn.external // CHUNK == (2 if store_generated else 1)
