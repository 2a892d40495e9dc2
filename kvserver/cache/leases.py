"""Leases: requests' claims on chunks, with deadlines.

A lease delays eviction; it does not guarantee a later load. Disconnected engines, and requests that never ended, may leave many
leases. Their ends are deferred: end_one() does one at a time.

Owns: the leases, by request, and those that count as ended but are not yet. Refuses to know: which chunks a request needs
(`cache`), clocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvserver.cache.chunk import Chunk
from kvserver.cache.sessions import SessionRecord

Owner: TypeAlias = tuple[str, str]  # (instance id, request id)


@dataclass(slots=True)
class Lease:
    """Claim of a request on chunks, which may be none if it is of a session."""

    deadline: float
    chunks: list[Chunk]
    session: SessionRecord | None = None


class Leases:
    """Leases by owner. Callers count `chunk.leases` up; this class counts it down. `used`: makes chunks candidates for eviction again."""

    def __init__(self, used: Callable[[Sequence[Chunk]], None]) -> None:
        self.count = 0
        self._used = used
        # By the owner's instance and request, in the order of deadlines. OrderedDict finds its first item
        # at once, however many items before it were removed.
        self._leases: dict[str, OrderedDict[str, Lease]] = {}
        self._ownerless: list[OrderedDict[str, Lease]] = []  # leases of disconnected instances
        self._expired_before = 0.0
        self._expiring: list[str] = []  # instances whose leases may have expired before _expired_before

    def add(self, owner: Owner, chunks: list[Chunk], deadline: float, session: SessionRecord | None = None) -> None:
        """The owner has these chunks too. Their deadline is that of what it has already, if anything."""
        instance_id, request_id = owner
        leases = self._leases.setdefault(instance_id, OrderedDict())
        if (lease := leases.get(request_id)) is not None:
            lease.chunks += chunks
        else:
            leases[request_id] = Lease(deadline, chunks, session)
            self.count += 1

    def session_of(self, owner: Owner) -> SessionRecord | None:
        leases = self._leases.get(owner[0])
        lease = leases.get(owner[1]) if leases else None
        return lease.session if lease is not None else None

    def end(self, owner: Owner) -> None:
        instance_id, request_id = owner
        leases = self._leases.get(instance_id)
        lease = leases.pop(request_id, None) if leases else None
        if lease is not None:
            self._end(lease)

    def expire(self, now: float) -> None:
        """Leases whose deadline has passed count as ended."""
        self._expired_before = now
        self._expiring = list(self._leases)

    def end_of_instance(self, instance_id: str) -> None:
        """All of the instance's leases count as ended."""
        if leases := self._leases.pop(instance_id, None):
            self._ownerless.append(leases)

    def end_one(self) -> int:
        """End one lease that counts as ended, or drop one instance without such leases.

        Returns the number of chunks or instances handled, at least 1; 0 if none is left.
        """
        if self._ownerless:
            leases = self._ownerless[-1]
            if not leases:
                self._ownerless.pop()
                return 1
        elif self._expiring:
            leases = self._leases.get(self._expiring[-1], OrderedDict())
            if not leases or next(iter(leases.values())).deadline > self._expired_before:
                instance_id = self._expiring.pop()
                if not leases:
                    self._leases.pop(instance_id, None)
                return 1
        else:
            return 0
        _, lease = leases.popitem(last=False)
        self._end(lease)
        return max(1, len(lease.chunks))

    def __iter__(self) -> Iterator[Lease]:
        """Leases of connected instances. REQUIRES: no other is left, which this asserts."""
        assert not self._ownerless, "end the leases of disconnected instances first"
        for leases in self._leases.values():
            yield from leases.values()

    def _end(self, lease: Lease) -> None:
        for chunk in lease.chunks:
            chunk.leases -= 1
        self._used(lease.chunks)  # a detached chunk is freed by the cache's step(), leased or not
        self.count -= 1
