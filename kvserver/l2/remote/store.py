"""Contract of a shared store's client.

Every call blocks the thread that makes it, with the GIL released. It ends within the time-out that the client was made with, as
far as the client's library keeps it. One thread at a time uses a client. A call raises if it failed as a whole. Where it may fail
for one name alone, it returns a StoreError in the place of this name.

Owns: the contract, and the ways in which a request can fail. Refuses to know: records, generations, which object is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from kvserver.l2.remote.buffer import LaneBuffer


class StoreError(Exception):
    """Request that the store did not carry out. Its text has no secrets."""


class StoreTimeout(StoreError):
    """Request without an answer in time: it may have been carried out, or may be later."""


class StoreFull(StoreError):
    """Store without space."""


class StoreTooLarge(StoreFull):
    """Value that is too large for the store; the client's `most_value_bytes` is below its size from now on."""


class StoreRefused(StoreError):
    """Request that the store refuses: it is a replica, its user may not, it has not loaded yet."""


class StoreClosed(StoreError):
    """Client that is of no use any more: make another one."""


WritePiece: TypeAlias = Callable[[int, memoryview], None]  # bytes of a value, and where in it they begin
# Read a large value: its pieces are written in any order, and some of them twice. All calls come from the thread that reads. None: there
# is no value. False: it has another size. What `write` raises ends the read, and is raised. Nothing is written after the return.
ReadPieces: TypeAlias = Callable[[WritePiece], bool | StoreError | None]


class StoreClient(Protocol):
    """Client of a store. REQUIRES: the memory of get() and put() is that of the buffer which the client was made with."""

    most_value_bytes: int
    most_questions: int  # that exist() puts into one round trip
    asks_apart: bool  # each of them is a request of its own

    def get(
        self, names: Sequence[str], buffers: Sequence[memoryview]
    ) -> Sequence[memoryview | ReadPieces | StoreError | None]:
        """Values by name, all in one round trip where the store can.

        A value is in its buffer or in memory of the client's own. None: there is none. Empty: it is larger than its buffer.
        StoreError: why it could not be read. ReadPieces: it was not requested yet, since it is large.
        """
        ...

    def put(self, names: Sequence[str], values: Sequence[memoryview]) -> list[StoreError | None]:
        """Store the values, likewise, with the expiry of the URL; of each why it was not stored, or None. The client
        has let go of them when this returns or raises. A store may keep what it has under a name."""
        ...

    def exist(self, names: Sequence[str]) -> list[bool | StoreError]: ...

    def delete(self, names: Sequence[str]) -> None: ...

    def refresh(self, names: Sequence[str]) -> None:
        """The values were used: the store keeps them as if they were new, where it can."""
        ...

    def read_ids(self, names: Sequence[str]) -> list[bytes | None]:
        """Small values that never expire."""
        ...

    def create_id(self, name: str, value: bytes) -> bytes:
        """Store a small value unless there is one; the value that the store has then."""
        ...

    def write_id(self, name: str, value: bytes) -> str:
        """Replace a small value. Why the store may lose it all the same; "" if that is not known."""
        ...

    def close(self) -> None: ...


ConnectStore: TypeAlias = Callable[[LaneBuffer], StoreClient]
