"""The plain dict that the cache is compared with: what was stored whole, and who holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from kvserver.cache import Chunk

Name: TypeAlias = tuple[bytes, bytes]  # (namespace, key)
Owner: TypeAlias = tuple[str, str]


@dataclass
class Entry:
    """One chunk. `done[rank]` is the bytes of its blocks as that rank wrote them."""

    world: int
    chunk: Chunk  # the server's record: another one in its place means that this one was evicted
    done: dict[int, list[bytes]] = field(default_factory=dict)
    filling: set[int] = field(default_factory=set)
    leases: int = 0
    readers: int = 0

    @property
    def ready(self) -> bool:
        return len(self.done) == self.world

    @property
    def evictable(self) -> bool:
        return not self.leases and not self.readers and not self.filling


class Plain:
    def __init__(self) -> None:
        self.entries: dict[Name, Entry] = {}
        self.leases: dict[Owner, tuple[float, list[Entry]]] = {}

    def hits(self, names: Iterable[Name]) -> list[Entry]:
        """The chunks that a lookup should find."""
        found = []
        for name in names:
            entry = self.entries.get(name)
            if entry is None or not entry.ready:
                break
            found.append(entry)
        return found

    def lease(self, owner: Owner, deadline: float, found: list[Entry]) -> None:
        for entry in found:
            entry.leases += 1
        self.end_lease(owner)
        if found:
            self.leases[owner] = (deadline, found)

    def end_lease(self, owner: Owner) -> None:
        for entry in self.leases.pop(owner, (0.0, []))[1]:
            entry.leases -= 1

    def end_leases(self, over: Callable[[Owner, float], bool]) -> None:
        for owner in [owner for owner, (deadline, _) in self.leases.items() if over(owner, deadline)]:
            self.end_lease(owner)

    def drop_evicted(self, present: Callable[[Name], Chunk | None]) -> int:
        """Forget what the server evicted; AssertionError if a lease or a copy kept it. Returns how many."""
        evicted = [name for name, entry in self.entries.items() if present(name) is not entry.chunk]
        for name in evicted:
            entry = self.entries.pop(name)
            assert entry.evictable, (
                f"evicted under {entry.leases} leases, {entry.readers} loads, {entry.filling} stores"
            )
        return len(evicted)

    def clear(self, base: bytes | None) -> int:
        """All, or what one registration can see under any variant; None of it if `base` is b""."""
        evicted = [name for name in self.entries if base is None or (base and name[0].startswith(base))]
        for name in evicted:
            del self.entries[name]
        return len(evicted)

    def store_ended(self, name: Name, entry: Entry, rank: int, content: list[bytes] | None) -> None:
        """`content` is None if the copy does not count."""
        entry.filling.discard(rank)
        if self.entries.get(name) is not entry:
            return  # cleared meanwhile
        if content is not None:
            entry.done[rank] = content
        elif not entry.done and not entry.filling:
            del self.entries[name]
