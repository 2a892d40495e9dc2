"""Contract of a tier of L2, and its values.

A tier holds copies of L1's objects beyond the process or the machine. Owns: what the caller and a tier may rely on. Refuses to
know: when something is written or read (`server.spill`, `server.fills`), and how a tier stores it.

Contract, for every method of StorageTier:
- The thread of the server's loop calls it. No method waits for a disk or the network: such work leaves with a ticket.
- A ticket ends exactly once, by one TierEnd that drain() returns, whatever the outcome; ends come in any order. `completion_fd`
  is readable while drain() would return something.
- Until a ticket ends the tier may read (a put) or write (a get) the ticket's memory, after cancel() too; the caller keeps it
  allocated and unshared meanwhile. A get that does not end as DONE may have written any part of it.
- A get ends as DONE only if name, coverage, lengths and every byte were verified against what the put was given, and no clear()
  of the namespace began meanwhile.
- An expected outcome is a value, not an exception.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from kvserver.protocol.status import TierStatus

State = Literal["opening", "ready", "read_only", "unavailable", "closed"]
READABLE = ("ready", "read_only")


class TierOutcome(enum.Enum):
    """Outcome of a tier's ticket."""

    DONE = "done"
    MISSING = "missing"  # no such object
    CORRUPT = "corrupt"  # an object was found and failed a check; the tier has dropped it
    FULL = "full"  # no space for a put
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"  # closed, cut off, or failed by an error of the system
    CANCELLED = "cancelled"


class ObjectName(NamedTuple):
    """Name of an object. Groups of one chunk share namespace and key."""

    namespace: bytes  # 32 bytes, and a variant's
    group: int
    key: bytes  # KEY_BYTES


@dataclass(frozen=True, slots=True)
class ObjectMemory:
    """Bytes of an object in L1: for each rank's slot its extents (`cache.pages`), and how many of its bytes count.

    `coverage` is a digest of all that fixes the meaning of the bytes; a put and a get with different ones never match.
    """

    coverage: bytes  # COVERAGE_BYTES
    slots: tuple[bytes, ...]
    slot_bytes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.slot_bytes)


COVERAGE_BYTES = 16


@dataclass(frozen=True, slots=True)
class TierEnd:
    """End of a ticket: its outcome, bytes moved, nanoseconds from its first byte on, and the reason of a failure."""

    ticket: int
    outcome: TierOutcome
    bytes: int = 0
    nanos: int = 0
    what: str = ""


@dataclass
class TierCounts:
    """Numbers of puts and gets; the fields are those of TierStatus."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    timeouts: int = 0
    errors: int = 0
    read_timeouts: int = 0
    read_errors: int = 0
    written_objects: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evictions: int = 0
    full: int = 0

    def add_failure(self, timed_out: bool, failed: bool, of_get: bool) -> None:
        self.timeouts += timed_out
        self.errors += failed
        self.read_timeouts += timed_out and of_get
        self.read_errors += failed and of_get


class StorageTier(Protocol):
    """A tier of L2. REQUIRES: tickets and names are used only with the tier that they belong to."""

    name: str  # the value of the `tier` label: "file", "s3", ...; a number follows where two are of one kind
    kind: str  # "file", "s3", "valkey", "mooncake"
    url: str  # without secrets
    shared: bool  # other daemons write to it: what holds() does not know, probe() may find

    @property
    def completion_fd(self) -> int: ...

    @property
    def state(self) -> State:
        """`opening` (it has nothing yet, and accepts no put), `ready`, `read_only` (no puts), `unavailable` (it has
        nothing meanwhile, and tries again by itself), `closed` (failed for good)."""
        ...

    @property
    def failure(self) -> str:
        """Reason why the tier is neither opening nor ready; empty otherwise."""
        ...

    def holds(self, namespace: bytes, group: int, keys: bytes) -> int:
        """Bit i is set if the tier holds the object of key number i, as far as memory knows. Never I/O."""
        ...

    def probe(
        self, namespace: bytes, group: int, keys: bytes, chain: bool, deadline_ns: int, again: bool = False
    ) -> int:
        """Begin to find out which objects exist; after its end as DONE holds() knows. Returns the ticket.

        `chain`: each object is useless without those before it. `again`: that one was absent a moment ago does not count.
        A tier that is not shared ends it at once.
        """
        ...

    def put(self, name: ObjectName, memory: ObjectMemory, parent: bytes, deadline_ns: int) -> int:
        """Begin to write the object; returns the ticket. `parent`: the key of the chunk before it, b"" if there is none.

        An object that the tier holds already ends as DONE with 0 bytes.
        """
        ...

    def get(self, name: ObjectName, memory: ObjectMemory, deadline_ns: int) -> int:
        """Begin to read the object into memory; returns the ticket. Gets go before puts."""
        ...

    def touch(self, namespace: bytes, group: int, keys: bytes) -> None:
        """The objects were used: those that the tier holds become its youngest, the last key first."""
        ...

    def drop(self, namespace: bytes, group: int, keys: bytes) -> None:
        """Forget objects; a put or get of one that is under way ends as CANCELLED or MISSING."""
        ...

    def clear(self, prefix: bytes) -> int:
        """Begin to forget all objects of the namespaces with this prefix; returns the ticket.

        holds() is empty for them at once. After the end as DONE none comes back, after a power loss either.
        """
        ...

    def generation(self, namespace: bytes) -> int | None:
        """Number that every clear of the namespace changes, by whichever daemon; None: it is not known yet. In memory only."""
        ...

    def learn_generations(self, namespaces: Sequence[bytes]) -> None:
        """Begin to find out generations, without a ticket: generation() knows them later, if the tier answers."""
        ...

    def cancel(self, ticket: int) -> None:
        """End the ticket soon. An unknown one has ended."""
        ...

    def drain(self) -> Sequence[TierEnd]: ...

    def tick(self, now_ns: int) -> None:
        """Do what is due by time; called about once a second."""
        ...

    def status(self) -> TierStatus: ...

    def close(self, deadline_ns: int) -> None:
        """End the tier, open tickets too; waits until the deadline at most. Nothing of L1 is touched after it returns."""
        ...


Changed: TypeAlias = Callable[[bool, ObjectName], None]  # True: the tier holds the object from now on; False: no longer


@runtime_checkable
class LocalTier(StorageTier, Protocol):
    """A tier that no other daemon writes to: it knows at any time all that it holds."""

    def watch(self, changed: Changed) -> None:
        """Call `changed` from now on whenever holds() changes for an object, in the loop's thread.

        Not for what clear() forgets, nor for what a change of `state` hides or shows.
        """
        ...

    def count(self, prefixes: tuple[bytes, ...]) -> int:
        """Number of objects in the namespaces with one of these prefixes. In memory only; the time grows with the number of namespaces."""
        ...

    def walk(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Namespace, group and keys of all objects, in slices of about a thousand; each as of when it is taken.

        What changes meanwhile may be named or not. Nothing if the tier is not READABLE.
        """
        ...
