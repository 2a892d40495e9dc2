"""Generations of namespaces in a shared store: they make a clear effective for every daemon that shares it.

Every scope (everything, a namespace, an epoch, a LoRA) has an id in the store (`ids`). The digest of a namespace's ids is its
generation, and part of every name and header. A clear writes an id with a number above any read or seen. The old objects are
neither looked for nor deleted: no name leads to them any more, and the store's expiry removes them. Ids are cached for
IDS_SECONDS, so other daemons may serve what was cleared for so long.

Ids only grow. The store may have a lower id than was seen, or none: it went back in time, or two daemons cleared at once. Then a
higher one is written. The lower one is not used, since objects under it may have been cleared. Nor is the one seen: a daemon that
never saw it may have cleared its objects since. So all daemons come to the same id, and nothing that was cleared returns.

Owns: the cached ids, and the clears that are not in the store yet: until they are, no generation of the scope is known, so
nothing of it is read or written. Any thread may use it; `of` and `write` do I/O in their thread.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence

from kvserver.l2.remote.ids import HighestIds, id_of, meaning_of, new_id
from kvserver.l2.remote.names import Names, scopes_of
from kvserver.l2.remote.store import StoreClient, StoreRefused, StoreTimeout

IDS_SECONDS = 5.0
_MOST_IDS = 4096
_MOST_WAIT_SECONDS = 2.0  # for another lane that writes an id
_GENERATION_BYTES = 8  # as in a record's header
_NONE = 0  # where a namespace has no generation


class NoGeneration(StoreRefused):
    """Scope without a generation: the store lacks an id, and does not take one."""


class Generations:
    def __init__(self, names: Names, highest: HighestIds) -> None:
        self._names, self._highest = names, highest
        self._writing = threading.Lock()  # one lane writes: of two ids at once the lower one would not be believed
        self._lock = threading.Lock()  # never kept during I/O: the loop needs it
        self._ids: dict[bytes, tuple[bytes, int]] = {}  # by scope: the id, and when it expires, in ns
        self._unwritten: dict[bytes, int] = {}  # scopes that were cleared, and the number of the clear
        self._replaced: set[bytes] = set()  # of them those that were not cleared: the store has an older id
        self._clears = 0
        self._warnings: dict[bytes, str] = {}  # by scope: why the id written last may be lost
        self._seen: dict[bytes, int] = {}  # by namespace: the generation that was found last
        self._changed: list[bytes] = []

    def seen(self, namespace: bytes) -> int | None:
        """The generation that of() or of_reader() found last, 0 for none; None: neither has found any, or a clear was the last."""
        return self._seen.get(namespace)

    def changed(self) -> list[bytes]:
        """The namespaces that another daemon cleared, as far as of() has noticed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, []
        return changed

    def clear(self, scope: bytes) -> None:
        """Forget the scope's generation; the next one is in the store after write()."""
        with self._lock:
            self._clears += 1
            self._unwritten[scope] = self._clears
            self._replaced.discard(scope)
            self._ids.pop(scope, None)
            self._seen = {id: generation for id, generation in self._seen.items() if not id.startswith(scope)}

    def _replace(self, scope: bytes) -> None:
        """The store's id is older than one that was seen: a higher one is to be written, by this daemon or another."""
        with self._lock:
            if scope not in self._unwritten:
                self._clears += 1
                self._unwritten[scope] = self._clears
                self._replaced.add(scope)
                self._ids.pop(scope, None)

    def write(self, client: StoreClient, scope: bytes) -> None:
        """Put a new id of a cleared scope into the store; StoreError if it may not be there."""
        if scope not in self._unwritten:
            return
        if not self._writing.acquire(timeout=_MOST_WAIT_SECONDS):
            raise StoreTimeout("another lane writes an id")
        try:
            with self._lock:
                clear, replaced = self._unwritten.get(scope), scope in self._replaced
            if clear is None:
                return
            name = self._names.of_id(scope)
            (value,) = client.read_ids([name])
            if replaced and id_of(value) > self._highest.least(scope):  # another daemon has written a higher one
                self._written(scope, clear, id_of(value), time.monotonic_ns(), "")
                return
            # Never the same id twice: an attempt that timed out may arrive late, after another daemon's clear.
            id, now_ns = new_id(max(id_of(value), self._highest.least(scope))), time.monotonic_ns()
            try:
                warning = client.write_id(name, id)
            except StoreRefused as error:
                raise NoGeneration(str(error)) from None
            self._written(scope, clear, id, now_ns, warning)
        finally:
            self._writing.release()

    def _written(self, scope: bytes, clear: int, id: bytes, now_ns: int, warning: str) -> None:
        self._highest.raise_to({scope: id})
        with self._lock:
            self._warnings.pop(scope, None)
            if warning and len(self._warnings) < _MOST_IDS:
                self._warnings[scope] = warning
            if self._unwritten.get(scope) == clear:
                del self._unwritten[scope]
                self._replaced.discard(scope)
                self._ids[scope] = id, now_ns + int(IDS_SECONDS * 1e9)

    def warning(self, scope: bytes) -> str:
        """Reason why the store may lose the last clear of the scope; "" if none is known."""
        with self._lock:
            return self._warnings.get(scope, "")

    def of(self, client: StoreClient, namespace: bytes) -> int:
        """The generation of a namespace, as old as IDS_SECONDS at most. StoreError if it cannot be found out."""
        scopes = scopes_of(namespace)
        while (ids := self._ids_of(client, scopes)) is None:
            pass  # once more for each id of the store that is not believed
        digest = hashlib.sha256(b"".join(meaning_of(id) for id in ids)).digest()
        generation = int.from_bytes(digest[:_GENERATION_BYTES], "big")
        self._notice(namespace, generation)
        return generation

    def of_reader(self, client: StoreClient, namespace: bytes) -> int | None:
        """The same; None: an id is missing or not believed and the store takes none, so nothing there can be of the namespace."""
        try:
            return self.of(client, namespace)
        except NoGeneration:
            self._notice(namespace, _NONE)
            return None

    def _ids_of(self, client: StoreClient, scopes: Sequence[bytes]) -> list[bytes] | None:
        """The ids of scopes; None: look again, a higher one than the store's is known or about to be written."""
        for scope in scopes:
            self.write(client, scope)
        now_ns = time.monotonic_ns()
        with self._lock:
            clears = self._clears
            ids = {scope: self._ids[scope][0] for scope in scopes if self._ids.get(scope, (b"", 0))[1] > now_ns}
        least = {scope: self._highest.least(scope) for scope in scopes if scope not in ids}
        if least:
            names = [self._names.of_id(scope) for scope in least]
            for scope, name, value in zip(least, names, client.read_ids(names), strict=True):
                ids[scope] = id_of(value or self._created(client, name, least[scope]))
            if replaced := [scope for scope in least if ids[scope] < self._highest.least(scope)]:
                for scope in replaced:
                    if self._highest.least(scope) == least[scope]:  # else another lane has found a higher one
                        self._replace(scope)
                return None
            found = {scope: ids[scope] for scope in least}
            self._highest.raise_to(found)
            self._remember(found, now_ns, clears)
        return [ids[scope] for scope in scopes]

    def reads(self, client: StoreClient) -> bool:
        """True if the store has the id of everything. StoreError unless it answers."""
        return client.read_ids([self._names.of_id(b"")]) != [None]

    def create(self, client: StoreClient) -> None:
        """Make the id of everything, unless there is one."""
        self._created(client, self._names.of_id(b""), self._highest.least(b""))

    def _created(self, client: StoreClient, name: str, above: bytes) -> bytes:
        try:
            return client.create_id(name, new_id(above))
        except StoreRefused as error:
            raise NoGeneration(str(error)) from None

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
