"""Answers to lookups are remembered by request, also where SGLang itself has more or fewer pages in a later pass."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import pytest

from kvserver.adapters.common.lookups import Answer, Question
from kvserver.adapters.sglang import hits
from kvserver.adapters.sglang.hits import RememberedHits
from kvserver.protocol import Lookup, LookupTail

KEYS = [f"{number:064x}" for number in range(10)]


class AnsweredLookups:
    """Lookups that a daemon has answered, when `polls` polls were made, with pages up to number `found`."""

    def __init__(self, found: int, polls: int = 0, boundaries: tuple[int, ...] = ()) -> None:
        self.found, self.polls, self.boundaries = found, polls, boundaries
        self.sent: list[bytes] = []
        self.dropped = 0
        self.seconds_left = self.poll_seconds = 1.0

    def must_send(self, question: Question) -> bool:
        return question.answer is None and question.deadline == 0

    def send(self, question: Question, message: Lookup, tail_of: LookupTail) -> None:
        self.sent.append(message.keys)
        question.deadline = 1
        first = int.from_bytes(message.keys[:32], "big")
        hit = max(0, min(self.found - first, len(message.keys) // 32))
        self._answer = Answer(hit, time.monotonic(), boundaries=self.boundaries)

    def known_until(self, question: Question) -> float:
        return math.inf if question.answer is not None else 0

    def answer_to(self, question: Question, waits: bool = True) -> Answer | None:
        self.polls -= 1
        if self.polls < 0:
            question.answer = self._answer
        return question.answer

    def next_pass(self) -> None:
        return

    def drop_question(self, question: Question) -> None:
        self.dropped += 1


def lookup_of(request_id: str, keys: bytes) -> Lookup:
    return Lookup("i", "n", request_id, 1, keys)


def remembered(lookups: AnsweredLookups) -> RememberedHits:
    return RememberedHits(lookups, lookup_of)  # type: ignore[arg-type]


def test_a_request_is_looked_up_once_however_often_it_is_asked_about() -> None:
    lookups = AnsweredLookups(found=6)
    found = remembered(lookups)
    assert [found.pages("r", KEYS) for _ in range(5)] == [6] * 5
    assert len(lookups.sent) == 1


def test_a_request_whose_answer_has_not_arrived_has_no_hit_yet() -> None:
    found = remembered(AnsweredLookups(found=6, polls=2))
    assert [found.pages("r", KEYS) for _ in range(4)] == [0, 0, 6, 6]


def test_pages_that_sglang_has_by_now_are_left_out_without_another_lookup() -> None:
    lookups = AnsweredLookups(found=6)
    found = remembered(lookups)
    assert found.pages("r", KEYS) == 6
    assert found.pages("r", KEYS[4:]) == 2
    assert found.pages("r", KEYS[7:]) == 0
    assert len(lookups.sent) == 1


def test_pages_that_sglang_has_no_more_are_looked_up() -> None:
    lookups = AnsweredLookups(found=6)
    found = remembered(lookups)
    assert found.pages("r", KEYS[4:]) == 2
    assert found.pages("r", KEYS) == 6
    assert len(lookups.sent) == 2


class KeptKeys(AnsweredLookups):
    """Lookups in a daemon that has these keys."""

    def __init__(self, kept: Sequence[str], polls: int) -> None:
        super().__init__(0, polls)
        self.kept = kept

    def send(self, question: Question, message: Lookup, tail_of: LookupTail) -> None:
        super().send(question, message, tail_of)
        packed = message.keys.hex()
        self._answer = Answer(leading([packed[at : at + 64] for at in range(0, len(packed), 64)], self.kept), 0.0)


def leading(keys: Sequence[str], kept: Sequence[str]) -> int:
    return sum(1 for _ in itertools.takewhile(kept.__contains__, keys))


@pytest.mark.parametrize("polls", [0, 1], ids=["answered", "not answered yet"])
def test_another_prompt_with_the_same_request_id_has_its_own_hit_however_much_is_alike(polls: int) -> None:
    for alike, begin, other_begin, length, in_first, in_other in itertools.product(range(5), repeat=6):
        first, other = KEYS[:5], KEYS[:alike] + [key[::-1] for key in KEYS[5 : 10 - alike]]
        asked, asked_other = first[begin:], other[other_begin : other_begin + length + 1]
        kept = first[:in_first] + other[:in_other]
        found = remembered(KeptKeys(kept, polls))
        found.pages("r", asked)
        found.pages("r", asked_other)
        assert found.pages("r", asked_other) == leading(asked_other, kept), (asked, asked_other, kept)


def test_lengths_that_can_be_loaded_are_counted_from_the_first_page_that_sglang_has_not() -> None:
    found = remembered(AnsweredLookups(found=8, boundaries=(2, 5, 8)))
    assert found.boundaries("r", KEYS) == [2, 5, 8]
    assert found.boundaries("r", KEYS[4:]) == [1, 4]
    assert found.boundaries("r", KEYS[4:6]) == [1]
    assert list(found.boundaries("r", KEYS[8:])) == []


def test_an_older_daemon_that_names_no_lengths_gives_the_longest_one() -> None:
    found = remembered(AnsweredLookups(found=6))
    assert found.boundaries("r", KEYS) == [6]
    assert found.boundaries("r", KEYS[4:]) == [2]


def test_requests_that_sglang_asks_about_no_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "MOST_REMEMBERED", 3)
    lookups = AnsweredLookups(found=6)
    found = remembered(lookups)
    for number in range(10):
        found.next_pass()
        assert found.pages(str(number // 2), KEYS) == 6
    assert (len(lookups.sent), lookups.dropped) == (5, 2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowLookups(AnsweredLookups):
    """Lookups of which each takes 300 us to begin, and whose answers take `answer_seconds`, within a pass of 1 ms."""

    def __init__(self, clock: Clock, answer_seconds: float) -> None:
        super().__init__(found=6)
        self.poll_seconds = 0.001
        self._clock, self._answer_seconds = clock, answer_seconds
        self._due: dict[Question, float] = {}

    def next_pass(self) -> None:
        self.seconds_left = 0.001

    def send(self, question: Question, message: Lookup, tail_of: LookupTail) -> None:
        super().send(question, message, tail_of)
        self._clock.now += 0.0003
        self._due[question] = self._clock.now + self._answer_seconds

    def answer_to(self, question: Question, waits: bool = True) -> Answer | None:
        if waits and self.seconds_left > 0:
            self._clock.now += max(0.0, min(self._due[question] - self._clock.now, self.seconds_left))
        if self._clock.now >= self._due[question]:
            question.answer = self._answer
        return question.answer


def test_lookups_begin_while_the_time_of_the_pass_lasts_and_the_others_in_later_ones() -> None:
    lookups = SlowLookups(clock := Clock(), answer_seconds=0)
    found = RememberedHits(lookups, lookup_of, clock)  # type: ignore[arg-type]
    for begun, known in ((4, 2), (8, 6), (10, 10), (10, 10)):
        found.next_pass()
        began = clock.now
        assert [found.pages(str(number), KEYS) for number in range(10)] == [6] * known + [0] * (10 - known)
        assert clock.now - began < 0.001 + 0.0003, "one lookup may end behind the bound"
        assert len(lookups.sent) == begun
        clock.now += 1


def test_a_wait_for_an_answer_leaves_less_time_for_lookups() -> None:
    lookups = SlowLookups(clock := Clock(), answer_seconds=0.00015)
    found = RememberedHits(lookups, lookup_of, clock)  # type: ignore[arg-type]
    found.next_pass()
    assert [found.pages(str(number), KEYS) for number in range(10)] == [6] + [0] * 9
    assert (len(lookups.sent), round(clock.now, 6)) == (3, 0.00105), (
        "only the first is waited for: half of the time is kept"
    )


class OldAnswers(AnsweredLookups):
    """Lookups whose answers are too old at once."""

    def must_send(self, question: Question) -> bool:
        return True

    def known_until(self, question: Question) -> float:
        return 0


def test_an_old_answer_stays_while_the_time_of_the_pass_is_used_up() -> None:
    found = remembered(lookups := OldAnswers(found=6))
    assert found.pages("r", KEYS) == 6
    lookups.seconds_left = 0.0
    assert (found.pages("r", KEYS), len(lookups.sent)) == (6, 1)
    lookups.seconds_left = 1.0
    assert (found.pages("r", KEYS), len(lookups.sent)) == (6, 2)


def test_a_known_hit_stays_while_no_time_is_left_to_look_further() -> None:
    found = remembered(lookups := AnsweredLookups(found=8))
    assert found.pages("r", KEYS[:5]) == 5
    lookups.seconds_left = 0.0
    assert (found.pages("r", KEYS), len(lookups.sent)) == (5, 1)
    lookups.seconds_left = 1.0
    assert (found.pages("r", KEYS), len(lookups.sent)) == (8, 2)


def test_where_sglang_asks_again_before_it_admits_only_the_second_question_waits() -> None:
    lookups = SlowLookups(clock := Clock(), answer_seconds=0.00015)
    found = RememberedHits(lookups, lookup_of, clock)  # type: ignore[arg-type]
    found.next_pass()
    assert [found.pages("first", KEYS) for _ in range(2)] == [6, 6]
    found.next_pass()
    assert [found.pages(str(number), KEYS) for number in range(2)] == [0, 0]
    assert len(lookups.sent) == 3, "no answer was waited for"
    assert [found.pages(str(number), KEYS) for number in range(2)] == [6, 6]
    found.next_pass()
    assert [found.pages(str(number), KEYS) for number in range(2)] == [6, 6]
    found.next_pass()
    assert found.pages("another", KEYS) == 6, "in the pass before SGLang asked once, so the first question waits"
