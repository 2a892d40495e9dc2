"""What a tier needs of the client of a shared store.

Owns: the contract, and the ways in which a request can fail. Refuses to know: records, generations, which object is wanted.

Every call blocks the thread that makes it, with the GIL released, and ends within the time-out that the client was made with, as
far as the client's library keeps it. One thread at a time uses a client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias


class StoreError(Exception):
    """The store did not do what was requested. Its text has no secrets."""


class StoreTimeout(StoreError):
    """No answer in time: the request may have been carried out, or may be later."""


class StoreFull(StoreError):
    """The store has no space, or takes no value of this size."""


class StoreClosed(StoreError):
    """The client is of no use any more: make another one."""


class WrongSize(StoreError):
    """The value is larger than the buffer for it."""


class StoreClient(Protocol):
    most_value_bytes: int
    most_questions: int  # that exist() puts into one round trip

    def get(self, name: str, buffer: memoryview) -> memoryview | None:
        """The value, in `buffer` or in memory of its own; None if there is none. WrongSize if it is larger than `buffer`."""
        ...

    def put(self, name: str, value: memoryview) -> None:
        """Store the value, which the client has let go of when this returns or raises, with the expiry of the URL."""
        ...

    def exist(self, names: Sequence[str]) -> list[bool]: ...

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

    def write_id(self, name: str, value: bytes) -> None: ...

    def close(self) -> None: ...


ConnectStore: TypeAlias = Callable[[], StoreClient]
