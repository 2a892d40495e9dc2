"""Sessions of a small L1, and a plain model beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvserver.cache import POLICIES, Cache, PagePool, SessionKey, SessionRecord, one_group

PAGE = 4096
NAMESPACE = b"n" * 32
Path = tuple[int, ...]
User = tuple[SessionKey, int] | None  # a session and how many of its name were deleted before it


def key(id: str, salt: bytes = b"") -> SessionKey:
    return SessionKey(NAMESPACE, salt, id)


@dataclass
class Known:
    """A resident chunk in the plain model. `owner`: the only session that used it, the `number`-th chunk that a session got."""

    owner: User
    number: int


class World:
    """Requests over a small L1, one after the other, and a plain model beside it."""

    def __init__(self, policy: str, pages: int) -> None:
        self.cache = Cache(PagePool(pages * PAGE, PAGE), POLICIES[policy]())
        self.names: dict[bytes, Path] = {}
        self.known: dict[Path, Known] = {}
        self.live: set[SessionKey] = set()
        self.leased: set[Path] = set()
        self.deletions: Counter[SessionKey] = Counter()
        self.number = 0
        self.evicted: list[Path] = []
        self.counts: Counter[str] = Counter()

    def keys(self, path: Path) -> bytes:
        keys = []
        for end in range(1, len(path) + 1):
            name = bytes([end, *path[:end]]).ljust(32, b"\0")
            self.names[name] = path[:end]
            keys.append(name)
        return b"".join(keys)

    def request(
        self,
        path: Path,
        session: SessionKey | None,
        pieces: int = 0,
        store: bool = True,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> int:
        """Look the prompt up and store it, whole or in pieces that follow one another; returns its hits."""
        keys = self.keys(path)
        hits = self.cache.lookup(NAMESPACE, keys, ("e", "r"), 1e9, session).hit_chunks
        if session is not None:
            self.live.add(session)
        found = [path[:place] for place in range(1, hits + 1)]
        self.use(found, self.user(session))
        self.leased = set(found)
        meanwhile()
        if store:
            begin, step = (hits, pieces) if pieces else (0, len(path))
            for first in range(begin, len(path), step):
                self.store(path, first, min(first + step, len(path)), session)
        self.cache.end_lease(("e", "r"))
        self.leased = set()
        return hits

    def store(self, path: Path, first: int, end: int, session: SessionKey | None) -> None:
        if session is not None and not self.deletions[session]:
            self.live.add(session)
        keys, user = self.keys(path)[first * 32 : end * 32], self.user(session)
        named = [path[:place] for place in range(first + 1, end + 1)]
        self.use([name for name in named if name in self.known], user)
        busy = self.leased | set(named)
        plan = self.cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, session=session)
        for victim in [self.names[name] for _, name in plan.evicted]:
            self.evict(victim, busy, user)
        self.cache.finish_store(plan, copied=True)
        for name in [self.names[chunk.key] for chunk in plan.chunks]:
            self.own(name, user)

    def evict(self, victim: Path, busy: set[Path], user: User) -> None:
        """A session that is deleted while its request runs may leave after that."""
        owner = self.known[victim].owner
        waiting = {
            path: known.number
            for path, known in self.known.items()
            if self.is_deleted(known.owner) and known.owner != user and path not in busy
        }
        if self.is_deleted(owner):
            self.counts["deleted"] += 1
            of_owner = [number for path, number in waiting.items() if self.known[path].owner == owner]
            assert owner == user or self.known[victim].number == max(of_owner), "another one was got later"
        else:
            self.counts["other"] += 1
            assert not waiting, f"{victim} left before {waiting}"
        self.evicted.append(victim)
        del self.known[victim]

    def use(self, names: list[Path], user: User) -> None:
        for name in names:
            owner = self.known[name].owner
            if owner not in (None, user):
                self.own(name, user if self.is_deleted(owner) else None)

    def own(self, path: Path, user: User) -> None:
        self.number += 1
        self.known[path] = Known(user, self.number)

    def user(self, session: SessionKey | None) -> User:
        """The session that is live, or the last one of its name."""
        return None if session is None else (session, self.deletions[session] - (session not in self.live))

    def is_deleted(self, user: User) -> bool:
        return user is not None and user != (user[0], self.deletions[user[0]])

    def delete(self, session: SessionKey) -> None:
        found = self.cache.sessions.session(session)
        assert (found is not None) == (session in self.live)
        if found is not None:
            self.cache.sessions.delete(found)
            self.live.remove(session)
            self.deletions[session] += 1

    def drain(self) -> None:
        self.cache.clear_namespaces()
        while self.cache.step():
            pass
        self.known.clear()


def record(cache: Cache, session: SessionKey) -> SessionRecord:
    found = cache.sessions.session(session)
    assert found is not None
    return found
