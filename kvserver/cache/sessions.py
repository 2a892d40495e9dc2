"""Sessions: whose chunks are whose, and the chunks of deleted sessions, which leave L1 first.

An agent sends one conversation in many requests. Only its harness knows when it is over, and deletes the session. Then nothing needs
the chunks that only this session used.

A chunk has one owner: the session that alone used it. A chunk without an owner is shared for good: a request without a session used
it, or several sessions, or its session did not fit. A session takes over what it uses of a deleted one. Lookups pass all chunks
that they found, so what is known of one chunk depends on no other.

A session lists its chunks in the order in which it got them: a prompt's last chunk after its prefix. The chunks of a deleted session
leave from the end of the list. A chunk that left or is shared stays in the list until a pass over it, in slices, drops it.

Limits:
- A deleted session whose last chunk is in use leaves once that use has ended.
- A store of a request that began before the deletion makes a new session if `_MOST_DELETED` others were deleted after it.

Records use at most `RECORD_BYTES` for each chunk in L1, and a chunk has a reference more. A session that does not fit gets no record.

Owns: sessions, owners, and the order in which deleted sessions leave. Refuses to know: pages, messages, clocks. One thread uses it.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvserver.cache.chunk import Chunk
from kvserver.cache.pages import page_count

RECORD_BYTES = (
    14  # for each chunk in L1, of all sessions together; a list may have 1/8 more than it counted before it grew
)
_SESSION_BYTES = 720  # at most, without its list; an id counts in addition
_STALE_BYTES = 300  # of a chunk that only a list keeps
_LEAST_CHUNKS = 8192  # a smaller L1 has the records of so many chunks: 112 KiB
_MOST_DELETED = 1024
_SLICE = 64  # entries of a list that are examined for each chunk that it lost
_MOST_TRIED = 4  # sessions in use that one pop_leaving() looks at, and empty sessions that one new session replaces


class SessionKey(NamedTuple):
    """`salt`: a digest of the cache salt of the requests; b"" without one. No session reaches another salt's."""

    namespace: bytes
    salt: bytes
    id: str


class SessionRecord:
    """`listed`: its chunks, and stale ones. Of a pass, the first `kept` entries stay, and those up to `examined` are copies or stale."""

    __slots__ = ("bytes", "chunks", "deleted", "examined", "kept", "key", "last_seconds", "listed", "named", "pages")

    def __init__(self, key: SessionKey) -> None:
        self.key = key
        self.chunks = 0
        self.pages = 0  # of its chunks
        self.listed: list[Chunk] = []
        self.kept = self.examined = 0
        self.deleted = False
        self.named = True  # it is found by its key
        self.bytes = 0  # of this record
        self.last_seconds = 0.0


class Sessions:
    """`chunk_count`: chunks in L1."""

    def __init__(self, chunk_count: Callable[[], int]) -> None:
        self._chunk_count = chunk_count
        self._live: OrderedDict[SessionKey, SessionRecord] = OrderedDict()  # the least recently used first
        self._deleted: OrderedDict[SessionKey, SessionRecord] = OrderedDict()  # and not looked up again
        self.leaving: OrderedDict[SessionRecord, None] = OrderedDict()  # deleted ones with chunks
        self.record_bytes = 0  # upper bound of the memory of all records; 0: no chunk has an owner

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[SessionRecord]:
        """Sessions, about in the order of their last use, the latest first."""
        return reversed(self._live.values())

    def session(self, key: SessionKey) -> SessionRecord | None:
        return self._live.get(key)

    # ---- uses -----------------------------------------------------------------------------------

    def of_lookup(self, key: SessionKey, now: float, before: SessionRecord | None) -> SessionRecord | None:
        """The session of a lookup; None if it does not fit. `before`: that of an earlier lookup of the same request, which revives none."""
        if before is not None and before.deleted and before.key == key:
            return before
        session = self._live.get(key) or self._add_session(key)
        if session is not None:
            self._live.move_to_end(key)
            session.last_seconds = now
        return session

    def of_store(self, key: SessionKey) -> SessionRecord | None:
        """The session of a store, which revives none that was deleted. None if it does not fit."""
        session = self._live.get(key)
        if session is not None:
            self._live.move_to_end(key)
        return session or self._deleted.get(key) or self._add_session(key)

    def use(self, session: SessionRecord | None, chunks: Sequence[Chunk]) -> None:
        """A request of the session, or of none, uses the chunks: those of others are shared from now on, or taken over from a deleted one."""
        # The prompt of a conversation ends with all that its session lists, which no other one owns: to compare it is cheaper than the walk.
        if session is not None and not session.deleted and (first := len(chunks) - len(session.listed)) >= 0:
            chunks = chunks[:first] if (chunks[first:] if first else chunks) == session.listed else chunks
        lost = [chunk for chunk in chunks if chunk.session is not session and chunk.session is not None]
        lost = list(dict.fromkeys(lost))  # a peer may name a chunk twice
        if not lost:
            return
        taken = [chunk for chunk in lost if chunk.session.deleted] if session is not None else []
        by_owner: dict[SessionRecord, list[Chunk]] = {}
        for chunk in lost:
            by_owner.setdefault(chunk.session, []).append(chunk)
        for owner, of_owner in by_owner.items():
            self._disown(owner, of_owner)
        if session is not None:
            self.add(session, taken)

    def add(self, session: SessionRecord, chunks: Sequence[Chunk]) -> None:
        """Make the session the owner of chunks that have none and that no other request used. Those for which the list has no room are shared."""
        added = chunks[: max(0, self._room // 8)]
        for chunk in added:
            chunk.session = session
        session.listed += added
        session.chunks += len(added)
        session.pages += _pages_of(added)
        if session.deleted and added:
            self.leaving[session] = None
        self._count(session)

    def disown(self, chunk: Chunk) -> None:
        """The chunk is shared, or leaves L1."""
        if chunk.session is not None:
            self._disown(chunk.session, (chunk,))

    def _disown(self, session: SessionRecord, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.session = None
        session.chunks -= len(chunks)
        session.pages -= _pages_of(chunks) if session.chunks else session.pages
        if not session.chunks:
            session.kept = 0
            self._end_pass(session)
            self.leaving.pop(session, None)
        elif len(session.listed) - session.chunks > len(session.listed) // 32:
            self._drop_stale(session, len(chunks))
        self._count(session)

    # ---- what leaves ----------------------------------------------------------------------------

    def delete(self, session: SessionRecord) -> None:
        """Its chunks leave first. Only a later lookup makes a session of this name again."""
        del self._live[session.key]
        session.deleted = True
        self._deleted[session.key] = session
        if session.listed:
            self.leaving[session] = None
        if len(self._deleted) > _MOST_DELETED:
            self._forget(self._deleted.popitem(last=False)[1])

    def pop_leaving(self) -> Chunk | None:
        """A chunk of a deleted session, the one that it got last. None if none may leave now."""
        tried = 0.0
        while self.leaving and tried < _MOST_TRIED:
            session = next(iter(self.leaving))
            if session.examined >= len(session.listed):
                self._end_pass(session)
            if not session.listed:
                del self.leaving[session]
                tried += 1 / _SLICE
                continue
            chunk = session.listed[-1]
            is_own = chunk.session is session and not chunk.detached
            if is_own and (chunk.leases or chunk.pins or not chunk.ready):
                self.leaving.move_to_end(session)
                tried += 1
                continue
            del session.listed[-1]
            if is_own:
                return chunk
            tried += 1 / _SLICE
        return None

    # ---- records --------------------------------------------------------------------------------

    def _drop_stale(self, session: SessionRecord, slices: int) -> None:
        """Continue the pass over the list by so many slices."""
        listed, end = session.listed, session.examined + _SLICE * slices
        kept = [chunk for chunk in listed[session.examined : end] if chunk.session is session]
        listed[session.kept : session.kept + len(kept)] = kept
        session.kept += len(kept)
        session.examined = end
        if end >= len(listed):
            self._end_pass(session)

    def _end_pass(self, session: SessionRecord) -> None:
        del session.listed[session.kept :]
        session.kept = session.examined = 0

    def _add_session(self, key: SessionKey) -> SessionRecord | None:
        """A new session; None if it does not fit. Sessions without chunks give way, the least recently used first."""
        session = SessionRecord(key)
        more = _bytes_of(session)
        if key in self._deleted:
            self._forget(self._deleted.pop(key))
        for sessions in (self._deleted, self._live):
            for old in list(islice(sessions.values(), _MOST_TRIED)):
                if more <= self._room:
                    break
                if old.chunks:
                    sessions.move_to_end(old.key)  # else it hides those behind it
                else:
                    self._forget(sessions.pop(old.key))
        if more > self._room:
            return None
        self._live[key] = session
        self._count(session)
        return session

    def _forget(self, session: SessionRecord) -> None:
        """Its key is of no session, or of another one."""
        session.named = False
        self._count(session)

    def _count(self, session: SessionRecord) -> None:
        """Count the bytes of the record. One that nothing finds by its key counts while it has chunks."""
        used = _bytes_of(session) if session.named or session.chunks else 0
        self.record_bytes += used - session.bytes
        session.bytes = used

    @property
    def _room(self) -> int:
        """Bytes that records may have more; below 0 once L1 has fewer chunks."""
        return RECORD_BYTES * max(self._chunk_count(), _LEAST_CHUNKS) - self.record_bytes

    def audit(self, chunks: Iterable[Chunk], all_chunks: bool) -> None:
        """AssertionError names what does not balance. `chunks`: of L1; `all_chunks`: no other is left, cleared but read."""
        owned: Counter[SessionRecord] = Counter()
        pages: Counter[SessionRecord] = Counter()
        for chunk in chunks:
            if chunk.session is not None:
                owned[chunk.session] += 1
                pages[chunk.session] += chunk.page_count
        named = {*self._live.values(), *self._deleted.values()}
        for session in named | set(owned):
            listed = {chunk for chunk in session.listed if chunk.session is session and not chunk.detached}
            assert len(listed) == owned[session] or session.deleted, "a session does not list what it owns"
            assert owned[session] <= session.chunks, "a session counts fewer chunks than it owns"
            assert session.deleted or session.named, "a session that gave way owns chunks"
            if all_chunks:
                assert owned[session] == session.chunks, "a session counts more chunks than it owns"
                assert pages[session] == session.pages, "a session's pages are counted wrongly"
        counted = sum(session.bytes for session in named | set(owned) | set(self.leaving))
        assert counted <= self.record_bytes, f"records of {counted} bytes, {self.record_bytes} counted"
        if all_chunks:
            assert counted == self.record_bytes, f"records of {counted} bytes, {self.record_bytes} counted"


def _bytes_of(session: SessionRecord) -> int:
    """At most: a character of the id has up to four bytes."""
    stale = max(0, len(session.listed) - session.chunks)
    return _SESSION_BYTES + 4 * len(session.key.id) + sys.getsizeof(session.listed) + _STALE_BYTES * stale


def _pages_of(chunks: Iterable[Chunk]) -> int:
    return page_count(b"".join([chunk.joined_slots for chunk in chunks]))
