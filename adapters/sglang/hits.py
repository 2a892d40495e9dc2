"""The answers to SGLang's lookups, remembered by request.

SGLang asks about each waiting request in each pass, takes an answer at once, and may admit the request in the same pass: there is no
"ask again later". A request's keys begin at the first page that SGLang itself has not, so they may begin further on, or further
back, in a later pass.

The time of a pass is bounded whatever the queue: few lookups are begun in one, and a request that finds no room has no hit yet.

Owns: the remembered answers. Refuses to know: SGLang's transfers, and the wire (`lookups`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvserver.adapters.common.lookups import Lookups, Question
from kvserver.protocol import MAX_CHUNKS, Lookup, LookupTail

MOST_REMEMBERED = 4096  # requests; the ends of requests reach no linker
MOST_BEGUN = 128  # lookups in a pass; the others wait for a later one


@dataclass(eq=False)
class _Asked:
    question: Question
    keys: list[str]  # of the pages that were looked up, as hexadecimal digits
    seen: int = 0  # the last pass in which SGLang has asked

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


class RememberedHits:
    """`message` makes the Lookup of a request's keys."""

    def __init__(self, lookups: Lookups, message: Callable[[str, bytes], Lookup]) -> None:
        self._lookups = lookups
        self._message = message
        # The one that SGLang has not asked about for longest first.
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._pass = 0
        self._begun = 0  # lookups, in this pass

    def next_pass(self) -> None:
        self._pass += 1
        self._begun = 0
        self._lookups.next_pass()

    def pages(self, request_id: str, keys: Sequence[str]) -> int:
        """Count the pages that the daemon has, from the first on; 0 while that is not known."""
        return self._ask(request_id, keys)[1]

    def _ask(self, request_id: str, keys: Sequence[str]) -> tuple[_Asked | None, int]:
        """The memory of the request, and pages(). The first lookup after a connection forgets what was remembered, its own request among it."""
        if len(keys) > MAX_CHUNKS:
            keys = keys[:MAX_CHUNKS]
        asked = self._asked.get(request_id)
        hit = asked.hit_from(keys) if asked is not None else None
        if asked is None or hit is None:
            self.forget(request_id)
            if self._begun >= MOST_BEGUN or not self._make_room():
                return None, 0
            asked, hit = _Asked(Question(), list(keys)), 0
            self._asked[request_id] = asked
        asked.seen = self._pass
        self._asked.move_to_end(request_id)
        question, before = asked.question, asked.question.answer
        if self._lookups.must_send(question):
            if self._begun >= MOST_BEGUN:
                return asked, hit
            self._begun += 1
            packed = bytes.fromhex("".join(asked.keys))
            self._lookups.send(question, self._message(request_id, packed), _no_tail)
        if self._lookups.answer_to(question) is before:
            return asked, hit
        return asked, asked.hit_from(keys) or 0

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
        asked, pages = self._ask(request_id, keys)
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
