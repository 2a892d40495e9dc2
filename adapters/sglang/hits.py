"""The answers to SGLang's lookups, remembered by request.

SGLang asks about each waiting request in each pass, takes an answer at once, and may admit the request in the same pass: there is no
"ask again later". A request's keys begin at the first page that SGLang itself has not, so they may begin further on, or further
back, in a later pass.

A pass has one bound for the time in which lookups are begun and answers are waited for and received, whatever the queue. Requests that
SGLang asks about first go first. Once the time is used up no lookup begins: others have no hit yet, and go in a later pass.

Some of SGLang's policies ask about all waiting requests first, and about those that are admitted once more. Then only the second
question waits for its answer: until then the time is for more lookups. A pass that admits no request asks once, as other policies do.
So a first question leaves half of the time to begin other lookups.

Owns: the remembered answers. Refuses to know: SGLang's transfers, and the wire (`lookups`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvserver.adapters.common.lookups import Lookups, Question
from kvserver.protocol import MAX_CHUNKS, Lookup, LookupTail

MOST_REMEMBERED = 4096  # requests; the ends of requests reach no linker


@dataclass(eq=False)
class _Asked:
    question: Question
    keys: list[str]  # of the pages that were looked up, as hexadecimal digits
    seen: int = -1  # the last pass in which SGLang has asked
    known_until: float = 0.0  # before that the answer stays as it is

    def hit_from(self, keys: Sequence[str]) -> int | None:
        """Count the pages that the answer covers, from the first on; None if it states nothing about them.

        A key determines all keys before it: prompts whose last common place has one key are alike up to there.
        """
        try:
            before = self.keys.index(keys[0])  # pages that SGLang itself has by now
        except ValueError:
            return None
        both = min(len(keys), len(self.keys) - before)
        if keys[both - 1] != self.keys[before + both - 1]:
            return None  # another prompt with the same request id
        if self.question.answer is None:
            return 0
        hit = self.question.answer.hit_chunks
        if not before and hit == len(self.keys) < len(keys):
            return None  # perhaps there are more
        return min(max(0, hit - before), len(keys))

    def known_from(self, keys: Sequence[str]) -> int:
        """Count the pages that the answer covers where keys follow that were not looked up; 0 if it states nothing."""
        return self.hit_from(keys[: len(self.keys)]) or 0


class RememberedHits:
    """`message` makes the Lookup of a request's keys."""

    def __init__(
        self,
        lookups: Lookups,
        message: Callable[[str, bytes], Lookup],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookups = lookups
        self._message = message
        self._clock = clock
        # The one that SGLang has not asked about for longest first.
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._pass = 0
        self._began = clock()  # the pass
        self._any_asked = self._any_again = False  # in this pass: about a request, and about one more than once
        self._asks_again = False  # in the last pass with questions

    def next_pass(self) -> None:
        self._pass += 1
        self._began = self._clock()
        if self._any_asked:
            self._asks_again = self._any_again
        self._any_asked = self._any_again = False
        self._lookups.next_pass()

    def pages(self, request_id: str, keys: Sequence[str]) -> int:
        """Count the pages that the daemon has, from the first on; 0 while that is not known.

        The first lookup after a connection forgets what was remembered, its own request among it.
        """
        if len(keys) > MAX_CHUNKS:
            keys = keys[:MAX_CHUNKS]
        asked = self._asked.get(request_id)
        hit = asked.hit_from(keys) if asked is not None else None
        if asked is None or hit is None:
            if self._lookups.seconds_left <= 0:
                return asked.known_from(keys) if asked is not None else 0
            self.forget(request_id)
            if not self._make_room():
                return 0
            asked, hit = _Asked(Question(), list(keys)), 0
            self._asked[request_id] = asked
        again, asked.seen = asked.seen == self._pass, self._pass
        self._asked.move_to_end(request_id)
        self._any_asked = True
        self._any_again |= again
        if asked.known_until <= self._began and self._renew(request_id, asked, again):
            hit = asked.hit_from(keys) or 0
        return hit

    def _renew(self, request_id: str, asked: _Asked, again: bool) -> bool:
        """Begin a lookup or look for its answer, in the time of the pass. True if there is another answer."""
        question, before, began, left = asked.question, asked.question.answer, self._clock(), self._lookups.seconds_left
        kept = 0.0 if again else self._lookups.poll_seconds / 2
        waits = again or (left > kept and not self._asks_again)
        if must_send := self._lookups.must_send(question):
            if left <= 0:
                return question.answer is not before
            packed = bytes.fromhex("".join(asked.keys))
            self._lookups.send(question, self._message(request_id, packed), _no_tail)
            self._lookups.seconds_left = left - (self._clock() - began)
        if waits or not must_send:
            if waits:
                self._lookups.seconds_left -= kept
            self._lookups.answer_to(question, waits)
            self._lookups.seconds_left = left - (self._clock() - began)
        asked.known_until = self._lookups.known_until(question)
        return question.answer is not before

    def _make_room(self) -> bool:
        """Forget a request that SGLang asks about no more, if there are many. False if it asks about all of them."""
        if len(self._asked) < MOST_REMEMBERED:
            return True
        request_id, oldest = next(iter(self._asked.items()))
        if oldest.seen >= self._pass - 1:
            return False
        self.forget(request_id)
        return True

    def boundaries(self, request_id: str, keys: Sequence[str]) -> Sequence[int]:
        """The numbers of first pages that can be loaded, counted as in pages(). With windows or states that is not every one up to the greatest."""
        pages, asked = self.pages(request_id, keys), self._asked.get(request_id)
        if not pages or asked is None or asked.question.answer is None:
            return ()
        before = asked.keys.index(keys[0])  # pages that SGLang itself has by now
        answer = asked.question.answer
        found = answer.boundaries or (answer.hit_chunks,)  # of an older daemon: the greatest
        return [boundary - before for boundary in found if before < boundary <= before + pages]

    def forget(self, request_id: str) -> None:
        if (asked := self._asked.pop(request_id, None)) is not None:
            self._lookups.drop_question(asked.question)

    def forget_all(self) -> None:
        for request_id in list(self._asked):
            self.forget(request_id)


def _no_tail(chunks: int) -> LookupTail:
    raise AssertionError("engines with chunks of one page register without tails")
