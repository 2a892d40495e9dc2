"""The plain dict that the cache is compared with: what was stored whole, and who holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvserver.cache import Chunk
from kvserver.protocol import ObjectGroup

Name: TypeAlias = tuple[bytes, bytes]  # (namespace, key)
Owner: TypeAlias = tuple[str, str]
Slot: TypeAlias = tuple[int, int]  # (object group, rank): rank 0 if all ranks have the same bytes


@dataclass
class Entry:
    """One chunk. `done[slot]` is the bytes of its blocks as that rank wrote them."""

    slots: list[Slot]  # of a chunk that has all objects
    chunk: Chunk  # the server's record: another one in its place means that this one was evicted
    done: dict[Slot, list[bytes]] = field(default_factory=dict)
    filling: set[Slot] = field(default_factory=set)
    leases: int = 0
    readers: int = 0

    def ready(self, group: int) -> bool:
        return all(slot in self.done for slot in self.slots if slot[0] == group)

    @property
    def evictable(self) -> bool:
        return not self.leases and not self.readers and not self.filling


class Plain:
    def __init__(self) -> None:
        self.entries: dict[Name, Entry] = {}
        self.leases: dict[Owner, tuple[float, list[Entry]]] = {}

    def ready(self, name: Name, group: int) -> bool:
        entry = self.entries.get(name)
        return entry is not None and entry.ready(group)

    def boundary(self, names: Sequence[Name], groups: Sequence[ObjectGroup], chunk_tokens: int) -> tuple[int, int]:
        """(where a hit ends, where the chunks end that all full groups have), in chunks: the definition, boundary by boundary."""
        full = [number for number, group in enumerate(groups) if group.kind == "full"]
        whole = [all(self.ready(name, number) for number in full) for name in names]
        most = whole.index(False) if False in whole else len(names)
        for boundary in range(most, 0, -1):
            if all(
                self.ready(names[chunk], number)
                for number, group in enumerate(groups)
                for chunk in range(boundary)
                if needs(group, chunk, boundary, chunk_tokens)
            ):
                return boundary, most if full else boundary
        return 0, most if full else 0

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

    def store_ended(self, name: Name, entry: Entry, slot: Slot, content: list[bytes] | None) -> None:
        """`content` is None if the copy does not count."""
        entry.filling.discard(slot)
        if self.entries.get(name) is not entry:
            return  # cleared meanwhile
        if content is not None:
            entry.done[slot] = content
        elif not entry.done and not entry.filling:
            del self.entries[name]

    def dropped(self, name: Name, group: int) -> None:
        """The server has freed the group's object; AssertionError if something needed it."""
        entry = self.entries[name]
        assert entry.evictable, f"dropped under {entry.leases} leases, {entry.readers} loads, {entry.filling} stores"
        entry.done = {slot: content for slot, content in entry.done.items() if slot[0] != group}
        if not entry.done:
            del self.entries[name]


def needs(group: ObjectGroup, chunk: int, boundary: int, chunk_tokens: int) -> bool:
    """Whether a request that goes on at the boundary attends to tokens of the chunk in this group."""
    end, at = (chunk + 1) * chunk_tokens, boundary * chunk_tokens
    match group.kind:
        case "full":
            return True
        case "window":
            return end > at - group.tokens
        case "local":
            return end > at - at % group.tokens
        case "state":
            return end == at
