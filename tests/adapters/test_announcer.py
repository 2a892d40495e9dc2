"""What the engine's own stream publishes of the daemon's tiers: everything once, whatever happens to daemons and answers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from announcer_stage import PER_CHUNK, TOKENS, Clock, Stage, block_hash, chunk, hashes_of, removal
from hypothesis import given
from support.properties import Dice, examples, walks
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kvserver.adapters.common import announcer as module
from kvserver.adapters.common.announcer import MOST_BLOCKS, WITHDRAW_SECONDS
from kvserver.protocol import Error, ErrorCode, KVBlocks, KVEventsTaken, TakeKVEvents


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    return clock


@pytest.fixture
def stage(clock) -> Iterator[Stage]:
    made = Stage(clock)
    yield made
    made.close()


# ---- the form of events -----------------------------------------------------------------------


def test_blocks_are_published_as_vllm_publishes_its_own(stage):
    extra_keys = msgspec.msgpack.encode([["sql"], None, [["cat", 3]]])
    stage.deliver(chunk(5, medium="STORAGE", group=1, lora_name="sql", extra_keys=extra_keys))
    (event,) = stage.step()
    assert event == BlockStored(
        block_hashes=[block_hash(5, i) for i in range(3)],
        parent_block_hash=block_hash(5, -1),
        token_ids=list(range(5, 17)),
        block_size=TOKENS,
        lora_id=None,
        medium="STORAGE",
        lora_name="sql",
        extra_keys=[("sql",), None, (["cat", 3],)],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=128,
    )
    stage.deliver(removal(5, medium="STORAGE", group=1))
    assert stage.step() == [BlockRemoved(block_hashes=event.block_hashes, medium="STORAGE", group_idx=1)]


def test_blocks_of_l1_are_local_and_no_tier_owns_any(stage):
    stage.deliver(chunk(5), removal(5))
    assert [(event.locality, event.ownership) for event in stage.step()] == [("LOCAL", None)] * 2


def test_hashes_have_the_form_of_the_engines_own(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    stage = Stage(Clock())
    try:
        stage.deliver(chunk(5), removal(5))
        stored, removed = stage.step()
        assert stored.block_hashes == [int.from_bytes(block_hash(5, i)[-8:], "big") for i in range(3)]
        assert stored.parent_block_hash == int.from_bytes(block_hash(5, -1)[-8:], "big")
        assert removed.block_hashes == stored.block_hashes
    finally:
        stage.close()


def test_a_prompts_start_has_no_parent(stage):
    stage.deliver(msgspec.structs.replace(chunk(5), parent=b""))
    assert stage.step()[0].parent_block_hash is None


# ---- when it is asked -------------------------------------------------------------------------


def test_an_engine_without_kv_events_asks_nothing():
    stage = Stage(Clock(), publishes=False)
    assert not stage.end_pass()
    assert stage.step() == []
    stage.close()


def test_announcer_keeps_one_request_open_and_pauses_after_each_reply(stage):
    assert stage.end_pass()
    assert not stage.end_pass()
    stage.answer(KVEventsTaken(follow=7, cursor=0, events=[], whole=False))
    assert not stage.end_pass(0.01)
    assert stage.end_pass(0.05)
    stage.answer(KVEventsTaken(follow=7, cursor=3, events=[], whole=False, more=True))
    assert stage.end_pass(0.0)
    assert [(q.follow, q.cursor) for q in stage.asked] == [(0, 0), (7, 0), (7, 3)]


def test_no_more_events_are_requested_before_vllm_has_taken_the_last_ones(stage):
    stage.deliver(chunk(5), more=True)
    assert not stage.end_pass()
    stage.step()
    assert stage.end_pass()


def test_a_refused_question_is_asked_again_later(stage):
    assert stage.end_pass()
    stage.answer(Error(code=ErrorCode.NOT_READY.value, message="of the test"))
    assert not stage.end_pass(0.1)
    assert stage.end_pass(0.5)


def test_a_step_hands_over_a_bounded_number_of_blocks(stage):
    many = [chunk(number) for number in range(2 * MOST_BLOCKS // PER_CHUNK)]
    stage.deliver(*many)
    steps = []
    while events := stage.step():
        steps.append(sum(len(event.block_hashes) for event in events))
    assert sum(steps) == len(many) * PER_CHUNK
    assert len(steps) == 2
    assert max(steps) < MOST_BLOCKS + PER_CHUNK


# ---- no event twice ---------------------------------------------------------------------------


def test_blocks_repeated_in_a_new_follow_are_not_announced_again(stage):
    stage.deliver(chunk(1), chunk(2))
    stage.step()
    stage.deliver(chunk(2), chunk(3), follow=8)
    assert [event.block_hashes[0] for event in stage.step()] == [block_hash(3, 0)]
    assert stage.blocks() == hashes_of(1, 2, 3), "that 1 was removed is known when the snapshot is whole"
    stage.deliver(follow=8, whole=True)
    stage.step()
    assert stage.blocks() == hashes_of(2, 3)


def test_a_chunk_that_is_partly_known_has_its_news_announced(stage):
    """Two prompts part inside it, or it was half withdrawn: what is left has the block before it for a parent."""
    known, whole = chunk(1), chunk(1)
    stage.deliver(msgspec.structs.replace(known, hashes=known.hashes[:32], tokens=known.tokens[: 4 * TOKENS]))
    stage.step()
    stage.deliver(whole, follow=8)
    (event,) = stage.step()
    assert event.block_hashes == [block_hash(1, 1), block_hash(1, 2)]
    assert event.parent_block_hash == block_hash(1, 0)
    assert event.token_ids == list(range(1 + TOKENS, 1 + 3 * TOKENS))


def test_a_known_block_that_is_removed_during_a_new_snapshot_is_removed_once(stage):
    stage.deliver(chunk(1), chunk(2))
    stage.step()
    stage.deliver(chunk(1), removal(1), follow=8)
    (event,) = stage.step()
    assert event.block_hashes == [block_hash(1, i) for i in range(PER_CHUNK)]
    stage.deliver(follow=9)
    stage.deliver(chunk(2), follow=9, whole=True)
    assert stage.step() == []
    assert stage.blocks() == hashes_of(2)


def test_media_and_groups_are_distinguished(stage):
    stage.deliver(chunk(1), chunk(1, medium="STORAGE"), chunk(1, group=1))
    stage.deliver(removal(1)) if stage.step() else None
    stage.step()
    assert stage.blocks() == set()
    assert stage.blocks("STORAGE") == stage.blocks("CPU", 1) == hashes_of(1)


def test_an_answer_that_comes_too_late_is_ignored(stage):
    assert stage.end_pass()
    assert stage.end_pass(WITHDRAW_SECONDS + 1), "it asks from the start again"
    stage.answer(KVEventsTaken(follow=7, cursor=1, events=[chunk(1)], whole=False), which=0)
    assert stage.step() == []
    stage.answer(KVEventsTaken(follow=8, cursor=1, events=[chunk(2)], whole=False))
    assert len(stage.step()) == 1
    assert stage.blocks() == hashes_of(2)


def test_a_new_session_is_asked_from_the_start(stage):
    stage.deliver(chunk(1))
    stage.step()
    assert stage.end_pass()
    stage.connect()
    stage.deliver(chunk(1), chunk(2), follow=7)
    assert stage.asked[-1].follow == 0
    assert len(stage.step()) == 1


# ---- vLLM forgets its own ---------------------------------------------------------------------


def test_after_vllms_own_clear_all_resident_blocks_are_announced_again(stage):
    stage.deliver(chunk(1), chunk(2), whole=True)
    stage.step()
    stage.hook.reset()
    assert stage.end_pass()
    stage.consumer.read([AllBlocksCleared()])  # vLLM's, which precedes ours in the step
    assert stage.step() == []
    stage.answer(KVEventsTaken(follow=7, cursor=3, events=[removal(1)], whole=False))
    assert stage.step() == [], "it is of before the clear"
    stage.deliver(chunk(2), follow=8)
    assert stage.asked[-1].follow == 0
    stage.step()
    assert stage.blocks() == hashes_of(2)


def test_events_not_handed_over_before_a_clear_are_requested_again(stage):
    stage.deliver(chunk(1))
    stage.hook.reset()
    assert stage.step() == []
    stage.deliver(chunk(1), follow=8)
    assert len(stage.step()) == 1


# ---- no daemon has the blocks -----------------------------------------------------------------


def lose(stage: Stage, how: str) -> None:
    if how == "no session":
        stage.hang_up()
        stage.end_pass()
    elif how == "no answer":
        assert stage.end_pass()
    else:
        assert stage.end_pass()
        stage.answer(Error(code=ErrorCode.UNKNOWN_INSTANCE.value, message="of the test"))


def give_up(stage: Stage, how: str) -> None:
    """The next pass, and what comes of it."""
    asked = stage.end_pass()
    if how == "refused":
        assert asked
        stage.answer(Error(code=ErrorCode.UNKNOWN_INSTANCE.value, message="of the test"))


@pytest.mark.parametrize("how", ["no session", "no answer", "refused"])
def test_without_a_daemon_for_some_seconds_its_blocks_are_withdrawn(stage, how):
    stage.deliver(chunk(1), chunk(2), whole=True)
    stage.step()
    lose(stage, how)
    stage.clock.now += WITHDRAW_SECONDS - 2
    give_up(stage, how)
    assert stage.step() == [], "it may be back soon"
    stage.clock.now += 1
    give_up(stage, how)
    assert {type(event) for event in stage.step()} == {BlockRemoved}
    assert stage.blocks() == set()


@pytest.mark.parametrize("how", ["no session", "no answer", "refused"])
def test_blocks_of_a_daemon_that_is_back_are_announced_again(stage, how):
    stage.deliver(chunk(1), chunk(2), whole=True)
    stage.step()
    lose(stage, how)
    stage.clock.now += WITHDRAW_SECONDS
    give_up(stage, how)
    stage.step()
    assert stage.blocks() == set()
    stage.connect()
    stage.deliver(chunk(1), chunk(3), follow=9, whole=True)
    stage.step()
    assert stage.blocks() == hashes_of(1, 3)


def test_a_daemon_that_is_back_soon_changes_only_what_is_different(stage):
    stage.deliver(chunk(1), chunk(2), whole=True)
    stage.step()
    stage.hang_up()
    stage.end_pass()
    stage.connect()
    stage.deliver(chunk(2), chunk(3), follow=9, whole=True)
    assert len(stage.step()) == 2
    assert stage.blocks() == hashes_of(2, 3)


def test_an_idle_engine_withdraws_nothing_of_a_daemon_that_answers(stage):
    """No pass, so no question, for as long as nothing is asked of the engine."""
    stage.deliver(chunk(1), whole=True)
    stage.step()
    assert stage.end_pass(3600)
    assert stage.step() == []
    stage.answer(KVEventsTaken(follow=7, cursor=1, events=[], whole=True))
    assert stage.step() == []


def test_withdrawing_is_bounded_in_each_step_and_ends_when_the_daemon_is_back(stage):
    chunks = range(3 * MOST_BLOCKS // PER_CHUNK)
    stage.deliver(*map(chunk, chunks), whole=True)
    while stage.step():
        pass
    stage.hang_up()
    stage.end_pass()
    stage.end_pass(WITHDRAW_SECONDS + 1)
    (event,) = stage.step()
    assert len(event.block_hashes) == MOST_BLOCKS
    stage.connect()
    stage.deliver(follow=9)
    assert stage.step() == []
    assert len(stage.blocks()) == len(chunks) * PER_CHUNK - MOST_BLOCKS
    stage.deliver(*map(chunk, chunks), follow=9, whole=True)
    while stage.step():
        pass
    assert stage.blocks() == hashes_of(*chunks)


# ---- at random --------------------------------------------------------------------------------


class DaemonSide:
    """A daemon's side of a follow: its resident chunks, and the events it has still to publish."""

    def __init__(self) -> None:
        self.resident: set[int] = set()
        self.follow = 100
        self._queue: list[KVBlocks] = []
        self._cursor = 0
        self._snapshot_left = 0

    def lose_track(self) -> None:
        self.follow += 1
        self._queue = [chunk(number) for number in sorted(self.resident)]
        self._snapshot_left = len(self._queue)
        self._cursor = 0

    def change(self, dice: Dice) -> None:
        number = dice.randrange(40)
        stored = number not in self.resident
        self.resident ^= {number}
        self._queue.append(chunk(number, stored=stored))

    def reply(self, question: TakeKVEvents, dice: Dice) -> KVEventsTaken:
        if question.follow != self.follow or question.cursor < self._cursor:
            self.lose_track()
        count = dice.randrange(6)
        events, self._queue = self._queue[:count], self._queue[count:]
        self._cursor += len(events)
        self._snapshot_left = max(0, self._snapshot_left - len(events))
        return KVEventsTaken(
            follow=self.follow,
            cursor=self._cursor,
            events=events,
            whole=self._snapshot_left == 0,
            more=bool(self._queue),
        )


class Walk:
    def __init__(self, clock: Clock) -> None:
        self.stage, self.daemon = Stage(clock), DaemonSide()

    def step(self, dice: Dice) -> None:
        stage, daemon = self.stage, self.daemon
        match dice.choices(["step", "change", "track", "restart", "clear", "away"], [60, 30, 2, 2, 2, 1])[0]:
            case "step":
                self.turn(dice)
            case "change":
                daemon.change(dice)
            case "track":
                daemon.lose_track()
            case "restart":
                daemon.resident -= set(dice.sample(range(40), 30))
                daemon.lose_track()
                stage.connect()
            case "clear":
                stage.hook.reset()
                stage.consumer.read([AllBlocksCleared()])
                stage.step()
            case "away":
                stage.hang_up()
                for _ in range(3):
                    stage.end_pass(3)
                    stage.step()
                stage.connect()

    def turn(self, dice: Dice) -> None:
        """The daemon answers a question, if there is one."""
        if self.stage.end_pass(0.06):
            self.stage.answer(self.daemon.reply(self.stage.asked[-1], dice))
        self.stage.step()


@pytest.mark.hypothesis
def test_at_random_the_stream_ends_with_the_resident_blocks(clock):
    @given(steps=walks(400))
    @examples(10)
    def run(steps: list[Dice]) -> None:
        walk = Walk(clock)
        try:
            for dice in steps:
                walk.step(dice)
            for number in range(60):
                walk.turn(Dice(number))
            assert walk.stage.blocks() == hashes_of(*walk.daemon.resident)
        finally:
            walk.stage.close()

    run()
