"""Sessions as an operator sees them: which there are and what they have in L1, and the end of one.

`tiers` has L1 only: a session is known by its chunks in L1, and no index of storage knows whose an object is.

Owns: the choice of sessions and the report. Refuses to know: HTTP, what leaves first (`cache`). Runs in the loop's thread.
"""

from __future__ import annotations

from collections import Counter
from heapq import nlargest
from itertools import islice

from msgspec import Struct

from kvserver.cache import SessionKey, SessionRecord
from kvserver.protocol import salt_digest
from kvserver.server.pins import of_all_loras
from kvserver.server.upkeep import Upkeep

MOST_SESSIONS = 256  # of one report
_MOST_EXAMINED = 4096  # most recently used ones, in one turn of the loop


class SessionReport(Struct, frozen=True, kw_only=True):
    """Report of one session. The names of fields are keys of the answers of `/sessions`.

    Tokens and bytes are those of the chunks that no other session and no request without one used. Pins of its prompts by tokens or
    hashes are not counted.
    """

    session_id: str
    model_name: str
    namespace: str
    salt_digest: str  # "" of requests without a cache salt
    tokens: int
    bytes: int
    tiers: list[str]
    last_use_seconds: float  # ago; 0 if only stores named the session
    pins: int  # live ones that were made by its name, or by its requests


class SessionsReport(Struct, frozen=True):
    """Sessions that have the most chunks, the largest and latest first. `left_out`: how many more there are, or may be."""

    sessions: list[SessionReport]
    left_out: int


class DeletedSession(Struct, frozen=True, kw_only=True):
    """Outcome of a deletion: accepted, or missing."""

    id: str
    outcome: str
    tokens: int = 0
    bytes: int = 0
    tiers: list[str] = []
    reason: str = ""


class SessionReports:
    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep

    def all(self) -> SessionsReport:
        sessions, models, now = self._upkeep.cache.sessions, self._models(), self._upkeep.clock()
        examined = [one for one in islice(sessions, _MOST_EXAMINED) if one.chunks]
        largest = nlargest(MOST_SESSIONS, examined, key=lambda one: (one.chunks, one.last_seconds))
        pins = Counter([pin.session for pin in self._upkeep.cache.protections])
        chosen = [self._report(one, models, now, pins[of_all_loras(one.key)]) for one in largest]
        chosen.sort(key=lambda one: (-one.tokens, one.last_use_seconds))
        return SessionsReport(chosen, len(examined) - len(chosen) + max(0, len(sessions) - _MOST_EXAMINED))

    def delete(self, session_id: str, model_name: str, cache_salt: str) -> DeletedSession:
        """Delete the sessions of this name and salt, in the namespaces of the model, or in all."""
        salt, models, now = salt_digest(cache_salt), self._models(), self._upkeep.clock()
        deleted = []
        for namespace in self._upkeep.cache.index.namespace_ids():
            session = self._upkeep.cache.sessions.session(SessionKey(namespace, salt, session_id))
            if session is not None and model_name in ("", models.get(namespace)):
                deleted.append(self._report(session, models, now))
                self._upkeep.cache.sessions.delete(session)
        if not deleted:
            reason = "no session of this name, model and cache_salt has a record"
            return DeletedSession(id=session_id, outcome="missing", reason=reason)
        return DeletedSession(
            id=session_id,
            outcome="accepted",
            tokens=sum(one.tokens for one in deleted),
            bytes=sum(one.bytes for one in deleted),
            tiers=sorted({tier for one in deleted for tier in one.tiers}),
        )

    def _models(self) -> dict[bytes, str]:
        """Names of models by namespace."""
        names = {id(use): name for name, use in self._upkeep.cache.index.models.items()}
        return {one.id: names[id(one.model)] for one in self._upkeep.cache.index.namespaces()}

    def _report(self, session: SessionRecord, models: dict[bytes, str], now: float, pins: int = 0) -> SessionReport:
        namespace = self._upkeep.cache.index.find_namespace(session.key.namespace)
        tokens = session.chunks * namespace.groups.chunk_tokens if namespace is not None else 0
        return SessionReport(
            session_id=session.key.id,
            model_name=models.get(session.key.namespace, ""),
            namespace=session.key.namespace.hex(),
            salt_digest=session.key.salt.hex(),
            tokens=tokens,
            bytes=session.pages * self._upkeep.cache.pool.page_bytes if tokens else 0,
            tiers=["l1"] if session.chunks else [],
            last_use_seconds=round(now - session.last_seconds, 3) if session.last_seconds else 0.0,
            pins=pins,
        )
