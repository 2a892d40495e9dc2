"""What a request wants of the cache, in its kv_transfer_params: it is kept, and what makes no sense costs nothing."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hybrids import HYBRIDS
from made_up_model import BLOCK, prompt
from modelless import Answer, Engine
from support.daemon import Daemon, wait_until
from support.pins import pins

from kvserver.adapters.vllm.wishes import NONE, Wishes, hinted, wishes_of

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 20)
MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]


def ask(engine: Engine, name: str, tokens: list[int] = TOKENS, **wishes: Any) -> Answer:
    params = {f"kvserver.{wish}": value for wish, value in wishes.items()}
    return engine.generate(name, tokens, sampling={"extra_args": {"kv_transfer_params": params}})


def stored(daemon: Daemon, make_engine: MakeEngine, tokens: list[int] = TOKENS, **options: Any) -> None:
    engine = make_engine(daemon, **options)
    engine.generate("cold", tokens)
    engine.close()


# ---- no_store -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tails", ["on", "off"])
def test_no_store_request_stores_nothing_and_other_requests_store(
    make_daemon: MakeDaemon, make_engine: MakeEngine, tails: str
) -> None:
    daemon = make_daemon(tails=tails)
    engine = make_engine(daemon)
    ask(engine, "secret", no_store=True)
    daemon.wait_for_accounting(tickets=0)
    assert (daemon.status()["l1"]["chunks"], daemon.status()["totals"]["stored_bytes"]) == (0, 0)
    ask(engine, "open", prompt(2, CHUNK), no_store=False)
    wait_until(lambda: daemon.status()["l1"]["chunks"] == 1)


def test_no_store_request_stores_no_state_of_a_hybrid(make_daemon: MakeDaemon, make_engine: MakeEngine) -> None:
    daemon = make_daemon()
    for name, model in sorted(HYBRIDS.items()):
        engine = make_engine(daemon, **model.options)
        ask(engine, name, prompt(1, 3 * model.chunk + 5), no_store=True)
        assert engine.stores == []
        engine.close()
    assert daemon.status()["totals"]["stored_bytes"] == 0


def test_steps_of_a_no_store_request_do_not_end_at_boundaries_that_only_stores_need(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    model = HYBRIDS["qwen3-next"]
    daemon, tokens = make_daemon(boundary_interval=model.chunk), prompt(1, 5 * model.chunk + 5)
    steps = []
    for no_store in (False, True):
        engine = make_engine(daemon, **model.options)
        ask(engine, "r", tokens, no_store=no_store, max_load_tokens=0)
        steps.append(len([each for each in engine.stats if each.num_running_reqs]))
        engine.close()
    assert steps == [8, 4], "a step for each kept boundary, or none"


def test_no_store_request_loads_what_others_stored(make_daemon: MakeDaemon, make_engine: MakeEngine) -> None:
    daemon = make_daemon()
    stored(daemon, make_engine)
    assert ask(make_engine(daemon), "reads", no_store=True).external == 3 * CHUNK


# ---- max_load_tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, BLOCK, CHUNK - 1, CHUNK, 2 * CHUNK + BLOCK + 1, 3 * CHUNK, 10_000])
def test_request_loads_at_most_its_max_load_tokens(make_daemon: MakeDaemon, make_engine: MakeEngine, most: int) -> None:
    whole = most // CHUNK * CHUNK
    with_blocks = (
        most // BLOCK * BLOCK if whole >= 3 * CHUNK else whole
    )  # single blocks are stored behind the last chunk only
    for tails, limit, found in (("off", whole, 3 * CHUNK), ("on", with_blocks, len(TOKENS) // BLOCK * BLOCK)):
        daemon = make_daemon(tails=tails)
        stored(daemon, make_engine)
        assert ask(make_engine(daemon), "limited", max_load_tokens=most).external == min(limit, found), tails


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_hybrid_hit_ends_at_a_boundary_within_max_load_tokens(
    make_daemon: MakeDaemon, make_engine: MakeEngine, name: str
) -> None:
    """Every token of the answer is right, whatever is loaded."""
    daemon, model = make_daemon(boundary_interval=HYBRIDS[name].chunk), HYBRIDS[name]
    tokens = prompt(3, 5 * model.chunk + 20)
    stored(daemon, make_engine, tokens, **model.options)
    for chunks in (0, 2, 4):
        engine = make_engine(daemon, **model.options)
        external = ask(engine, f"{chunks}", tokens, max_load_tokens=chunks * model.chunk + 5).external
        assert external <= chunks * model.chunk
        assert bool(external) == bool(chunks)
        engine.close()


def test_request_that_wants_no_load_is_explained_by_its_limit(make_daemon: MakeDaemon, make_engine: MakeEngine) -> None:
    daemon = make_daemon()
    stored(daemon, make_engine)
    engine = make_engine(daemon)
    for number, wishes in enumerate([{"max_load_tokens": 0}, {"tiers": []}]):
        assert ask(engine, f"none-{number}", prompt(5 + number, 2 * CHUNK), **wishes).external == 0
        wait_until(lambda n=number: daemon.http(f"/explain?request_id=none-{n}")[0] == 200)
        code, body = daemon.http(f"/explain?request_id=none-{number}")
        (request,) = json.loads(body)["requests"]
        assert (code, request["outcome"], request["not_loaded"]) == (200, "no_lookup", "request_limit")
        assert "kvserver.max_load_tokens" in request["advice"][0]


# ---- tiers ----------------------------------------------------------------------------------------


def test_request_waits_for_l2_only_if_its_tiers_allow_it(
    make_daemon: MakeDaemon, make_engine: MakeEngine, tmp_path: Path
) -> None:
    daemon = make_daemon(l2=f"file://{tmp_path}/l2?size=64MiB")
    stored(daemon, make_engine)
    wait_until(lambda: (tier := daemon.tier())["objects"] > 0 and not tier["queue_objects"])
    daemon.terminate()
    daemon.start()
    daemon.wait_for_tiers()
    engine = make_engine(daemon)
    assert ask(engine, "memory", tiers=["l1"], no_store=True).external == 0
    assert engine.connector.scheduler.counters["fills"] == 0
    engine.close()
    for number, tiers in enumerate((["l1", "l2"], ["l2", "l1"])):
        engine = make_engine(daemon)
        assert ask(engine, f"both-{number}", tiers=tiers).external == 3 * CHUNK
        engine.close()
    assert ask(make_engine(daemon), "filled", tiers=["l1"]).external == 3 * CHUNK, "it is in memory now"


# ---- pins -----------------------------------------------------------------------------------------

TRUST = {"kvserver.trust_request_pins": True}
PIN_1H = SimpleNamespace(action_type="kvserver.pin", action_version="1.0", payload={"ttl_seconds": 3600})


def watched_answers(engine: Engine) -> list[Any]:
    """Answers of the connector at the end of each request from now on."""
    answers: list[Any] = []
    connector = engine.connector
    before = connector.request_finished_all_groups

    def watched(request: Any, block_ids: Any) -> Any:
        answers.append(before(request, block_ids))
        return answers[-1]

    connector.request_finished_all_groups = connector.request_finished = watched
    return answers


def finished(engine: Engine, name: str, **wishes: Any) -> Any:
    """The parameters that the connector adds to the answer."""
    answers = watched_answers(engine)
    ask(engine, name, **wishes)
    ((_, params),) = answers
    return params


def test_a_trusted_request_pins_its_prompt_and_its_answer_says_so(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    daemon = make_daemon(pin_share=0.5)
    engine = make_engine(daemon, extra=TRUST)
    assert finished(engine, "pinned", pin_seconds=3600) == {"kvserver.pin": "requested"}
    wait_until(lambda: [one["outcome"] for one in pins(daemon)] == ["accepted"], 60, "its chunks are stored")
    (found,) = pins(daemon)
    assert found["owner"].endswith("/pinned")
    assert found["tokens"] >= 3 * CHUNK


def test_a_request_of_an_engine_that_trusts_none_pins_nothing_and_is_counted(
    make_daemon: MakeDaemon, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    daemon = make_daemon(pin_share=0.5)
    engine = make_engine(daemon)
    assert finished(engine, "refused", pin_seconds=3600) == {"kvserver.pin": "refused: not_trusted"}
    ask(engine, "again", pin_seconds=3600)
    assert engine.connector.scheduler.counters["refused_pins"] == 2
    assert sum("trust_request_pins" in record.getMessage() for record in caplog.records) == 1
    assert pins(daemon) == []


def test_an_answer_without_a_lookup_states_that_no_pin_was_requested(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    engine = make_engine(make_daemon(pin_share=0.5), extra=TRUST)
    params = finished(engine, "unasked", pin_seconds=3600, max_load_tokens=0)
    assert params == {"kvserver.pin": "refused: no_lookup"}


def test_a_request_without_a_pin_adds_nothing_to_its_answer(make_daemon: MakeDaemon, make_engine: MakeEngine) -> None:
    assert finished(make_engine(make_daemon(), extra=TRUST), "plain") is None


PIN: dict[str, Any] = {"kvserver.pin_seconds": 60}


@pytest.mark.parametrize(
    ("trusted", "turns", "answered"),
    [
        (True, [{}, PIN], "refused: no_lookup"),  # vLLM asks for no hit of a turn that goes on
        (True, [PIN, None], "requested"),
        (True, [PIN, {}], None),
        (False, [{}, PIN], "refused: not_trusted"),
        (False, [PIN, None], "refused: not_trusted"),
        (False, [PIN, {}], None),
    ],
)
def test_the_last_turn_of_a_streaming_session_answers_for_its_own_pin(
    make_daemon: MakeDaemon, make_engine: MakeEngine, trusted: bool, turns: list[Any], answered: str | None
) -> None:
    engine = make_engine(make_daemon(pin_share=0.5), extra={"kvserver.trust_request_pins": trusted})
    answers = watched_answers(engine)
    for number, params in enumerate(turns):
        sampling = {} if params is None else {"extra_args": {"kv_transfer_params": params}}
        engine.add("session", prompt(number, 2 * CHUNK), count=1, resumable=True, sampling=sampling)
        engine.run(until=lambda: engine.status_of("session") == "WAITING_FOR_STREAMING_REQ")
    engine.abort("session")
    engine.run()
    ((_, found),) = answers
    assert (found or {}).get("kvserver.pin") == answered


def test_hints_of_programs_pin_and_unknown_ones_are_counted() -> None:
    counters: Counter[str] = Counter()
    unknown = [
        SimpleNamespace(action_type=kind, action_version=version, payload={})
        for kind, version in (("kv.fetch", "1.0"), ("kvserver.pin", "2.0"), ("kvserver.prefetch", "2.0"))
    ]
    prefetch = SimpleNamespace(action_type="kvserver.prefetch", action_version="1.0", payload={})
    hints = SimpleNamespace(actions=[*unknown, prefetch, PIN_1H])
    assert hinted(NONE, hints, counters) == Wishes(pin_seconds=3600.0)
    assert (counters["unknown_hints"], counters["bad_wishes"]) == (3, 0)
    assert hinted(NONE, None, counters) == NONE
    odd = SimpleNamespace(action_type="kvserver.pin", action_version="1.0", payload={"ttl_seconds": "long"})
    assert hinted(NONE, SimpleNamespace(actions=[odd]), counters) == NONE
    assert counters["bad_wishes"] == 1


# ---- their form -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, NONE),
        ({}, NONE),
        ({"do_remote_prefill": True, "remote_host": "x"}, NONE),
        ({"kvserver.no_store": True}, Wishes(stores=False)),
        ({"kvserver.max_load_tokens": 7}, Wishes(most_tokens=7)),
        ({"kvserver.tiers": ["l1"]}, Wishes(waits_for_storage=False)),
        ({"kvserver.tiers": ["l1"], "kvserver.max_load_tokens": 3}, Wishes(True, 3, False)),
        ({"kvserver.max_load_tokens": 3, "kvserver.tiers": []}, Wishes(True, 0, False)),
        ({"kvserver.pin_seconds": 60}, Wishes(pin_seconds=60.0)),
        ({"kvserver.pin": "requested"}, NONE),
    ],
)
def test_valid_wishes_are_parsed_and_not_counted_as_bad(params: object, expected: Wishes) -> None:
    counters: Counter[str] = Counter()
    assert wishes_of(params, counters) == expected
    assert not counters["bad_wishes"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_store", "yes"),
        ("no_store", 1),
        ("no_store", None),
        ("max_load_tokens", -1),
        ("max_load_tokens", True),
        ("max_load_tokens", 2.5),
        ("max_load_tokens", "100"),
        ("tiers", "l1"),
        ("tiers", ["l2"]),
        ("tiers", ["l1", "l1"]),
        ("tiers", ["l1", "l3"]),
        ("tiers", [["l1"]]),
        ("tiers", {"l1": 1}),
        ("pin_seconds", 0),
        ("pin_seconds", -1.0),
        ("pin_seconds", True),
        ("pin_seconds", "60"),
        ("pin_seconds", float("nan")),
        ("pin_seconds", 604801),
        ("nonsense", 1),
    ],
)
def test_invalid_wishes_are_counted_and_ignored(name: str, value: object) -> None:
    counters: Counter[str] = Counter()
    params = {"kvserver.no_store": True, f"kvserver.{name}": value}
    expected = NONE if name == "no_store" else Wishes(stores=False)
    assert wishes_of(params, counters) == expected
    assert counters["bad_wishes"] == 1


def test_a_request_with_nonsense_is_served_and_the_log_states_it_once(
    make_daemon: MakeDaemon, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    daemon = make_daemon()
    stored(daemon, make_engine)
    engine = make_engine(daemon)
    assert ask(engine, "odd", max_load_tokens="all", tiers=7).external == 3 * CHUNK
    assert engine.connector.scheduler.counters["bad_wishes"] == 2
    lines = [record.getMessage() for record in caplog.records if "kv_transfer_params" in record.getMessage()]
    assert len(lines) == 1
    assert "kvserver.max_load_tokens" in lines[0]
