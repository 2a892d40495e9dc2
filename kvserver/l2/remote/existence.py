"""Memory of a shared store's objects: which it has, and which not.

The store drops objects at any time and other daemons add some, so every answer expires. A remembered object that is gone costs
one failed fill, which its lookup notices at once: 60 s. A remembered absence hides what another daemon has stored meanwhile, and
looking again costs one round trip: 10 s.

Owns: the answers, their expiry and their number. One thread uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import groupby

from kvserver.l2.base import ObjectName
from kvserver.protocol import KEY_BYTES

PRESENT_SECONDS = 60.0
ABSENT_SECONDS = 10.0
MOST_ANSWERS = 1 << 17  # ~250 bytes each


class Existence:
    def __init__(self, most_answers: int = MOST_ANSWERS) -> None:
        self._most = most_answers
        self._count = 0
        # By namespace and group, the longest unused first: when an answer expires, in ns; of an absent object negative.
        self._scopes: OrderedDict[tuple[bytes, int], OrderedDict[bytes, int]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def note(self, name: ObjectName, present: bool, now_ns: int) -> None:
        self.note_all([(name, present)], now_ns)

    def note_all(self, found: Iterable[tuple[ObjectName, bool]], now_ns: int) -> None:
        """A probe of a long prompt has thousands: what they have in common is done once."""
        present_ns, absent_ns = now_ns + int(PRESENT_SECONDS * 1e9), -(now_ns + int(ABSENT_SECONDS * 1e9))
        for scope, names in groupby(found, key=lambda answer: answer[0][:2]):
            answers = self._scopes.setdefault(scope, OrderedDict())
            self._scopes.move_to_end(scope)
            before = len(answers)
            for (_, _, key), present in names:
                answers[key] = present_ns if present else absent_ns
                answers.move_to_end(key)
            self._count += len(answers) - before
        while self._count > self._most:
            self._forget_oldest()

    def find(self, name: ObjectName, now_ns: int) -> bool | None:
        """True if the store has the object, False if it has not; None if that is not known."""
        answers = self._scopes.get((name.namespace, name.group))
        expiry = answers.get(name.key, 0) if answers is not None else 0
        return expiry > 0 if abs(expiry) > now_ns else None

    def bitmap(self, namespace: bytes, group: int, keys: bytes, now_ns: int) -> int:
        """Bit i is set if the store has key number i."""
        answers = self._scopes.get((namespace, group))
        if answers is None:
            return 0
        found = 0
        for place in range(len(keys) // KEY_BYTES):
            if answers.get(keys[place * KEY_BYTES : (place + 1) * KEY_BYTES], 0) > now_ns:
                found |= 1 << place
        return found

    def forget(self, name: ObjectName) -> None:
        answers = self._scopes.get((name.namespace, name.group))
        if answers is not None and answers.pop(name.key, None) is not None:
            self._count -= 1

    def forget_namespaces(self, prefix: bytes) -> None:
        for scope in [scope for scope in self._scopes if scope[0].startswith(prefix)]:
            self._count -= len(self._scopes.pop(scope))

    def _forget_oldest(self) -> None:
        scope, answers = next(iter(self._scopes.items()))
        leaving = min(len(answers), self._count - self._most)
        for _ in range(leaving):
            answers.popitem(last=False)
        self._count -= leaving
        if not answers:
            del self._scopes[scope]
