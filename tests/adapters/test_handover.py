"""Hand-overs: what a prefill engine's answer states reaches the decode engine by a proxy, and its request waits for the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hybrids import HYBRIDS
from made_up_model import BLOCK, prompt
from modelless import Answer, Engine
from sibling import Sibling, beside_sibling
from support.daemon import Daemon, wait_until

from kvserver.adapters.vllm.hits import Hits
from kvserver.adapters.vllm.nesting import is_the_only_one
from kvserver.adapters.vllm.shortage import PATIENCE, STORING_SECONDS
from kvserver.protocol import Lookup

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 2 * BLOCK + 4)
PREFILLED = 3 * CHUNK + 2 * BLOCK
LONG = {"kvserver.fill_timeout_ms": 10_000}
MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]


def with_role(role: str) -> dict[str, Any]:
    def adjust(config: Any, caches: Any) -> None:
        config.kv_transfer_config.kv_role = role

    return {"adjust": adjust}


WRAPPER = {"kv_connector": "MultiConnector"}


def within(inner: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kv_connector_extra_config": {"connectors": inner}}


def given(params: dict[str, Any] | None) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": params}}


def prefilled(engine: Engine, tokens: list[int] = TOKENS) -> Answer:
    """The answer, as soon as the engine has it: the last stores were not sent."""
    answer = engine.add("prefill", tokens, count=1)
    engine.run(until=lambda: answer.finish_reason is not None)
    return answer


def counts_of(daemon: Daemon, engine: Engine) -> dict[str, Any]:
    name = engine.connector.scheduler._instance_id
    (row,) = (row for row in daemon.status()["instances"] if row["instance_id"] == name)
    found: dict[str, Any] = row["requests"]
    return found


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_decode_waits_for_stores_that_the_prefill_engine_has_not_sent(
    make_daemon: MakeDaemon, make_engine: MakeEngine, role: str
) -> None:
    daemon = make_daemon(tails="on")
    prefill, decode = make_engine(daemon, **with_role(role)), make_engine(daemon, extra=LONG)
    params = prefilled(prefill).params
    assert params is not None
    assert (params["kvserver.prefilled_tokens"], set(params)) == (
        PREFILLED,
        {"kvserver.prefilled_tokens", "kvserver.prefilled_by"},
    )
    assert counts_of(daemon, prefill)["stores"] == 0
    answer = decode.add("decode", TOKENS, sampling=given(params))
    decode.run(until=lambda: counts_of(daemon, decode)["store_waits"] == 1)
    prefill.run()
    decode.run()
    assert answer.right
    assert answer.external == PREFILLED
    counts = counts_of(daemon, decode)
    assert (counts["handed_over_tokens"], counts["lost_handovers"], counts["late_handovers"]) == (PREFILLED, 0, 0)


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_decode_of_a_hybrid_waits_for_all_its_groups(
    make_daemon: MakeDaemon, make_engine: MakeEngine, name: str
) -> None:
    model = HYBRIDS[name]
    tokens = prompt(1, 3 * model.chunk + 5)
    daemon = make_daemon()
    prefill, decode = make_engine(daemon, **model.options), make_engine(daemon, extra=LONG, **model.options)
    params = prefilled(prefill, tokens).params
    answer = decode.add("decode", tokens, sampling=given(params))
    decode.run(until=lambda: bool(counts_of(daemon, decode)["store_waits"] or answer.tokens))
    prefill.run()
    decode.run()
    assert answer.right
    assert answer.external == 3 * model.chunk


def test_engine_hands_over_where_one_token_or_a_remote_decode_is_asked_for(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    engine = make_engine(make_daemon())
    assert engine.generate("one", TOKENS, count=1).params is not None
    assert engine.generate("plain", TOKENS).params is None
    assert engine.generate("remote", TOKENS, sampling=given({"do_remote_decode": True})).params is not None
    made_up = {"kvserver.no_store": True, "kvserver.prefilled_tokens": 10**9, "kvserver.prefilled_by": "elsewhere"}
    answered = engine.generate("not stored", prompt(2, 100), 1, sampling=given(made_up)).params
    assert answered is not None
    assert answered["kvserver.prefilled_tokens"] == 0, "a proxy passes it on instead of what the client made up"


def test_answers_of_two_connectors_are_joined(
    make_daemon: MakeDaemon, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    monkeypatch.setattr(Sibling, "params", {"do_remote_prefill": True, "remote_engine_id": "a"})
    engine = make_engine(daemon, adjust=beside_sibling)
    params = engine.generate("one", TOKENS, count=1, sampling=given({"do_remote_decode": True})).params
    assert params is not None
    assert (params["do_remote_prefill"], params["kvserver.prefilled_tokens"]) == (True, 3 * CHUNK)
    assert make_engine(daemon).generate("decode", TOKENS, sampling=given(params)).external == 3 * CHUNK


def test_one_of_two_kvserver_connectors_answers_nothing() -> None:
    """vLLM raises where two connectors answer with one key."""
    ours, other = {"kv_connector": "KVServerConnector"}, {"kv_connector": "NixlConnector"}
    for inner, only in (
        ([ours, other], True),
        ([ours, ours], False),
        ([other, {**WRAPPER, **within([ours, ours])}], False),
    ):
        assert is_the_only_one(SimpleNamespace(**WRAPPER, **within(inner))) is only


def test_prompt_is_computed_at_once_where_the_hand_over_names_an_engine_of_another_daemon(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    daemon = make_daemon()
    engine = make_engine(daemon, extra=LONG)
    made_up = {"kvserver.prefilled_tokens": 10**9, "kvserver.prefilled_by": "elsewhere"}
    assert engine.generate("decode", TOKENS, sampling=given(made_up)).external == 0
    counts = counts_of(daemon, engine)
    assert (counts["store_waits"], counts["lost_handovers"]) == (0, 1)


def test_prompt_is_computed_when_the_prefill_engine_or_the_daemon_ends(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    daemon = make_daemon()
    prefill, decode = make_engine(daemon), make_engine(daemon, extra=LONG)
    params = prefilled(prefill).params
    answer = decode.add("decode", TOKENS, sampling=given(params))
    decode.run(until=lambda: counts_of(daemon, decode)["store_waits"] == 1)
    prefill.close()
    decode.run()
    assert answer.right
    assert answer.external == 0
    assert counts_of(daemon, decode)["lost_handovers"] == 1
    third = make_engine(daemon)
    params = prefilled(third, prompt(5, 100)).params
    answer = decode.add("again", prompt(5, 100), sampling=given(params))
    decode.run(until=lambda: counts_of(daemon, decode)["store_waits"] == 2)
    daemon.kill()
    decode.run()
    assert (answer.right, answer.external) == (True, 0)


def test_explanation_names_what_was_handed_over(make_daemon: MakeDaemon, make_engine: MakeEngine) -> None:
    daemon = make_daemon()
    engine = make_engine(daemon)
    made_up = {"kvserver.prefilled_tokens": 2 * CHUNK, "kvserver.prefilled_by": "elsewhere"}
    engine.generate("decode", TOKENS, sampling=given(made_up))
    wait_until(lambda: daemon.http("/explain?request_id=decode")[0] == 200)
    (request,) = json.loads(daemon.http("/explain?request_id=decode")[1])["requests"]
    assert request["handed_over"] == 2 * CHUNK
    assert any("handed this prompt over" in line for line in request["advice"])


@pytest.mark.parametrize("ends", [True, False], ids=["store ends", "store hangs"])
def test_engine_that_only_stores_lets_its_requests_wait_for_stores_but_not_for_long(
    make_daemon: MakeDaemon, make_engine: MakeEngine, ends: bool
) -> None:
    """Other engines cancel such stores after a few passes. What a prefill engine stores is what the decode engine waits for."""
    daemon = make_daemon(pauses=True)
    engine = make_engine(daemon, num_blocks=23, **with_role("kv_producer"))
    now = [0.0]
    engine.connector.scheduler._shortage._clock = lambda: now[0]
    with daemon.paused_copies():
        first = engine.add("first", prompt(1, 4 * CHUNK), count=1)
        engine.run(until=lambda: bool(first.finish_reason and engine.stores))
        other = engine.add("other", prompt(2, 4 * CHUNK + 50), count=3)
        passes = len(engine.plans)
        engine.run(until=lambda: len(engine.plans) > passes + 4 * PATIENCE)
        assert other.tokens == []
        assert not any(plan.abort_stores for plan in engine.plans)
        if not ends:
            now[0] = STORING_SECONDS
            engine.run(until=lambda: any(plan.abort_stores for plan in engine.plans))
    engine.run()
    assert other.right
    assert make_engine(daemon).generate("warm", [*prompt(1, 4 * CHUNK), 3]).external == (4 * CHUNK if ends else 0)


def test_a_request_waits_once_for_what_was_handed_over(
    make_daemon: MakeDaemon, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later lookups, as after an answer that grew old, find what came."""
    engine, made, make = make_engine(make_daemon(tails="on")), [], Hits._lookup_of

    def twice(hits: Hits, state: Any) -> Lookup:
        made.extend([make(hits, state), make(hits, state)])
        return made[-2]

    monkeypatch.setattr(Hits, "_lookup_of", twice)
    params = {"kvserver.prefilled_tokens": PREFILLED, "kvserver.prefilled_by": "gone"}
    engine.add("decode", TOKENS, sampling=given(params))
    engine.run()
    assert [lookup.handed_over is not None for lookup in made[:2]] == [True, False]
