"""What the engine's own stream publishes of the daemon's tiers: everything once, whatever happens to daemons and answers."""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvserver.adapters.common import announcer as module
from kvserver.adapters.common.announcer import MOST_BLOCKS, WITHDRAW_SECONDS, Announcer
from kvserver.adapters.common.notices import EngineNames
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.events import TierEvents
from peer import Peer as DaemonPeer
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kvserver.protocol import (
    Error,
    ErrorCode,
    KVBlocks,
    KVEventsTaken,
    KVGroup,
    Reply,
    TakeKVEvents,
)

GROUPS = (KVGroup("full_attention"), KVGroup("sliding_window", 128))
TOKENS = 4  # of a block
PER_CHUNK = 3


def block_hash(prompt: int, index: int) -> bytes:
    return hashlib.sha256(f"{prompt}/{index}".encode()).digest()


def chunk(number: int, *, stored: bool = True, medium: str = "CPU", group: int = 0, **fields: Any) -> KVBlocks:
    """The second chunk of a prompt."""
    hashes = b"".join(block_hash(number, i) for i in range(PER_CHUNK))
    if not stored:
        return KVBlocks(False, medium, 32, hashes, group)
    tokens = array("I", range(number, number + PER_CHUNK * TOKENS)).tobytes()
    return KVBlocks(True, medium, 32, hashes, group, TOKENS, block_hash(number, -1), tokens, **fields)


def removal(number: int, **fields: Any) -> KVBlocks:
    return chunk(number, stored=False, **fields)


class Consumer:
    """What a router believes, by medium and group. An event that repeats an earlier one fails."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str | None, int | None], set[Any]] = {}

    def read(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            blocks = self.blocks.setdefault((event.medium, event.group_idx), set())
            hashes = set(event.block_hashes)
            assert len(hashes) == len(event.block_hashes) > 0
            if isinstance(event, BlockStored):
                assert not hashes & blocks, "stored twice"
                blocks |= hashes
            else:
                assert hashes <= blocks, "removed what is not there"
                blocks -= hashes

    def has(self, medium: str = "CPU", group: int = 0) -> set[Any]:
        return self.blocks.get((medium, group), set())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Stage:
    """An announcer between a consumer and a peer whose answers a test gives."""

    def __init__(self, folder: Path, clock: Clock, publishes: bool = True) -> None:
        self.clock = clock
        self.hook = PoolHook(lambda block_id: None)
        self.consumer = Consumer()
        self._peer = DaemonPeer(folder)
        self._peer.listen()
        names = EngineNames("i", "n", "m")
        self.announcer = Announcer(self._peer.dispatcher, names, TierEvents(GROUPS), publishes)
        self.asked: list[TakeKVEvents] = []
        self._frames: list[Any] = []  # of these
        self.connect()

    def connect(self) -> None:
        """A new session, with no question on its way."""
        assert self._peer.link.connect().wait_writable(5)
        self._peer.dispatcher.usable()

    def hang_up(self) -> None:
        self._peer.link.session = None
        self._peer.dispatcher.usable()

    def end_pass(self, seconds: float = 1.0) -> bool:
        """Whether it asked the peer. Time passes before."""
        self.clock.now += seconds
        sent = self._peer.sent
        self.announcer.request_events()
        if self._peer.sent == sent:
            return False
        received = self._peer.receive(10)
        assert received is not None
        frames, request = received
        assert isinstance(request, TakeKVEvents)
        self.asked.append(request)
        self._frames.append(frames)
        return True

    def answer(self, reply: Reply, which: int = -1) -> None:
        """To the last question, or an earlier one."""
        self._peer.reply(self._frames[which], reply)

    def deliver(self, *events: KVBlocks, follow: int = 7, whole: bool = False, more: bool = False) -> None:
        """One question and its answer, with these events."""
        assert self.end_pass()
        cursor = self.asked[-1].cursor + len(events)
        self.answer(KVEventsTaken(follow=follow, cursor=cursor, events=list(events), whole=whole, more=more))

    def step(self) -> list[Any]:
        """What one step hands to vLLM."""
        events = self.announcer.drain_events(self.hook.clears)
        self.consumer.read(events)
        return events

    def close(self) -> None:
        self._peer.close()


@pytest.fixture
def stage(monkeypatch) -> Iterator[Stage]:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    made = Stage(folder, clock)
    yield made
    made.close()
    shutil.rmtree(folder)


def hashes_of(*numbers: int) -> set[bytes]:
    return {block_hash(number, i) for number in numbers for i in range(PER_CHUNK)}


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


def test_hashes_have_the_form_of_the_engines_own(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    stage = Stage(Path(tempfile.mkdtemp(prefix="kvs-")), Clock())
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


def test_an_engine_without_kv_events_asks_nothing(tmp_path):
    stage = Stage(tmp_path, Clock(), publishes=False)
    assert not stage.end_pass()
    assert stage.step() == []
    stage.close()


def test_one_question_at_a_time_and_a_pause_behind_each_answer(stage):
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
    assert stage.consumer.has() == hashes_of(1, 2, 3), "that 1 was removed is known when the snapshot is whole"
    stage.deliver(follow=8, whole=True)
    stage.step()
    assert stage.consumer.has() == hashes_of(2, 3)


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
    assert stage.consumer.has() == hashes_of(2)


def test_media_and_groups_are_distinguished(stage):
    stage.deliver(chunk(1), chunk(1, medium="STORAGE"), chunk(1, group=1))
    stage.deliver(removal(1)) if stage.step() else None
    stage.step()
    assert stage.consumer.has() == set()
    assert stage.consumer.has("STORAGE") == stage.consumer.has("CPU", 1) == hashes_of(1)


def test_an_answer_that_comes_too_late_is_ignored(stage):
    assert stage.end_pass()
    assert stage.end_pass(WITHDRAW_SECONDS + 1), "it asks from the start again"
    stage.answer(KVEventsTaken(follow=7, cursor=1, events=[chunk(1)], whole=False), which=0)
    assert stage.step() == []
    stage.answer(KVEventsTaken(follow=8, cursor=1, events=[chunk(2)], whole=False))
    assert len(stage.step()) == 1
    assert stage.consumer.has() == hashes_of(2)


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
    assert stage.consumer.has() == hashes_of(2)


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
    assert stage.consumer.has() == set()


@pytest.mark.parametrize("how", ["no session", "no answer", "refused"])
def test_blocks_of_a_daemon_that_is_back_are_announced_again(stage, how):
    stage.deliver(chunk(1), chunk(2), whole=True)
    stage.step()
    lose(stage, how)
    stage.clock.now += WITHDRAW_SECONDS
    give_up(stage, how)
    stage.step()
    assert stage.consumer.has() == set()
    stage.connect()
    stage.deliver(chunk(1), chunk(3), follow=9, whole=True)
    stage.step()
    assert stage.consumer.has() == hashes_of(1, 3)


def test_a_daemon_that_is_back_soon_changes_only_what_is_different(stage):
    stage.deliver(chunk(1), chunk(2), whole=True)
    stage.step()
    stage.hang_up()
    stage.end_pass()
    stage.connect()
    stage.deliver(chunk(2), chunk(3), follow=9, whole=True)
    assert len(stage.step()) == 2
    assert stage.consumer.has() == hashes_of(2, 3)


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
    assert len(stage.consumer.has()) == len(chunks) * PER_CHUNK - MOST_BLOCKS
    stage.deliver(*map(chunk, chunks), follow=9, whole=True)
    while stage.step():
        pass
    assert stage.consumer.has() == hashes_of(*chunks)


# ---- at random --------------------------------------------------------------------------------


class Peer:
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

    def change(self, source: random.Random) -> None:
        number = source.randrange(40)
        stored = number not in self.resident
        self.resident ^= {number}
        self._queue.append(chunk(number, stored=stored))

    def reply(self, question: TakeKVEvents, source: random.Random) -> KVEventsTaken:
        if question.follow != self.follow or question.cursor < self._cursor:
            self.lose_track()
        count = source.randrange(6)
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


@pytest.mark.parametrize("seed", range(8))
def test_at_random_the_stream_ends_with_the_resident_blocks(stage, seed):
    source = random.Random(seed)
    peer = Peer()
    for _ in range(400):
        match source.choices(["step", "change", "track", "restart", "clear", "away"], [60, 30, 2, 2, 2, 1])[0]:
            case "step":
                if stage.end_pass(0.06):
                    stage.answer(peer.reply(stage.asked[-1], source))
                stage.step()
            case "change":
                peer.change(source)
            case "track":
                peer.lose_track()
            case "restart":
                peer.resident -= set(source.sample(range(40), 30))
                peer.lose_track()
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
    for _ in range(60):
        if stage.end_pass(0.06):
            stage.answer(peer.reply(stage.asked[-1], source))
        stage.step()
    assert stage.consumer.has() == hashes_of(*peer.resident)
