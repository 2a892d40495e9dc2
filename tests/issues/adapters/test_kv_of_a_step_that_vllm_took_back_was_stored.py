"""A store was sent with the step that computed its KV, before vLLM had accepted the step. So another engine loaded, under the
right key, what had been computed behind a sibling's failed load, or in a step whose output raised.

A chunk may be found only once every step that computed any token of its prefix was accepted. Each test has an engine compute garbage (other
weights) in a step that vLLM takes back in one of its ways, and then another engine read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from made_up_model import BLOCK, prompt
from modelless import Answer, Engine
from sibling import Sibling, beside_sibling
from vllm.v1.request import RequestStatus

from kvserver.adapters.vllm import nesting
from kvserver.adapters.vllm.requests import ALL_TOKENS

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)
GARBAGE = 99  # weights
SCHEDULING = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
MakeEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def sibling() -> Iterator[None]:
    yield
    Sibling.tokens, Sibling.fails = 0, True


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sibling counts as exact: only that its load fails keeps KV from being stored."""
    monkeypatch.setattr(nesting, "EXACT", (*nesting.EXACT, "Sibling"))


def begin_step_of(engine: Engine, name: str, garbage: bool = True) -> None:
    """Step until a step that computes tokens of the request was executed, with garbage, and not yet accepted."""
    for runner in engine.runners:
        runner.check = lambda *_: None  # type: ignore[method-assign]
    for _ in range(10_000):
        output = engine.scheduler.schedule()
        computes = name in output.num_scheduled_tokens
        engine.weights = GARBAGE if computes and garbage else 0
        engine._queue.append((output, engine.execute(output)))
        engine.weights = 0
        if computes:
            return
        engine.finish_steps()
    raise AssertionError(f"{name} was never scheduled")


def serve(engine: Engine, name: str, tokens: list[int]) -> Answer:
    """To its end, and until its stores have ended. After a step that vLLM dropped its own count of steps owes it some blocks."""
    answer = engine.add(name, tokens)
    engine.run(until=lambda: not engine.busy)
    return answer


def read_elsewhere(make_engine: MakeEngine, daemon: object, tokens: list[int] = TOKENS, drafts: int = 0) -> Answer:
    """Another engine's answer, which generate() holds to be right: its runner looks at every byte that it attends to."""
    return make_engine(daemon, drafts=drafts).generate("elsewhere", tokens)


@SCHEDULING
@pytest.mark.parametrize("tails", ["off", "on"])
def test_a_step_whose_output_raised_is_not_found(
    make_daemon: Callable, make_engine: MakeEngine, tails: str, asynchronous: bool
) -> None:
    """As vLLM's fault tolerance has it: update_from_output() is never called for the step, and all requests are aborted."""
    daemon = make_daemon(tails=tails)
    engine = make_engine(daemon, asynchronous=asynchronous)
    engine.generate("before", prompt(9, 40))
    engine.add("r", TOKENS, count=50)
    begin_step_of(engine, "r")
    engine._queue.clear()
    engine.abort("r")
    engine.batch.rows.clear()
    assert serve(engine, "after", prompt(8, 40)).right
    assert read_elsewhere(make_engine, daemon).external == 0
    assert engine.connector.scheduler.counters["dropped_stores"] > 0


def test_a_dropped_step_of_a_request_that_goes_on_is_not_found(make_daemon: Callable, make_engine: MakeEngine) -> None:
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=False)
    engine.add("r", TOKENS, count=50)
    begin_step_of(engine, "r")
    engine._queue.clear()
    after = engine.add("after", prompt(8, 40))
    engine.run(until=lambda: after.finish_reason is not None and engine.connector.scheduler.counters["dropped_stores"])
    engine.abort("r")
    engine.run(until=lambda: not engine.busy)
    assert read_elsewhere(make_engine, daemon).external == 0


def test_of_an_aborted_request_only_accepted_steps_are_found(make_daemon: Callable, make_engine: MakeEngine) -> None:
    """Two steps are under way: the first one is accepted, the second one, which computed garbage, is dropped."""
    daemon = make_daemon(tails="on")
    engine = make_engine(daemon, asynchronous=True, max_tokens_per_step=2 * CHUNK)
    engine.add("r", TOKENS, count=50)
    begin_step_of(engine, "r", garbage=False)
    begin_step_of(engine, "r")
    assert len(engine._queue) == 2
    engine.abort("r")
    engine._update(*engine._queue.popleft())
    engine._queue.clear()
    engine.batch.rows.clear()
    assert serve(engine, "after", prompt(8, 40)).right
    assert read_elsewhere(make_engine, daemon).external <= 2 * CHUNK


@SCHEDULING
def test_what_later_requests_compute_behind_such_a_step_is_not_found(
    make_daemon: Callable, make_engine: MakeEngine, asynchronous: bool
) -> None:
    """vLLM's own cache has the blocks of the step under their hashes."""
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous)
    engine.add("r", TOKENS, count=50)
    begin_step_of(engine, "r")
    engine._queue.clear()
    engine.abort("r")
    engine.batch.rows.clear()
    longer = [*TOKENS, *prompt(2, 2 * CHUNK)]
    hit = serve(engine, "hit", longer)
    assert hit.local >= 4 * CHUNK - BLOCK
    other = make_engine(daemon).generate("elsewhere", longer)
    assert other.external == 0


def raise_where_rejected_drafts_ended_a_block(engine: Engine) -> tuple[list[int], int]:
    """Serve requests until such a step's output raises. Its tokens, and the end of the block in which it began.

    vLLM counts the drafts of the step before as accepted, which puts the step's begin into the next block.
    """
    for runner in engine.runners:
        runner.check = lambda *_: None  # type: ignore[method-assign]
    for number in range(100):
        engine.add("r", prompt(number, 40), count=100)
        request, tokens = engine.scheduler.requests["r"], []
        while "r" in engine.scheduler.requests:
            output = engine.scheduler.schedule()
            counted = [*output.scheduled_cached_reqs.num_computed_tokens, 0][0]
            row = engine.batch.rows.get("r")
            end = (row.computed // BLOCK + 1) * BLOCK if row is not None else ALL_TOKENS
            if end <= counted:
                row.numbers[-1] += 1  # garbage
            engine._queue.append((output, engine.execute(output)))
            if end > counted and len(engine._queue) < 2:
                continue
            engine._update(*engine._queue.popleft())
            if end <= counted:
                tokens = list(request.all_token_ids)
                engine.execute(engine.scheduler.schedule())  # vLLM takes the block for whole
                engine.abort("r")
                engine._queue.clear()
                engine.batch.rows.clear()
        assert serve(engine, f"after {number}", prompt(1000 + number, 20)).right
        if len(tokens) >= end:
            return tokens, end
    raise AssertionError("no draft was rejected there")


def test_a_step_whose_output_raised_behind_rejected_drafts_is_not_found(
    make_daemon: Callable, make_engine: MakeEngine
) -> None:
    """vLLM's own cache has the block in which it began. What a later request computes behind that block is not stored."""
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=True, drafts=4)
    tokens, end = raise_where_rejected_drafts_ended_a_block(engine)
    longer = [*tokens[:end], *prompt(500, 3 * CHUNK)]
    hit = serve(engine, "hit", longer)
    assert hit.local >= end
    assert read_elsewhere(make_engine, daemon, longer, drafts=4).external < end


@SCHEDULING
@pytest.mark.usefixtures("exact")
def test_what_was_computed_behind_a_siblings_failed_load_is_not_found(
    make_daemon: Callable, make_engine: MakeEngine, asynchronous: bool
) -> None:
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, adjust=beside_sibling)
    engine.generate("before", prompt(9, 40))
    Sibling.tokens = CHUNK
    answer = engine.add("victim", TOKENS)
    begin_step_of(engine, "victim")
    engine.run()
    assert answer.finish_reason == "length", "vLLM computes it anew"
    assert read_elsewhere(make_engine, daemon).external == 0


@SCHEDULING
@pytest.mark.usefixtures("exact")
def test_a_request_that_is_aborted_while_a_siblings_load_fails_leaves_nothing(
    make_daemon: Callable, make_engine: MakeEngine, asynchronous: bool
) -> None:
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, adjust=beside_sibling)
    engine.generate("before", prompt(9, 40))
    Sibling.tokens = CHUNK
    engine.add("victim", TOKENS)
    begin_step_of(engine, "victim")
    engine.abort("victim")
    engine.finish_steps()
    hit = engine.add("hit", TOKENS)  # in vLLM's own cache, which keeps the blocks
    engine.run()
    assert hit.local > 0
    assert read_elsewhere(make_engine, daemon).external == 0


@SCHEDULING
def test_what_lies_behind_a_load_of_a_sibling_that_is_not_exact_is_not_stored(
    make_daemon: Callable, make_engine: MakeEngine, asynchronous: bool
) -> None:
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, adjust=beside_sibling)
    engine.generate("before", prompt(9, 40))
    Sibling.tokens, Sibling.fails = 2 * CHUNK, False
    engine.add("victim", TOKENS)
    begin_step_of(engine, "victim")
    engine.run()
    hit = engine.add("hit", TOKENS)
    engine.run()
    assert hit.local > 2 * CHUNK
    assert read_elsewhere(make_engine, daemon).external == 0


def test_a_reset_of_running_requests_leaves_right_kv_only(
    make_daemon: Callable, make_forgetful_engine: MakeEngine, make_engine: MakeEngine
) -> None:
    """Not asynchronous: vLLM refuses such a reset there while it owes blocks of a step under way."""
    daemon = make_daemon()
    engine = make_forgetful_engine(daemon, asynchronous=False)
    answer = engine.add("r", TOKENS, count=20)
    engine.run(until=lambda: answer.tokens)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert answer.right
    assert read_elsewhere(make_engine, daemon).external == 4 * CHUNK


@SCHEDULING
@pytest.mark.usefixtures("exact")
def test_what_a_sibling_that_is_exact_loaded_is_stored(
    make_daemon: Callable, make_engine: MakeEngine, asynchronous: bool
) -> None:
    """Here it brings nothing, so what is found is wrong: the control of the test above."""
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, adjust=beside_sibling)
    engine.generate("before", prompt(9, 40))
    Sibling.tokens, Sibling.fails = 2 * CHUNK, False
    engine.add("victim", TOKENS)
    begin_step_of(engine, "victim")
    engine.run()
    with pytest.raises(AssertionError, match="attends to foreign KV"):
        read_elsewhere(make_engine, daemon)


@SCHEDULING
def test_a_request_that_failed_leaves_what_was_accepted_before(
    make_daemon: Callable, make_engine: MakeEngine, asynchronous: bool
) -> None:
    """Its last step is not accepted; the steps before are."""
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, max_tokens_per_step=2 * CHUNK)
    engine.add("r", TOKENS, count=20)
    engine.run(until=lambda: engine.connector.scheduler._requests["r"].accepted_tokens >= 2 * CHUNK)
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ERROR)
    engine.answers["r"].finish_reason = "error"
    engine.run()
    assert read_elsewhere(make_engine, daemon).external >= 2 * CHUNK
