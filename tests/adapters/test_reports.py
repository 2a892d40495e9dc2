"""What a daemon receives of an engine's blocks and requests: complete, in order, and in full again where something was lost."""

from __future__ import annotations

import msgspec
import pytest
from made_up_model import prompt
from modelless import Engine
from replay import Churn, Replay, timed
from support.daemon import Daemon, wait_until
from tap import Tap

from kvserver.adapters.common.speed import FLOOR_TOKENS
from kvserver.protocol import (
    PROTOCOL_VERSION,
    RECORD_ALLOCATED,
    EndRequest,
    Error,
    ErrorCode,
    ExactRecords,
    Hello,
    HelloReply,
    Lookup,
    ReportBlockAllocations,
    Retrieve,
    Store,
    encode,
)

CHUNK = 64


def delivered(tap: Tap, *engines: Engine) -> Tap:
    """The tap, once it has received all that these engines sent through it."""
    sent = sum(engine.connector.scheduler.counters["notices"] for engine in engines)
    wait_until(lambda: len(tap.notices()) >= sent, 5, f"{sent} notices")
    assert len(tap.notices()) == sent
    return tap


def reports(tap: Tap, instance_id: str | None = None) -> list[ReportBlockAllocations]:
    return [notice for notice in tap.notices(instance_id) if isinstance(notice, ReportBlockAllocations)]


def fulls(tap: Tap) -> list[bool]:
    return [report.payload.full for report in reports(tap)]


def serve(engine: Engine, names: str, count: int = 4) -> None:
    for number in range(count):
        engine.generate(f"{names}{number}", prompt(number, 2 * CHUNK + 9))


def replaced_after_some(daemon: Daemon, engine: Engine, tap: Tap) -> int:
    """How many reports the daemon before this one received."""
    serve(engine, "old")
    before = len(reports(delivered(tap, engine)))
    daemon.kill()
    daemon.start()
    return before


def counts_of(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.status()["instances"][0]["requests"]
    return found


# ---- what is reported -------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_all_reports_together_give_the_pools_own_state(make_daemon, make_engine, make_tap, asynchronous):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint, asynchronous=asynchronous, num_blocks=36)
    answers = [engine.add(f"r{i}", prompt(20 + i, 2 * CHUNK + 9), count=100) for i in range(4)]
    engine.run(60)
    engine.generate("again", prompt(20, 2 * CHUNK))
    assert engine.preemptions, "nothing was preempted: the pool is too large for this test"
    assert all(answer.right for answer in answers)
    sent = reports(delivered(tap, engine))
    assert Replay().apply_reports(sent).agrees_with(engine.pool)
    assert fulls(tap) == [True] + [False] * (len(sent) - 1)


def test_an_engine_that_falls_idle_reports_its_last_releases(make_daemon, make_engine, make_tap):
    daemon = make_daemon()
    engine = make_engine(make_tap(daemon).endpoint)
    engine.generate("only", prompt(1, 100))
    assert not engine.connector.has_pending_push_work()

    def blocks() -> list[float]:
        samples = [line.rsplit(" ", 1) for line in daemon.http("/metrics")[1].splitlines() if line[0] != "#"]
        wanted = [f"kvserver_l0_{state}_blocks{{" for state in ("active", "released")]
        return [float(value) for name in wanted for sample, value in samples if sample.startswith(name)]

    wait_until(lambda: blocks() == [0, 7])


def test_without_a_daemon_an_idle_engine_does_not_step_on_for_its_reports(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon)
    daemon.kill()
    engine.generate("only", prompt(1, 100))  # it ends, though its reports can go nowhere
    assert not engine.connector.has_pending_push_work()


def test_the_first_blocks_lifetimes_are_reported_from_their_beginning(make_daemon, make_engine, make_tap):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint)
    engine.generate("first", prompt(1, 100))
    payload = next(r.payload for r in reports(delivered(tap, engine)) if r.payload.records)
    assert [operation for _, operation, _ in timed(payload.records, payload.marks)] == [RECORD_ALLOCATED] * 7


def test_reports_and_ends_are_counted_without_gaps(make_daemon, make_engine, make_tap):
    daemon = make_daemon()
    tap = make_tap(daemon)
    engine = make_engine(tap.endpoint)
    serve(engine, "r")
    engine.scheduler.reset_prefix_cache()
    serve(engine, "s")
    notices = delivered(tap, engine).notices()
    assert [notice.sequence for notice in notices] == list(range(len(notices)))
    assert [end.request_id for end in tap.of(EndRequest)] == [f"{n}{i}" for n in "rs" for i in range(4)]
    wait_until(lambda: counts_of(daemon)["ended_requests"] == 8)
    assert counts_of(daemon)["sequence_gaps"] == 0
    assert engine.connector.scheduler.counters["unsent"] == 0


def test_a_pass_sends_one_report_at_most(make_daemon, make_engine, make_tap):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint)
    most = 0
    for number in range(20):
        before = len(reports(tap))
        engine.add(f"r{number}", prompt(number, 40), count=3)
        engine.step()
        most = max(most, len(reports(delivered(tap, engine))) - before)
    assert most == 1
    engine.run()


def test_a_load_that_alone_is_waited_for_goes_before_the_report_of_its_blocks(make_daemon, make_engine, make_tap):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", prompt(1, 3 * CHUNK + 5))
    tap = make_tap(daemon)
    engine = make_engine(tap.endpoint)
    engine.step()
    delivered(tap, engine)
    before = len(tap.received)
    assert engine.generate("warm", prompt(1, 3 * CHUNK + 5)).external == 3 * CHUNK
    sent = [
        type(m) for m in delivered(tap, engine).received[before:] if isinstance(m, (Retrieve, ReportBlockAllocations))
    ]
    assert sent[:2] == [Retrieve, ReportBlockAllocations]


def test_two_engines_of_one_daemon_are_distinguished(make_daemon, make_engine, make_tap):
    daemon = make_daemon()
    tap = make_tap(daemon)
    engines = {name: make_engine(tap.endpoint, engine_id=name) for name in ("one", "two")}
    for turn in range(3):
        for name, engine in engines.items():
            engine.generate(f"{name}{turn}", prompt(turn, CHUNK if name == "one" else 3 * CHUNK))
    delivered(tap, *engines.values())
    for name, engine in engines.items():
        notices = tap.notices(name)
        assert [notice.sequence for notice in notices] == list(range(len(notices)))
        assert Replay().apply_reports(reports(tap, name)).agrees_with(engine.pool)
    assert [i["requests"]["sequence_gaps"] for i in daemon.status()["instances"]] == [0, 0]


def test_a_report_of_2048_events_takes_at_most_9_kilobytes():
    churn = Churn(blocks=600)
    blocks = churn.pool.get_new_blocks(512)
    churn.pool.touch(blocks)
    churn.pool.free_blocks(blocks)
    churn.pool.free_blocks(blocks)
    taken = churn.drain_records()
    assert len(taken.records) == 4 * 2048
    report = ReportBlockAllocations(
        instance_id="12345678-1234-1234-1234-123456789abc_dp0",
        incarnation="12345678-1234",
        model_name="organisation/a-model-of-some-70B-Instruct",
        sequence=1 << 40,
        payload=ExactRecords(records=taken.records, marks=taken.marks),
    )
    print(f"{len(encode(report))} bytes, {len(taken.marks) // 16} marks")
    assert len(encode(report)) <= 9_000


# ---- what is reported in full again -----------------------------------------------------------


class Gap:
    """Answers one report as a daemon does that lost track."""

    def __init__(self, code: ErrorCode = ErrorCode.REPORT_GAP) -> None:
        self.code = code
        self.given: ReportBlockAllocations | None = None

    def __call__(self, message):
        if self.given is not None or not isinstance(message, ReportBlockAllocations):
            return None
        self.given = message
        return Error(code=self.code.value, message="of the test")


@pytest.mark.parametrize("code", [ErrorCode.REPORT_GAP, ErrorCode.UNKNOWN_INSTANCE])
def test_a_daemon_that_lost_track_receives_the_full_state_in_a_next_pass(make_daemon, make_engine, make_tap, code):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint)
    serve(engine, "before")
    gap = tap.instead = Gap(code)
    serve(engine, "gap", 1)
    wait_until(lambda: engine.generate_free("tick") and fulls(tap).count(True) == 2)
    assert gap.given is not None
    engine.run()
    sent = reports(delivered(tap, engine))
    assert fulls(tap).count(True) == 2, "once sent, it is not sent again"
    last_full = max(i for i, report in enumerate(sent) if report.payload.full)
    assert sent.index(gap.given) < last_full
    assert Replay().apply_reports(sent[last_full:]).agrees_with(engine.pool)


def test_a_new_daemon_receives_the_full_state(make_daemon, make_engine, make_tap):
    daemon = make_daemon()
    tap = make_tap(daemon)
    engine = make_engine(tap.endpoint)
    before = replaced_after_some(daemon, engine, tap)
    tap.instead = Gap(ErrorCode.UNKNOWN_INSTANCE)  # as long as its worker has not registered
    names = (f"new{i}" for i in range(10_000))

    def session() -> list[ReportBlockAllocations]:
        """What the new daemon receives, from the first full state on."""
        sent = reports(tap)[before:]
        full = [report.payload.full for report in sent]
        return sent[full.index(True) :] if any(full) else []

    def agrees() -> bool:
        """What it refuses at first is sent again in a later pass."""
        engine.generate(next(names), prompt(9, CHUNK))
        delivered(tap, engine)
        try:
            return len(session()) > 1 and Replay().apply_reports(session()).agrees_with(engine.pool)
        except AssertionError:
            return False

    wait_until(lambda: agrees() and daemon.status()["instances"], 20)
    assert counts_of(daemon)["sequence_gaps"] == 0


def test_a_daemon_replaced_unnoticed_requests_the_full_state(make_daemon, make_engine, make_tap):
    """Its worker has registered before the scheduler sends anything: nothing that the scheduler sends is refused."""
    daemon = make_daemon()
    tap = make_tap(daemon)
    engine = make_engine(tap.endpoint)
    before = replaced_after_some(daemon, engine, tap)
    wait_until(lambda: daemon.status()["instances"] and daemon.status()["instances"][0]["namespace"], 20)
    names = (f"new{i}" for i in range(10_000))

    def agrees() -> bool:
        """The session may begin anew behind the first full state: then another one is owed, for a later pass to send."""
        engine.generate(next(names), prompt(9, CHUNK))
        sent = reports(delivered(tap, engine))
        last_full = max(i for i, report in enumerate(sent) if report.payload.full)
        try:
            return any(fulls(tap)[before:]) and Replay().apply_reports(sent[last_full:]).agrees_with(engine.pool)
        except AssertionError:
            return False

    wait_until(agrees, 20)


# ---- an older daemon --------------------------------------------------------------------------


def test_an_older_daemon_is_left_alone_until_it_is_upgraded(make_daemon, make_engine, make_tap, caplog):
    tap = make_tap(make_daemon())
    refusal = Error(code=ErrorCode.VERSION_MISMATCH.value, message="speaks 1 to 3")
    tap.instead = lambda message: refusal if isinstance(message, Hello) else None
    engine = make_engine(tap.endpoint)
    assert engine.generate("r", prompt(0, 2 * CHUNK)).external == 0
    assert "running without cache: version_mismatch: speaks 1 to 3; upgrade the daemon first" in caplog.text
    assert {type(message) for message in tap.received} == {Hello}
    assert {hello.protocol_version for hello in tap.of(Hello)} == {PROTOCOL_VERSION}
    tap.instead = lambda message: None
    names = (f"again{i}" for i in range(10_000))
    wait_until(lambda: engine.generate(next(names), prompt(0, 2 * CHUNK)) and tap.of(Lookup), 20)


# ---- what requests report ---------------------------------------------------------------------


def test_a_lookup_states_the_whole_prompts_length_and_trace(make_daemon, make_engine, make_tap):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    engine.add("traced", prompt(1, 2 * CHUNK + 9), trace_headers={"TraceParent": parent, "tracestate": "a=b"})
    engine.add("not", prompt(2, CHUNK + 1))
    engine.add("else", prompt(3, CHUNK), trace_headers={"tracestate": "a=b"})
    engine.add("long", prompt(4, CHUNK), trace_headers={"traceparent": "0" * 513})
    engine.run()
    sent = {lookup.request_id: (lookup.tokens, lookup.traceparent) for lookup in tap.of(Lookup)}
    assert sent == {
        "traced": (2 * CHUNK + 9, parent),
        "not": (CHUNK + 1, ""),
        "else": (CHUNK, ""),
        "long": (CHUNK, ""),
    }


@pytest.mark.parametrize("traces", [True, False])
def test_loads_name_their_request_and_stores_where_the_daemon_traces(make_daemon, make_engine, make_tap, traces):
    tap = make_tap(make_daemon())

    def edit(reply):
        return msgspec.structs.replace(reply, traces=traces) if isinstance(reply, HelloReply) else reply

    tap.edit = edit
    make_engine(tap.endpoint).generate("cold", prompt(1, 2 * CHUNK))
    make_engine(tap.endpoint).generate("warm", prompt(1, 2 * CHUNK))
    assert [store.request_id for store in tap.of(Store)] == ["cold" if traces else ""]
    assert [load.request_id for load in tap.of(Retrieve)] == ["warm"]


def test_an_end_reports_how_fast_the_engine_computes_prompts(make_daemon, make_engine, make_tap):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint, measures_speed=True)
    engine.generate("short", prompt(1, FLOOR_TOKENS - 1))
    engine.generate("long", prompt(2, FLOOR_TOKENS))
    engine.generate("short again", prompt(3, 5))
    speeds = {end.request_id: end.prefill_tokens_per_second for end in delivered(tap, engine).of(EndRequest)}
    assert speeds["short"] == 0
    assert speeds["long"] == speeds["short again"] > 0
