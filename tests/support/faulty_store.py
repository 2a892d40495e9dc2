"""A store that daemons share, in this process, which hangs, lies, forgets and damages what it was given.

A tier over it: `RemoteTier(url, prefix, region, page_bytes, store.connect, lanes)`. Faults are of requests one by one, in the order in
which they arrive, so a test does not choose whose.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.store import StoreClosed, StoreError, StoreFull, StoreRefused, StoreTimeout

_HANG_SECONDS = 20.0  # then a test has failed
_ERRORS = {"error": StoreError, "timeout": StoreTimeout, "closed": StoreClosed, "full": StoreFull}
FAULTS = (
    *_ERRORS,
    "error afterwards",  # it was done all the same
    "flipped", "short", "long", "empty", "old", "another",  # of values that are read
    "nothing",  # none is found, or a written one is not kept
    "torn",  # the first half of a written value is kept
    "one",  # one name of the request fails, the others do not
    "inverted",  # each answer whether a value exists
)  # fmt: skip


class FaultyStore:
    """Any thread uses it."""

    def __init__(self, seed: int = 1) -> None:
        self.values: dict[str, bytes] = {}
        self.ids: dict[str, bytes] = {}
        self._older_ids: dict[str, bytes] = {}  # those that were replaced or lost
        self.served = 0  # requests
        self.read_only = False  # writes are refused, as by a replica
        self.refuses_deletes = False
        self.ill: set[str] = set()  # ends of names whose values no request reads or writes
        self._older: dict[str, bytes] = {}  # by name, a value that was replaced or removed
        self._dice = random.Random(seed)
        self._faults: deque[str] = deque()
        self._lock = threading.Lock()
        self._goes = threading.Event()
        self._goes.set()

    def connect(self, buffer: LaneBuffer) -> FaultyClient:
        return FaultyClient(self)

    # ---- what a test does ---------------------------------------------------------------------

    def fail(self, *faults: str) -> None:
        """The next requests have these faults, one each."""
        assert set(faults) <= set(FAULTS)
        with self._lock:
            self._faults.extend(faults)

    def hang(self, on: bool) -> None:
        """Requests that begin from now on wait until hang(False)."""
        self._goes.clear() if on else self._goes.set()

    def forget(self, share: float) -> None:
        """Lose this share of the objects."""
        with self._lock:
            for name in [name for name in self.values if self._dice.random() < share]:
                self._older[name] = self.values.pop(name)

    def forget_ids(self) -> None:
        with self._lock:
            self._older_ids |= self.ids
            self.ids.clear()

    def go_back(self) -> None:
        """The ids are those that were replaced last, as in a store that was restored."""
        with self._lock:
            self.ids |= self._older_ids

    def mix_up(self) -> None:
        """Each object lies under the name of another one."""
        with self._lock:
            names = list(self.values)
            self.values = dict(zip(names, [self.values[name] for name in (*names[1:], *names[:1])], strict=True))

    def heal(self) -> None:
        self.read_only = self.refuses_deletes = False
        self.ill.clear()
        with self._lock:
            self._faults.clear()
        self.hang(False)

    # ---- what clients do ----------------------------------------------------------------------

    @contextmanager
    def request(self) -> Iterator[str]:
        """Yields the fault that this request has, "" for none."""
        assert self._goes.wait(_HANG_SECONDS), "the test lets the store hang for too long"
        with self._lock:
            self.served += 1
            fault = self._faults.popleft() if self._faults else ""
            if fault in _ERRORS:
                raise _ERRORS[fault](f"made up: {fault}")
            yield fault
        if fault == "error afterwards":
            raise StoreTimeout("made up: no answer")

    def refuse_writes(self) -> None:
        if self.read_only:
            raise StoreRefused("READONLY made up")

    def of_one(self, names: Sequence[str], fault: str) -> list[str]:
        """The fault of one of the values of a request; of the others only ill ones have one."""
        unlucky = self._dice.randrange(len(names))
        return [
            "one" if any(map(name.endswith, self.ill)) else fault if place == unlucky else ""
            for place, name in enumerate(names)
        ]

    def read(self, name: str, fault: str) -> bytes | None:
        """REQUIRES: inside request()."""
        value = self.values.get(name)
        match fault:
            case "nothing":
                return None
            case "old":
                return self._older.get(name, value)
            case "another" if self.values:
                return self._dice.choice(list(self.values.values()))
            case "flipped" if value:
                at = self._dice.randrange(len(value))
                return value[:at] + bytes([value[at] ^ 1 << self._dice.randrange(8)]) + value[at + 1 :]
            case "short" if value:
                return value[: self._dice.randrange(len(value))]
            case "long" if value:
                return value + value[:4096]
            case "empty":
                return b""
        return value

    def read_id(self, name: str, fault: str) -> bytes | None:
        """REQUIRES: inside request(). "old": one that was replaced, or lost."""
        found = self.ids.get(name)
        return {"nothing": None, "old": self._older_ids.get(name, found)}.get(fault, found)

    def write_id(self, name: str, value: bytes) -> None:
        """REQUIRES: inside request()."""
        if name in self.ids:
            self._older_ids[name] = self.ids[name]
        self.ids[name] = value

    def write(self, name: str, value: bytes, fault: str) -> None:
        """REQUIRES: inside request()."""
        if name in self.values:
            self._older[name] = self.values[name]
        if fault == "torn":
            value = value[: len(value) // 2] + self._older.get(name, bytes(len(value)))[len(value) // 2 :]
        if fault != "nothing":
            self.values[name] = value


class FaultyClient:
    """A StoreClient."""

    most_value_bytes = 1 << 24
    most_questions, asks_apart = 4, True

    def __init__(self, store: FaultyStore) -> None:
        self._store = store

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[memoryview | StoreError | None]:
        with self._store.request() as fault:
            faults = self._store.of_one(names, fault)
            values = [self._store.read(name, each) for name, each in zip(names, faults, strict=True)]
        return [
            StoreRefused("made up: one") if each == "one" else self._in(buffer, value)
            for each, buffer, value in zip(faults, buffers, values, strict=True)
        ]

    @staticmethod
    def _in(buffer: memoryview, value: bytes | None) -> memoryview | None:
        if value is None:
            return None
        if len(value) > len(buffer):
            return buffer[:0]
        buffer[: len(value)] = value
        return buffer[: len(value)]

    def put(self, names: Sequence[str], values: Sequence[memoryview]) -> list[StoreError | None]:
        try:
            with self._store.request() as fault:
                self._store.refuse_writes()
                faults = self._store.of_one(names, fault)
                for name, value, each in zip(names, values, faults, strict=True):
                    if each != "one":
                        self._store.write(name, bytes(value), each)
        except StoreFull as error:
            return [error] * len(names)
        return [StoreRefused("made up: one") if each == "one" else None for each in faults]

    def exist(self, names: Sequence[str]) -> list[bool | StoreError]:
        with self._store.request() as fault:
            return [(name in self._store.values) != (fault == "inverted") for name in names]

    def delete(self, names: Sequence[str]) -> None:
        with self._store.request():
            self._store.refuse_writes()
            if self._store.refuses_deletes:
                raise StoreRefused("made up: no deletes")
            for name in names:
                self._store.values.pop(name, None)

    def refresh(self, names: Sequence[str]) -> None:
        with self._store.request():
            self._store.refuse_writes()

    def read_ids(self, names: Sequence[str]) -> list[bytes | None]:
        with self._store.request() as fault:
            return [self._store.read_id(name, fault) for name in names]

    def create_id(self, name: str, value: bytes) -> bytes:
        with self._store.request():
            self._store.refuse_writes()
            return self._store.ids.setdefault(name, value)

    def write_id(self, name: str, value: bytes) -> str:
        with self._store.request():
            self._store.refuse_writes()
            if not name.endswith("/ping"):
                self._store.write_id(name, value)
        return ""

    def close(self) -> None:
        pass
