"""A load that failed is not tried again at once: lookups stop before its chunks for a while, or until they are stored anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hybrids import HYBRIDS
from made_up_model import prompt
from modelless import Answer, Engine
from reconnect import replace_daemon
from support.daemon import Daemon, wait_until
from tap import Tap

from kvserver.adapters.common import failed_loads
from kvserver.adapters.common.failed_loads import MOST_KEYS, SECONDS, FailedLoads
from kvserver.adapters.common.specs import LoadSpec, StoreSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.vllm.scheduler import SchedulerHalf
from kvserver.protocol import KEY_BYTES, EndRequest, Error, Lookup, Reply, Request, Retrieve

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)
OLD_ANSWERS = {"kvserver.lookup_age_ms": 600_000}
MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]
MakeTap = Callable[[Daemon], Tap]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the memory of every engine."""
    clock = Clock()
    made = FailedLoads.__init__
    monkeypatch.setattr(FailedLoads, "__init__", lambda self: made(self, clock))
    return clock


def half_of(engine: Engine) -> SchedulerHalf:
    assert engine.connector.scheduler is not None
    return engine.connector.scheduler


def refuse_loads(message: Request) -> Reply | None:
    return Error(code="internal", message="no") if isinstance(message, Retrieve) else None


@pytest.fixture
def tap(make_daemon: MakeDaemon, make_tap: MakeTap) -> Tap:
    return make_tap(make_daemon(chunk_tokens=CHUNK))


def stored(tap: Tap, make_engine: MakeEngine, tokens: list[int] = TOKENS, **options: object) -> None:
    engine = make_engine(tap.endpoint, **options)
    engine.generate("cold", tokens)
    engine.close()


def one_fails_and_one_waits(tap: Tap, engine: Engine) -> Answer:
    """Both have their answer; the load of whichever is placed first fails, and it ends: else it computes what the other one needs."""
    tap.instead = refuse_loads
    answers = {name: engine.add(name, TOKENS) for name in ("one", "other")}
    engine.run(until=lambda: half_of(engine).counters["failed_loads"] == 1)
    waiting = [name for name in answers if engine.status_of(name) == "WAITING"]
    assert len(waiting) == 1, "there are no blocks for both"
    for name in answers.keys() - waiting:
        engine.abort(name)
    return answers[waiting[0]]


def test_of_many_requests_with_one_prompt_one_tries_a_load_that_fails(
    clock: Clock, tap: Tap, make_engine: MakeEngine
) -> None:
    """vllm#49176: each of them loaded, failed and computed."""
    stored(tap, make_engine)
    tap.instead = refuse_loads
    engine = make_engine(tap.endpoint, extra={"kvserver.on_prefix_reset": "keep"})
    for number in range(6):
        engine.generate(f"r{number}", TOKENS)
        engine.scheduler.reset_prefix_cache()
    assert len(engine.loads) == 1
    wait_until(lambda: len(tap.of(EndRequest)) == 7)
    assert [end.not_loaded for end in tap.of(EndRequest)[1:]] == ["", *["load_failed"] * 5]
    clock.now += SECONDS
    tap.instead = lambda message: None
    assert engine.generate("later", TOKENS).external == 4 * CHUNK


def test_a_request_tries_one_load_whatever_is_remembered(
    monkeypatch: pytest.MonkeyPatch, tap: Tap, make_engine: MakeEngine
) -> None:
    monkeypatch.setattr(failed_loads, "SECONDS", 0.0)
    stored(tap, make_engine)
    tap.instead = refuse_loads
    engine = make_engine(tap.endpoint)
    engine.generate("warm", TOKENS)
    assert len(engine.loads) == 1


@pytest.mark.parametrize("own", [20, 2 * CHUNK + 5])
def test_requests_that_wait_with_an_answer_do_not_load_what_failed_meanwhile(
    clock: Clock, tap: Tap, make_engine: MakeEngine, own: int
) -> None:
    """Nothing of it, or as far as nothing failed: the engine has the first `own` tokens itself."""
    stored(tap, make_engine)
    engine = make_engine(tap.endpoint, num_blocks=25, extra=OLD_ANSWERS)
    engine.generate("own", TOKENS[:own])
    before = len(engine.loads)
    waits = one_fails_and_one_waits(tap, engine)
    engine.run()
    assert waits.right
    assert len(engine.loads) == before + 1


def test_an_answer_from_before_a_failure_is_not_used_as_far_as_it_failed(
    clock: Clock, tap: Tap, make_engine: MakeEngine
) -> None:
    """The engine had the first chunks itself when the load failed, and lost them before the next request began."""
    stored(tap, make_engine)
    engine = make_engine(tap.endpoint, num_blocks=25, extra=OLD_ANSWERS | {"kvserver.on_prefix_reset": "keep"})
    engine.generate("own", TOKENS[: 2 * CHUNK + 5])
    waits = one_fails_and_one_waits(tap, engine)
    tap.instead = lambda message: None
    assert engine.scheduler.reset_prefix_cache()
    engine.run()
    assert waits.right
    assert waits.external == 2 * CHUNK


def test_lookup_ends_before_the_first_chunk_that_failed_to_load(
    clock: Clock, tap: Tap, make_engine: MakeEngine
) -> None:
    """What is before the failed chunks, and other prompts, are loaded as ever."""
    stored(tap, make_engine)
    other = TOKENS[: 2 * CHUNK] + prompt(9, 2 * CHUNK + 5)
    stored(tap, make_engine, other)
    engine = make_engine(tap.endpoint, extra={"kvserver.on_prefix_reset": "keep"})
    engine.generate("own", TOKENS[: 2 * CHUNK + 5])
    tap.instead = refuse_loads
    engine.generate("fails", TOKENS)
    tap.instead = lambda message: None
    engine.scheduler.reset_prefix_cache()
    before = len(tap.of(Lookup))
    assert engine.generate("short", TOKENS).external == 2 * CHUNK
    assert [len(lookup.keys) // KEY_BYTES for lookup in tap.of(Lookup)[before:]] == [2]
    engine.scheduler.reset_prefix_cache()
    assert engine.generate("other", other).external == 4 * CHUNK


def test_chunks_stored_anew_after_a_failed_load_are_loaded_at_once(
    clock: Clock, make_daemon: MakeDaemon, make_tap: MakeTap, make_engine: MakeEngine
) -> None:
    """A load failed since the chunks were cleared meanwhile; also on both of two ranks."""
    for world_size in (1, 2):
        daemon = make_daemon(chunk_tokens=CHUNK)
        tap = make_tap(daemon)
        stored(tap, make_engine, world_size=world_size)
        engine = make_engine(tap.endpoint, world_size=world_size, extra={"kvserver.on_prefix_reset": "keep"})

        def clear(plan: StepPlan, daemon: Daemon = daemon) -> None:
            if plan.loads:
                daemon.http("/cache/clear", "POST")

        engine.before_step = clear
        assert engine.generate("fails", TOKENS).right
        assert half_of(engine).counters["failed_loads"] >= 1
        engine.before_step = lambda plan: None
        engine.scheduler.reset_prefix_cache()
        assert engine.generate("again", TOKENS).external == 4 * CHUNK
        engine.close()


def test_failed_chunks_are_loaded_once_their_request_stored_them_after_its_end(
    clock: Clock, make_daemon: MakeDaemon, make_tap: MakeTap, make_engine: MakeEngine
) -> None:
    daemon = make_daemon(chunk_tokens=CHUNK, pauses=True)
    tap = make_tap(daemon)
    stored(tap, make_engine)
    engine = make_engine(tap.endpoint, extra={"kvserver.on_prefix_reset": "keep"})
    engine.run()

    def clear(plan: StepPlan) -> None:
        if plan.loads:
            daemon.http("/cache/clear", "POST")

    engine.before_step = clear
    with daemon.paused_copies():
        answer = engine.add("one step", TOKENS, count=1)
        engine.run(until=lambda: answer.finish_reason is not None)
        assert engine.connector.has_pending_push_work(), "its store runs"
    engine.before_step = lambda plan: None
    engine.run()
    assert (answer.right, half_of(engine).counters["failed_loads"]) == (True, 1)
    engine.scheduler.reset_prefix_cache()
    assert engine.generate("again", TOKENS).external == 4 * CHUNK


def test_chunks_that_failed_at_one_daemon_are_loaded_from_the_next_at_once(
    clock: Clock, make_daemon: MakeDaemon, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = make_daemon(chunk_tokens=CHUNK)

    def store_by_another() -> None:
        other = make_engine(daemon)
        other.generate("cold", TOKENS)
        other.close()

    store_by_another()
    engine = make_engine(daemon, extra={"kvserver.on_prefix_reset": "keep"})
    engine.before_step = lambda plan: daemon.http("/cache/clear", "POST") if plan.loads else None
    no_store = {"extra_args": {"kv_transfer_params": {"kvserver.no_store": True}}}
    engine.generate("fails", TOKENS, sampling=no_store)
    engine.before_step = lambda plan: None
    store_by_another()
    engine.scheduler.reset_prefix_cache()
    assert engine.generate("avoids", TOKENS, sampling=no_store).external == 0
    runs = engine.add("runs", prompt(5, 40), count=1000)
    replace_daemon(daemon, engine, caplog)
    assert not runs.finish_reason
    engine.abort("runs")
    engine.run()
    store_by_another()
    engine.scheduler.reset_prefix_cache()
    assert engine.generate("again", TOKENS).external == 4 * CHUNK


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_failed_load_of_windows_and_states_is_not_tried_again(
    clock: Clock, tap: Tap, make_engine: MakeEngine, name: str
) -> None:
    model = HYBRIDS[name]
    tokens = prompt(3, 5 * model.chunk + 20)
    stored(tap, make_engine, tokens, **model.options)
    tap.instead = refuse_loads
    engine = make_engine(tap.endpoint, extra={"kvserver.on_prefix_reset": "keep"}, **model.options)
    engine.generate("fails", tokens)
    loads = len(engine.loads)
    assert loads
    engine.scheduler.reset_prefix_cache()
    engine.generate("again", tokens)
    assert len(engine.loads) == loads
    clock.now += SECONDS
    tap.instead = lambda message: None
    engine.scheduler.reset_prefix_cache()
    assert engine.generate("later", tokens).external > 0


def test_failed_load_of_single_blocks_is_not_tried_again(
    clock: Clock, make_daemon: MakeDaemon, make_tap: MakeTap, make_engine: MakeEngine
) -> None:
    tap = make_tap(make_daemon(chunk_tokens=CHUNK, tails="on"))
    tokens = prompt(4, CHUNK - 10)
    stored(tap, make_engine, tokens)
    tap.instead = refuse_loads
    engine = make_engine(tap.endpoint, extra={"kvserver.on_prefix_reset": "keep"})
    for number in range(3):
        engine.generate(f"r{number}", tokens)
        engine.scheduler.reset_prefix_cache()
    assert len(engine.loads) == 1


# ---- the memory itself ----------------------------------------------------------------------------


def keys(first: int, count: int) -> bytes:
    return b"".join(number.to_bytes(KEY_BYTES, "little") for number in range(first, first + count))


def load(copy_id: int, names: bytes, group: int = 0, variant: str = "v") -> LoadSpec:
    return LoadSpec(copy_id, "r", variant, 1, names, b"", 0, group)


def store(copy_id: int, names: bytes, group: int = 0) -> StoreSpec:
    return StoreSpec(copy_id, "r", "v", 1, names, b"", None, group)


def test_failed_loads_are_bounded_and_forget_ends_of_prompts_first() -> None:
    failed = FailedLoads(Clock())
    failed.failed(load(1, keys(0, 3 * MOST_KEYS)))
    assert len(failed) == MOST_KEYS
    assert failed.leading("v", keys(0, 5)) == 0
    for number in range(3):
        failed.failed(load(2 + number, keys(10_000 * (1 + number), MOST_KEYS // 4)))
    assert len(failed) == MOST_KEYS
    assert failed.leading("v", keys(0, 5)) == 0, "the first keys of the oldest are the last to go"
    failed.failed(load(9, keys(90_000, MOST_KEYS)))
    assert failed.leading("v", keys(0, 5)) == 5


def test_loads_that_overlap_are_all_remembered() -> None:
    """Merged as ranges, 5 to 7 and 3 to 7 left out 3 and 4 (AIBrix PR 2146)."""
    for first, second in (((5, 3), (3, 5)), ((3, 5), (5, 3)), ((3, 2), (4, 4))):
        failed = FailedLoads(Clock())
        failed.failed(load(1, keys(*first)))
        failed.failed(load(2, keys(*second)))
        assert [number for number in range(10) if not failed.leading("v", keys(number, 1))] == [3, 4, 5, 6, 7]


def test_each_failed_key_expires_at_a_time_of_its_own() -> None:
    clock = Clock()
    failed = FailedLoads(clock)
    failed.failed(load(1, keys(0, 2)))
    clock.now += SECONDS / 2
    failed.failed(load(2, keys(1, 2)))
    clock.now += SECONDS / 2
    assert (failed.leading("v", keys(0, 3)), len(failed)) == (1, 2)
    clock.now += SECONDS / 2
    assert (failed.leading("v", keys(0, 3)), bool(failed)) == (3, False)


def test_failed_key_of_one_variant_is_not_failed_for_another() -> None:
    failed = FailedLoads(Clock())
    failed.failed(load(1, keys(0, 2)))
    assert failed.leading("another", keys(0, 2)) == 2


def test_failed_key_is_forgotten_only_after_all_ranks_stored_its_group() -> None:
    failed = FailedLoads(Clock())
    failed.failed(load(1, keys(0, 2)))
    failed.failed(load(2, keys(0, 2), group=1))
    failed.store_planned(store(3, keys(0, 2)), 2)
    failed.store_planned(store(4, keys(0, 2), group=1), 2)
    failed.store_copied(3, 2)
    failed.store_copied(4, 2)
    failed.store_copied(4, 2)
    assert failed.leading("v", keys(0, 2)) == 0, "one rank of group 0 has not copied"
    failed.store_copied(3, 1)
    assert failed.leading("v", keys(0, 2)) == 0, "one object was there"
    failed.store_copied(3, 1)
    assert not failed


def test_store_planned_before_the_failed_load_does_not_forget_its_keys() -> None:
    failed = FailedLoads(Clock())
    failed.store_planned(store(3, keys(0, 2)), 1)
    failed.failed(load(4, keys(0, 2)))
    failed.store_copied(3, 2)
    assert failed.leading("v", keys(0, 2)) == 0


def test_failed_load_of_an_earlier_session_is_not_remembered() -> None:
    failed = FailedLoads(Clock())
    failed.begin_session(5)
    failed.failed(load(4, keys(0, 2)))
    assert not failed
    failed.failed(load(6, keys(0, 2)))
    assert failed
