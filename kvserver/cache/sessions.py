"""Sessions: which chunks only the superseded ends of conversations use, and so leave L1 first.

An agent sends one conversation in many requests. Its end is the last chunk of a prompt. A session has several ends at a time: branches,
and subagents under one id. A prompt that goes on behind an end replaces that end and no other. Another end is superseded when the
session was used `SUPERSEDED_AFTER` times without it. A later use of it revives it.

An end owns the chunks that no other session used, and no end of its own session since. So the owner of a chunk is the end that used it
last, and a chunk is superseded exactly when its owner is. A chunk without an owner is shared for good: a request without a session used
it, or several sessions, or its session did not fit. Every use of a chunk is a use of its prefix. So all chunks before one without an
owner have none either, and walks from the end of a prompt stop there. They stop at a chunk that left before the chunks behind it, too.
What is before such a hole leaves in the policy's order. If the chunk is stored again, the chunks before it stay with the end that they
had, and may be superseded though the prompt is used: hits are lost, and none is wrong.

Records use at most `RECORD_BYTES` for each chunk in L1, and a chunk has two references more. A session that does not fit gets no record.

Owns: sessions, ends, owners, and the order of superseded ends. Refuses to know: pages, messages, clocks. One thread uses it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from kvserver.cache.chunk import Chunk
from kvserver.cache.leases import Owner

SUPERSEDED_AFTER = 32  # uses of a session: parents wait for up to 30 turns of subagents
RECORD_BYTES = 8  # for each chunk in L1, of all sessions and ends together
_SESSION_BYTES, _END_BYTES = 720, 260  # at most; an id counts in addition
_LEAST_CHUNKS = 8192  # a smaller L1 has the records of so many chunks: 64 KiB
_MOST_DELETED = 1024
_MOST_REQUESTS, _REQUEST_BYTES = 1024, 420
_ENDS_A_USE = 2  # at most: where the prompt was found up to, and what was stored of it
_MOST_TRIED = 4  # superseded ends that one pop() looks at, and empty sessions that one new session replaces


class SessionKey(NamedTuple):
    """`salt`: a digest of the cache salt of the requests; b"" without one. No session reaches another salt's."""

    namespace: bytes
    salt: bytes
    id: str


class SessionRecord:
    """`counted`: among the bytes of records. A store that is under way may hold one that is not: it was deleted, or is `dropped`."""

    __slots__ = ("chunks", "counted", "deleted", "dropped", "ends", "key", "last_seconds", "uses")

    def __init__(self, key: SessionKey) -> None:
        self.key = key
        self.uses = 0
        self.chunks = 0  # that its ends own
        self.ends: list[PromptEnd] = []  # that are not superseded, the least recently used first
        self.deleted = False
        self.dropped = False  # it owned nothing and gave way
        self.counted = False
        self.last_seconds = 0.0


class PromptEnd:
    """`chunk`: the last one of the prompt; None once the end owns nothing. `chunks`: how many it owns."""

    __slots__ = ("chunk", "chunks", "last_use", "session", "superseded")

    def __init__(self, session: SessionRecord, chunk: Chunk) -> None:
        self.session = session
        self.chunk: Chunk | None = chunk
        self.chunks = 0
        self.last_use = session.uses
        self.superseded = False


class Sessions:
    """`chunk_count`: chunks in L1. `superseded_after`: uses of a session; another number for measurements."""

    def __init__(self, chunk_count: Callable[[], int]) -> None:
        self._chunk_count = chunk_count
        self.superseded_after = SUPERSEDED_AFTER
        self._sessions: OrderedDict[SessionKey, SessionRecord] = OrderedDict()  # the least recently used first
        self.superseded: OrderedDict[PromptEnd, None] = OrderedDict()
        self._deleted: OrderedDict[SessionKey, SessionRecord] = OrderedDict()  # and not looked up again
        self._requests: OrderedDict[Owner, int] = OrderedDict()  # that were counted, with the hash of the session's key
        self._record_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[SessionRecord]:
        """Sessions, the most recently used first."""
        return reversed(self._sessions.values())

    def session(self, key: SessionKey) -> SessionRecord | None:
        return self._sessions.get(key)

    @property
    def record_bytes(self) -> int:
        """Upper bound of the memory of all records."""
        return self._record_bytes

    # ---- uses -----------------------------------------------------------------------------------

    def use(self, key: SessionKey, found: Chunk | None, now: float, owner: Owner) -> None:
        """Count a prompt of the session, which found chunks up to `found`. One lookup of a request counts: the others are renewals."""
        if self._requests.get(owner) == hash(key):
            renewed = self._sessions.get(key) or self._deleted.get(key)
            if renewed is None:
                self.share(found)
            else:
                self._use_up_to(renewed, found)
            return
        session = self._sessions.get(key) or self._add_session(key)
        if session is None:
            self.share(found)
            return
        self._sessions.move_to_end(key)
        self._add_request(owner, key)
        session.uses += 1
        session.last_seconds = now
        ends = session.ends
        end = found.session_end if found is not None else None
        if end is not None and found is not None:
            if ends and end is ends[-1] and end.chunk is found:  # the common case: nothing was used meanwhile
                end.last_use = session.uses
            else:
                self._use_up_to(session, found)
        while ends and session.uses - ends[0].last_use >= self.superseded_after:
            self._supersede(ends.pop(0))

    def end_request(self, owner: Owner) -> None:
        if self._requests.pop(owner, None) is not None:
            self._record_bytes -= _bytes_of_request(owner)

    def end_requests_of(self, instance_id: str) -> None:
        for owner in [owner for owner in self._requests if owner[0] == instance_id]:
            self.end_request(owner)

    def share(self, found: Chunk | None) -> None:
        """A request without a session used the chunks up to `found`: they are shared for good."""
        while found is not None and found.session_end is not None:
            end, parent = found.session_end, found.session_parent
            self._disown(found, end)
            found = parent

    def begin_store(self, key: SessionKey) -> SessionRecord | None:
        """The session that new chunks are of; None if they are shared. A store revives no session that was deleted."""
        return self._sessions.get(key) or self._deleted.get(key) or self._add_session(key)

    def add(self, session: SessionRecord, chunk: Chunk, before: Chunk | None) -> None:
        """A store of the session made the chunk, which follows `before` in the prompt. Of a deleted session it is superseded at once."""
        if session.dropped:
            self.share(before)
            return
        end = before.session_end if before is not None else None
        if end is not None and not (end.chunk is before and (session.deleted or end in session.ends[-1:])):
            self._use_up_to(session, before)
            end = before.session_end if before is not None else None
        if end is None or end.session is not session:
            if not self._fits(_END_BYTES):
                self.share(before)
                return
            end = self._add_end(session, chunk)
        chunk.session_end, chunk.session_parent = end, before
        end.chunk = chunk
        end.chunks += 1
        session.chunks += 1

    def _use_up_to(self, session: SessionRecord, found: Chunk | None) -> None:
        """The session used the chunks up to `found`: they belong to an end there, or are shared if another session used them."""
        end = found.session_end if found is not None else None
        if found is None or end is None:
            return
        if not self._may_own(session, end):
            self.share(found)
            return
        if end.chunk is not found or end.session is not session:
            if not self._fits(_END_BYTES):
                self.share(found)
                return
            end = self._add_end(session, found)
        else:
            self._mark_used(end)
        chunk: Chunk | None = found
        while chunk is not None and (owner := chunk.session_end) is not None:
            if owner is not end and not self._may_own(session, owner):
                self.share(chunk)
                return
            chunk = self._take_over(chunk, owner, end)

    def _take_over(self, chunk: Chunk, owner: PromptEnd, end: PromptEnd) -> Chunk | None:
        """Give the end what the owner has of the prompt without a gap. Returns the chunk before it."""
        count, last, at = 0, owner.chunk, chunk
        while True:
            count += 1
            at.session_end = end
            parent: Chunk | None = at.session_parent
            if at is last:
                last = parent
            if parent is None or parent.session_end is not owner:
                break
            at = parent
        if owner is not end:
            owner.chunk = last
            end.chunks += count
            end.session.chunks += count
            owner.chunks -= count
            owner.session.chunks -= count
            if not owner.chunks:
                self._drop_end(owner)
        return parent

    @staticmethod
    def _may_own(session: SessionRecord, owner: PromptEnd) -> bool:
        return owner.session is session or owner.session.deleted

    def _mark_used(self, end: PromptEnd) -> None:
        ends = end.session.ends
        end.last_use = end.session.uses
        if end.session.deleted:
            return
        if end.superseded:
            end.superseded = False
            self.superseded.pop(end, None)
            ends.append(end)
        elif ends[-1] is not end:
            ends.remove(end)
            ends.append(end)

    # ---- what leaves ----------------------------------------------------------------------------

    def pop_superseded(self) -> Chunk | None:
        """A chunk that only superseded ends use, the last one of its prompt. It is shared from now on. None if none may leave now."""
        for _ in range(_MOST_TRIED):
            end = next(iter(self.superseded), None)
            if end is None:
                return None
            chunk = end.chunk
            if (
                chunk is None or chunk.session_end is not end
            ):  # what is left of it is behind a chunk that left out of order
                del self.superseded[end]
            elif chunk.leases or chunk.pins or not chunk.ready or chunk.detached:
                self.superseded.move_to_end(end)
            else:
                self._disown(chunk, end)
                return chunk
        return None

    def left(self, chunk: Chunk) -> None:
        """The chunk left L1."""
        if chunk.session_end is not None:
            self._disown(chunk, chunk.session_end)

    def delete(self, session: SessionRecord) -> None:
        """All its ends are superseded. Only a later lookup makes a session of this name again."""
        del self._sessions[session.key]
        session.deleted = True
        self._deleted[session.key] = session
        if len(self._deleted) > _MOST_DELETED:
            self._forget_deletion(next(iter(self._deleted)))
        for end in session.ends:
            self._supersede(end)
        session.ends = []

    # ---- records --------------------------------------------------------------------------------

    def _disown(self, chunk: Chunk, end: PromptEnd) -> None:
        parent = chunk.session_parent
        chunk.session_end = chunk.session_parent = None
        session = end.session
        session.chunks -= 1
        end.chunks -= 1
        if end.chunk is chunk:
            end.chunk = parent
        if not end.chunks:
            self._drop_end(end)

    def _drop_end(self, end: PromptEnd) -> None:
        session = end.session
        end.chunk = None
        if end.superseded:
            self.superseded.pop(end, None)
        elif end in session.ends:
            session.ends.remove(end)
        self._record_bytes -= _END_BYTES
        if session.deleted and self._deleted.get(session.key) is not session:
            self._count_unless_empty(session)

    def _forget_deletion(self, key: SessionKey) -> None:
        session = self._deleted.pop(key, None)
        if session is not None:
            self._count_unless_empty(session)

    def _count_unless_empty(self, session: SessionRecord) -> None:
        """A record that is in no list counts while it owns chunks."""
        if session.counted != bool(session.chunks):
            session.counted = not session.counted
            self._record_bytes += _bytes_of(session.key) if session.counted else -_bytes_of(session.key)

    def _supersede(self, end: PromptEnd) -> None:
        end.superseded = True
        self.superseded[end] = None

    def _add_end(self, session: SessionRecord, chunk: Chunk) -> PromptEnd:
        end = PromptEnd(session, chunk)
        if session.deleted:
            self._supersede(end)
        else:
            session.ends.append(end)
            if len(session.ends) > _ENDS_A_USE * self.superseded_after:  # an engine whose lookups name no session
                self._supersede(session.ends.pop(0))
        self._record_bytes += _END_BYTES
        if not session.counted:
            session.counted = True
            self._record_bytes += _bytes_of(session.key)
        return end

    def _add_request(self, owner: Owner, key: SessionKey) -> None:
        """Remember the request. The oldest make room, and count anew with each renewal."""
        self.end_request(owner)
        more = _bytes_of_request(owner)
        while self._requests and (len(self._requests) >= _MOST_REQUESTS or not self._fits(more)):
            self.end_request(next(iter(self._requests)))
        if self._fits(more):
            self._requests[owner] = hash(key)
            self._record_bytes += more

    def _add_session(self, key: SessionKey) -> SessionRecord | None:
        """A new session; None if it does not fit. Sessions that own nothing give way, the least recently used first."""
        self._forget_deletion(key)
        for deleted in list(islice(self._deleted, _MOST_TRIED)):
            if self._fits(_bytes_of(key)):
                break
            self._forget_deletion(deleted)
        for old in list(islice(self._sessions, _MOST_TRIED)):
            if self._fits(_bytes_of(key)):
                break
            if not self._sessions[old].chunks:
                dropped = self._sessions.pop(old)
                dropped.dropped = True
                self._count_unless_empty(dropped)
        if not self._fits(_bytes_of(key)):
            return None
        session = self._sessions[key] = SessionRecord(key)
        session.counted = True
        self._record_bytes += _bytes_of(key)
        return session

    def audit(self, chunks: Iterable[Chunk], all_chunks: bool) -> None:
        """AssertionError names what does not balance. `chunks`: of L1; `all_chunks`: no other is left, cleared but read."""
        owned = Counter(chunk.session_end for chunk in chunks if chunk.session_end is not None)
        live = [end for session in self._sessions.values() for end in session.ends]
        ends = {*owned, *live, *self.superseded}
        records = {*self._sessions.values(), *self._deleted.values(), *(end.session for end in ends)}
        counted = len(ends) * _END_BYTES + sum(_bytes_of(session.key) for session in records)
        counted += sum(map(_bytes_of_request, self._requests))
        assert counted <= self._record_bytes, f"records of {counted} bytes, {self._record_bytes} counted"
        assert all(owned[end] <= end.chunks for end in ends), "an end counts fewer chunks than it owns"
        assert all(end.superseded for end in ends - set(live)), "an end that is not superseded is in no list"
        if all_chunks:
            assert counted == self._record_bytes, f"records of {counted} bytes, {self._record_bytes} counted"
            assert all(owned[end] == end.chunks for end in ends), "an end counts more chunks than it owns"

    def _fits(self, more: int) -> bool:
        return self._record_bytes + more <= RECORD_BYTES * max(self._chunk_count(), _LEAST_CHUNKS)


def _bytes_of(key: SessionKey) -> int:
    return _SESSION_BYTES + 4 * len(key.id)  # a character has up to four bytes


def _bytes_of_request(owner: Owner) -> int:
    return _REQUEST_BYTES + 4 * (len(owner[0]) + len(owner[1]))
