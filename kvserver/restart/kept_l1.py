"""L1 that a restart keeps, by one face; and its null object, of a daemon without --l1-file.

Owns: what happens at the start, in the loop's turns and at the end, and in which order. Refuses to know: the form of a state, how chunks are
adopted, and the file's calls.

The state is removed before the loop's first turn, so before the first write to L1: a daemon that crashes leaves none. It is written after
the last copy has ended. A state in another place, of a daemon with another endpoint, is void from then on: the use of the file has a new number.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvserver._native import HostRegion, kept_pages
from kvserver.cache import Cache, PagePool, chunks_of
from kvserver.config import Settings
from kvserver.events import Bus
from kvserver.kv_events import Hub
from kvserver.protocol import ConfigError, chunk_tokens_for
from kvserver.restart.adoption import Adoption
from kvserver.restart.keeping import digest_threads, make_state, pins_of, restore_pins
from kvserver.restart.l1_file import L1File
from kvserver.restart.missed_clears import MissedClears, generations_of, learn
from kvserver.restart.state import KeptNamespace, State, StateError, decode, encode
from kvserver.tiering import ConfiguredTier

log = logging.getLogger(__name__)

_TOUCHED_AT_ONCE = 256 << 20  # what L1File reserves at once


class KeptL1(Protocol):
    """REQUIRES: the loop's thread uses it, or the main thread while there is no loop."""

    keeps: bool

    def make_pool(self, l1_bytes: int, page_bytes: int) -> PagePool:
        """The pages of L1 that may be used from now on, and no other."""

    def begin(self, cache: Cache, bus: Bus, hub: Hub, tiers: Sequence[ConfiguredTier]) -> None:
        """Before the first turn: no later daemon finds the state. ConfigError if that cannot be achieved. `tiers`: of L2."""

    @property
    def completion_fds(self) -> list[int]: ...

    def step(self) -> bool:
        """At the end of a turn; True while there is more to do at once."""

    def tick(self) -> None:
        """Once a second or so."""

    @property
    def adopting(self) -> bool:
        """True while a later turn may adopt chunks."""

    def ids_of_model(self, model_name: str) -> set[bytes]:
        """Namespaces of the model of which a later turn may adopt chunks."""

    def clear(self, prefix: bytes) -> None:
        """Adopt nothing of the namespaces whose id begins with the prefix."""

    def end(self, cache: Cache, hub: Hub, flush: Callable[[], bool]) -> str:
        """Leave the state to the next daemon, after the last copy. Returns what stays, for people.

        `flush`: waits until the hub has handled all events; False if it has not. L1 is not used afterwards.
        """


class NoKeptL1:
    keeps = adopting = False

    def __init__(self) -> None:
        self.completion_fds = list[int]()

    def make_pool(self, l1_bytes: int, page_bytes: int) -> PagePool:
        return PagePool(l1_bytes, page_bytes)

    def begin(self, cache: Cache, bus: Bus, hub: Hub, tiers: Sequence[ConfiguredTier]) -> None:
        pass

    def step(self) -> bool:
        return False

    def tick(self) -> None:
        pass

    def ids_of_model(self, model_name: str) -> set[bytes]:
        return set()

    def clear(self, prefix: bytes) -> None:
        pass

    def end(self, cache: Cache, hub: Hub, flush: Callable[[], bool]) -> str:
        return ""


class RestartableL1:
    keeps = True

    def __init__(self, file: L1File, region: HostRegion, settings: Settings, page_bytes: int) -> None:
        self._file, self._region = file, region
        self.pool = PagePool(region.size, page_bytes, withheld=True)
        self._state, self._why_empty = self._usable(settings)
        self._adoptions: list[Adoption] = []  # one after the other
        self._waiting: tuple[Adoption, MissedClears] | None = None  # what tiers of L2 are asked about
        self._cache: Cache | None = None
        self._tiers: Sequence[ConfiguredTier] = ()
        self._before = {of.id: of.generations for of in self._state.namespaces}
        self._free = self._plan()
        self._stopping = False
        self._reserved_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._reserved_fd).atexit = False
        self._thread: threading.Thread | None = None

    # ---- start --------------------------------------------------------------------------------

    def make_pool(self, l1_bytes: int, page_bytes: int) -> PagePool:
        return self.pool

    @property
    def _empty(self) -> State:
        return State(version="", page_bytes=self.pool.page_bytes, inode=self._file.inode)

    def _usable(self, settings: Settings) -> tuple[State, str]:
        """The state as far as it fits; an empty one, and why."""
        empty = self._empty
        try:
            raw = self._file.read_state()
            if raw is None:
                return empty, "no daemon left a state" if self._file.size_before else "its file is new"
            state = decode(raw)
            if state.inode != self._file.inode:
                raise StateError("the file was replaced")
            if state.use != self._file.use_before:
                raise StateError("another daemon used the file after it")
            if state.page_bytes != self.pool.page_bytes:
                raise StateError(f"its pages have {state.page_bytes} bytes, and those of L1 {self.pool.page_bytes}")
        except (OSError, StateError) as error:
            return empty, f"{self._file.state_path}: {error}"
        return _for_settings(state, settings)

    def _plan(self) -> list[tuple[int, int]]:
        """Drop the chunks that do not fit. Returns the free extents, the last one first."""
        pages = min(self.pool.pages, self._file.size_before // self.pool.page_bytes)
        try:
            fits, _ = kept_pages(self._state.counts, self._state.extents, pages)
            before = self._state.chunks
            self._state = self._state.selected(fits)
            if lost := before - self._state.chunks:
                log.info("%d of %d chunks of L1 are beyond its size now", lost, before)
            _, free = kept_pages(self._state.counts, self._state.extents, self.pool.pages)
        except ValueError as error:
            self._why_empty = f"{self._file.state_path}: {error}"
            self._state = self._empty
            free = [(0, self.pool.pages)]
        return free[::-1]

    def begin(self, cache: Cache, bus: Bus, hub: Hub, tiers: Sequence[ConfiguredTier]) -> None:
        self._cache, self._tiers = cache, tiers
        try:
            self._file.remove_state()
            self._file.begin_use()
            self._file.shrink()
        except OSError as error:
            raise ConfigError(f"--l1-file {self._file.path}: its state cannot be removed: {error.strerror}") from None
        if not self._state.chunks:
            log.info("L1 begins empty: %s", self._why_empty or "no chunk was left that can be used")
        try:
            more = self._file.reserved_bytes < self._region.size and self._reserve_more()
        except OSError as error:
            raise ConfigError(f"--l1-file {self._file.path}: no memory: {error.strerror}") from None
        self._release_reserved()
        if more:
            self._thread = threading.Thread(target=self._reserve, name="l1-reserve", daemon=True)
            self._thread.start()
        restore_pins(cache, self._state.pins)
        if self._state.chunks:
            try:
                hub.restore(self._state.descriptions)
            except msgspec.MsgspecError as error:
                log.warning("KV events do not describe what L1 kept: %s", error)
            self._state.descriptions = b""
            self._begin_adoption(cache, bus)

    def _begin_adoption(self, cache: Cache, bus: Bus) -> None:
        """Verify all chunks. Those about which tiers of L2 are asked are adopted later than the others."""
        state, self._state = self._state, self._empty
        asked = MissedClears(state.namespaces, self._tiers).concerned()
        at_once = state.in_namespaces([not each for each in asked]) if any(asked) else state
        if at_once.chunks:
            self._adoptions.append(Adoption(at_once, cache, self._region, bus))
            self._adoptions[0].start()
        if later := state.chunks - at_once.chunks:
            state = state.in_namespaces(asked) if at_once.chunks else state
            self._waiting = Adoption(state, cache, self._region, bus), MissedClears(state.namespaces, self._tiers)
            self._waiting[0].start()
            log.info("%d chunks of L1 wait until L2 has answered which KV was cleared meanwhile", later)

    def _reserve(self) -> None:
        try:
            began = time.monotonic()
            while not self._stopping and self._reserve_more():
                os.eventfd_write(self._reserved_fd, 1)
            if not self._stopping:
                log.info("L1 has all its memory, after %.2f s", time.monotonic() - began)
        except OSError as error:
            log.warning(
                "L1 stays at %d of %d bytes: %s; enlarge the file system of %s", self._file.reserved_bytes, self._region.size,
                error.strerror, self._file.path,
            )  # fmt: skip
        os.eventfd_write(self._reserved_fd, 1)

    def _reserve_more(self) -> bool:
        """Reserve the next part, as L1File does, after a touch: it alone gets the huge pages that a tmpfs has on advice.

        Where the touch fails, reserving raises the reason.
        """
        first = self._file.reserved_bytes
        self._region.populate(first, min(_TOUCHED_AT_ONCE, self._region.size - first))
        return self._file.reserve_more()

    def _release_reserved(self) -> None:
        reserved = self._file.reserved_bytes // self.pool.page_bytes
        while self._free and self._free[-1][0] < reserved:
            first, count = self._free.pop()
            if first + count > reserved:
                self._free.append((reserved, first + count - reserved))
                count = reserved - first
            self.pool.release_pages(first, count)

    # ---- turns --------------------------------------------------------------------------------

    @property
    def completion_fds(self) -> list[int]:
        fds = [self._reserved_fd] if self._free else []
        return fds + [each.completion_fd for each in self._adoptions[:1] if not each.done]

    def step(self) -> bool:
        if self._free:
            try:
                os.eventfd_read(self._reserved_fd)
                self._release_reserved()
            except BlockingIOError:
                pass
        if self._waiting is not None and (lost := self._waiting[1].lost()) is not None:
            self._end_waiting(*self._waiting, lost)
        if not self._adoptions:
            return False
        more = self._adoptions[0].step()
        if self._adoptions[0].published:
            del self._adoptions[0]
            return bool(self._adoptions)
        return more

    def _end_waiting(self, adoption: Adoption, clears: MissedClears, lost: dict[int, str]) -> None:
        self._waiting = None
        self._adoptions.append(adoption)
        for place in lost:
            adoption.drop(place)
        for why in dict.fromkeys(lost.values()):
            log.info("L1 drops what it kept of %d namespaces: %s", list(lost.values()).count(why), why)

    def tick(self) -> None:
        if self._cache is not None and self._tiers:
            found = self._cache.index.namespaces()
            learn(self._tiers, [(of.id, of.durability) for of in found if not of.groups.tails])

    @property
    def adopting(self) -> bool:
        return bool(self._unfinished)

    @property
    def _unfinished(self) -> list[Adoption]:
        return [*self._adoptions, *([self._waiting[0]] if self._waiting is not None else [])]

    def ids_of_model(self, model_name: str) -> set[bytes]:
        return {id for each in self._unfinished for id in each.ids_of_model(model_name)}

    def clear(self, prefix: bytes) -> None:
        for each in self._unfinished:
            each.clear(prefix)

    # ---- end ----------------------------------------------------------------------------------

    def end(self, cache: Cache, hub: Hub, flush: Callable[[], bool]) -> str:
        self._stopping = True
        if self._thread is not None:
            self._thread.join()
        unfinished = self._unfinished
        rest = [left for each in unfinished if (left := each.stop()) is not None]
        began = time.monotonic()
        kept = 0
        try:
            pins = pins_of(cache)
            state = make_state(cache, self._region, self._file.inode)
            state.pins = pins
            state.namespaces = [self._with_generations(of, adopted=True) for of in state.namespaces]
            for left in rest:
                left.namespaces = [self._with_generations(of, adopted=False) for of in left.namespaces]
                state = state.joined(left)
            handled = flush()  # behind the digests, beside which events are handled
            state.descriptions = hub.encode_l1(and_waiting=bool(unfinished) or not handled)
            state.use = self._file.begin_use()
            self._file.write_state(encode(state))
            kept = state.chunks
        except OSError as error:
            log.warning("no state of L1 is left, the next daemon begins empty: %s: %s", self._file.state_path, error)
        self._region.unmap_pages(digest_threads())
        log.info("%d chunks of L1 are left to the next daemon, in %.2f s", kept, time.monotonic() - began)
        return (
            f"; {self._file.allocated_bytes} bytes of memory stay in {self._file.path}, with {kept} chunks for the next "
            f"daemon{self._file.kept_if}: {self._file.freed_by} frees them"
        )

    def _with_generations(self, of: KeptNamespace, adopted: bool) -> KeptNamespace:
        """With the generations that its chunks had last, also in tiers that are not used any more."""
        now = generations_of(of.id, of.tails, of.durability, self._tiers)
        before = self._before.get(of.id, {})
        return msgspec.structs.replace(of, generations=before | now if adopted else now | before)


def _for_settings(state: State, settings: Settings) -> tuple[State, str]:
    """The rows of namespaces that an engine can have with these settings."""
    useful = set()
    for of in state.namespaces:
        if of.tails or of.chunk_tokens == chunk_tokens_for(settings.chunk_tokens, of.groups):
            useful.add(of.id)
    kept = [
        of.id in useful and (not of.tails or (settings.tails == "on" and _may_follow(chunks_of(of.id), state, useful)))
        for of in state.namespaces
    ]
    if all(kept):
        return state, ""
    before = state.chunks
    state = state.in_namespaces(kept)
    log.info("%d of %d chunks of L1 are of no use with other --chunk-tokens or --tails", before - state.chunks, before)
    return state, ""


def _may_follow(id: bytes, state: State, useful: set[bytes]) -> bool:
    """Single blocks are found behind chunks, or alone."""
    return id in useful or not any(of.id == id for of in state.namespaces)
