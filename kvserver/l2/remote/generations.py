"""Which generation of a namespace's objects counts: what makes a clear effective for every daemon that shares the store.

Every scope (everything, a namespace, an epoch, a LoRA) has a random id in the store; the digest of a namespace's ids is its
generation, and part of every name and header. A clear writes a new id. The old objects are neither looked for nor deleted: no name leads
to them any more, and the store's expiry removes them. Ids are cached for IDS_SECONDS: so much later other daemons stop serving
what was cleared. An id that the store has lost is made anew at random, so that nothing comes back.

Owns: the cached ids, and the clears that are not in the store yet: until they are, no generation of the scope is known, so
nothing of it is read or written. Any thread may use it; `of` and `write` do I/O in their thread.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time

from kvserver.l2.remote.names import Names, scopes_of
from kvserver.l2.remote.store import StoreClient

IDS_SECONDS = 5.0
_MOST_IDS = 4096
_ID_BYTES = 16
_GENERATION_BYTES = 8  # as in a record's header


class Generations:
    def __init__(self, names: Names) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._ids: dict[bytes, tuple[bytes, int]] = {}  # by scope: the id, and when it expires, in ns
        self._unwritten: dict[bytes, int] = {}  # scopes that were cleared, and the number of the clear
        self._clears = 0
        self._seen: dict[bytes, int] = {}  # by namespace: the generation that of() returned last
        self._changed: list[bytes] = []

    def changed(self) -> list[bytes]:
        """The namespaces that another daemon cleared, as far as of() has noticed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, []
        return changed

    def clear(self, scope: bytes) -> None:
        """No generation of the scope counts any more; the next one is in the store after write()."""
        with self._lock:
            self._clears += 1
            self._unwritten[scope] = self._clears
            self._ids.pop(scope, None)

    def write(self, client: StoreClient, scope: bytes) -> None:
        """Put a new id of a cleared scope into the store; StoreError if it may not be there."""
        with self._lock:
            clear = self._unwritten.get(scope)
        if clear is None:
            return
        # Never the same id twice: an attempt that timed out may arrive late, after another daemon's clear.
        value, now_ns = os.urandom(_ID_BYTES), time.monotonic_ns()
        client.write_id(self._names.of_id(scope), value)
        with self._lock:
            if self._unwritten.get(scope) == clear:
                del self._unwritten[scope]
                self._ids[scope] = value, now_ns + int(IDS_SECONDS * 1e9)

    def of(self, client: StoreClient, namespace: bytes) -> int:
        """The generation of a namespace, as old as IDS_SECONDS at most. StoreError if it cannot be found out."""
        scopes = scopes_of(namespace)
        for scope in scopes:
            self.write(client, scope)
        now_ns = time.monotonic_ns()
        with self._lock:
            clears = self._clears
            ids = {scope: self._ids[scope][0] for scope in scopes if self._ids.get(scope, (b"", 0))[1] > now_ns}
        wanted = [scope for scope in scopes if scope not in ids]
        if wanted:
            names = [self._names.of_id(scope) for scope in wanted]
            for scope, name, value in zip(wanted, names, client.read_ids(names), strict=True):
                ids[scope] = value or client.create_id(name, os.urandom(_ID_BYTES))
            self._remember({scope: ids[scope] for scope in wanted}, now_ns, clears)
        digest = hashlib.sha256(b"".join(ids[scope] for scope in scopes)).digest()
        generation = int.from_bytes(digest[:_GENERATION_BYTES], "big")
        self._notice(namespace, generation)
        return generation

    def reads(self, client: StoreClient) -> bool:
        """Whether the store has the id of everything. StoreError unless it answers."""
        return client.read_ids([self._names.of_id(b"")]) != [None]

    def create(self, client: StoreClient) -> None:
        """Make the id of everything, unless there is one."""
        client.create_id(self._names.of_id(b""), os.urandom(_ID_BYTES))

    def _notice(self, namespace: bytes, generation: int) -> None:
        with self._lock:
            if self._seen.get(namespace, generation) != generation:
                self._changed.append(namespace)
            if len(self._seen) > _MOST_IDS:
                self._seen.clear()
            self._seen[namespace] = generation

    def _remember(self, ids: dict[bytes, bytes], now_ns: int, clears: int) -> None:
        with self._lock:
            if self._clears != clears:
                return  # they may be older than a clear
            if len(self._ids) > _MOST_IDS:
                self._ids.clear()
            for scope, value in ids.items():
                self._ids[scope] = value, now_ns + int(IDS_SECONDS * 1e9)
