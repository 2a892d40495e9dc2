"""The worker half: registers the KV cache, sends copies, watches their state words.

A message may stay in the send queue until the engine's own work on its blocks is done: it is PENDING until then. `endings`
decides what follows from a copy's state, and which process may still write then; it is carried out here. In any case, also after
an exception, each copy of a plan is answered and each copy in flight is checked. A fault in one copy does not affect others.

Runs on the engine's worker thread. Its only waits: one millisecond in a step that computes nothing, and detach().

Owns: the copies in flight of one rank. Refuses to know: requests' tokens and the scheduler's state.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvserver._native import State
from kvserver.adapters.common.cache_status import CacheStatus
from kvserver.adapters.common.copies import Copy
from kvserver.adapters.common.endings import Action, load_action, store_action
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.link import WORDS, Link, Session
from kvserver.adapters.common.load_ends import LoadEnds
from kvserver.adapters.common.log import log
from kvserver.adapters.common.send_queue import Message, NotSent, SendQueue
from kvserver.adapters.common.settings import CommonSettings
from kvserver.adapters.common.specs import LoadSpec, StoreSpec, ids_of
from kvserver.adapters.common.steps import ASLEEP, NULL_BLOCK, StepPlan, StepReport
from kvserver.protocol import Error, Reply, Retrieve, Store, Stored

_IDLE_WAIT_SECONDS = 0.001
_SHUT_SECONDS = 1.0


@dataclass(frozen=True)
class PositionSize:
    """Size of a position of one object group: its blocks, one of each member, and their bytes together."""

    blocks: int
    bytes: int


@dataclass(frozen=True)
class Rank:
    """The worker's rank. `positions`: by object group, to count copied bytes."""

    number: int = 0
    positions: Sequence[PositionSize] = (PositionSize(1, 0),)


class WorkerHalf:
    def __init__(
        self,
        settings: CommonSettings,
        send_queue: SendQueue,
        faults: Faults,
        rank: Rank = Rank(),
        link: Link | None = None,
        *,
        fails_requests: bool = True,
    ) -> None:
        """`link` is None when this worker runs without cache; it still reports the end of every load it is given.

        `fails_requests`: a failed load fails its whole request, which the engine then begins again, rather than the failed
        blocks, computed in place. Only that is right where a window's null blocks lie before them, and only then can blocks
        be kept out of use.
        """
        self.counters: Counter[str] = Counter()
        self._seconds: dict[str, list[float]] = {}
        self._settings = settings
        self._send_queue = send_queue
        self._faults = faults
        self._rank = rank
        self._link = link
        self._leaving: list[Link] = []  # after detach(), until the server has closed its mappings
        self._fails_requests = fails_requests
        self._session: Session | None = None
        self._free_words: list[int] = []
        self._copies: dict[int, Copy] = {}  # in flight, by the id of its spec, which is its sequence
        self._report = StepReport()
        self._wakes = 0
        self._asleep = False  # between detach() and attach()
        self.load_ends = LoadEnds(fails_requests)

    # ---- copies begin -------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Copies of this step begin behind the work of the steps before it. If this raises, no copy of the step begins."""
        self._send_queue.begin_step(step)

    def start_loads(self, plan: StepPlan) -> None:
        for copy_id in (*plan.abort_loads, *plan.abort_stores):
            if (aborted := self._copies.get(copy_id)) is not None:
                with self._faults.guarded(f"aborting a {aborted.spec.kind}"):
                    aborted.given_up = min(aborted.given_up, time.monotonic())
                    self.counters[f"cancelled_{aborted.spec.kind}s"] += aborted.cancel()
        for load in plan.loads:
            if load.keys:
                self._begin(load, self._settings.load_timeout_ms)

    def is_in_flight(self, copy_id: int) -> bool:
        return copy_id in self._copies

    def is_queued(self, copy_id: int) -> bool:
        """True while the copy's message waits for the engine's own work on its blocks."""
        return self._send_queue.is_queued(copy_id)

    def give_up(self, copy_ids: Sequence[int]) -> None:
        """Cancel the copies of one load before their deadline, and count one timeout: the engine waits no longer."""
        copies = [copy for copy_id in copy_ids if (copy := self._copies.get(copy_id)) is not None]
        for copy in copies:
            copy.given_up = min(copy.given_up, time.monotonic())
            copy.cancel()
            copy.timed_out = True
        self._count_timeout(copies)

    def answer_for_loads(self, plan: StepPlan) -> None:
        """Fail the loads of this step that start_loads did not begin: their requests wait for them."""
        for load in plan.loads:
            if load.copy_id not in self._copies:
                with self._faults.guarded("failing a load"):
                    self._part_ended(load, failed=True)

    def start_stores(self, plan: StepPlan) -> None:
        for store in plan.stores:
            self._begin(store, self._settings.store_timeout_ms)

    def answer_for_stores(self, plan: StepPlan) -> None:
        """Report the stores of this step that start_stores did not begin: the scheduler half has pinned their blocks."""
        for store in plan.stores:
            if store.copy_id not in self._copies:
                self._report.ended_stores.append(store.copy_id)
                self._report.incomplete_stores.append(store.copy_id)
                self.counters["store_failures"] += 1

    def _begin(self, spec: LoadSpec | StoreSpec, timeout_ms: float) -> None:
        """Arm a word and send. If that fails, there is no copy in flight, and the caller must report the end all the same."""
        with self._faults.guarded(f"beginning of a {spec.kind}"):
            session = self._usable()
            if session is None or session.words is None or not self._free_words:
                self.counters["unsent"] += 1
                return
            now = time.monotonic()
            copy = Copy(spec, session, self._free_words.pop(), now, now + timeout_ms / 1000)
            session.words.arm(copy.word, spec.copy_id)
            sent = False
            try:
                sent = self._send_queue.post(self._message(copy), spec.step if isinstance(spec, StoreSpec) else None)
            finally:
                # What cannot be cancelled runs: the message was sent, and then the queue raised.
                if sent or not copy.move(State.PENDING, State.CANCELLED):
                    self._copies[spec.copy_id] = copy
                else:
                    self._free_words.append(copy.word)
                    self.counters["unsent"] += 1

    def _message(self, copy: Copy) -> Message:
        spec = copy.spec
        fields: dict[str, Any] = {
            "boot_id": copy.session.hello.boot_id,
            "registration": copy.session.registration,
            "chunk_blocks": spec.chunk_blocks,
            "keys": spec.keys,
            "block_ids": spec.block_ids,
            "word": copy.word,
            "sequence": spec.copy_id,
            "deadline_ns": int(copy.deadline * 1e9),
            "variant": spec.variant,
        }
        if isinstance(spec, LoadSpec):  # the daemon explains requests by their loads
            return Retrieve(
                **fields, skip_blocks=spec.skip_blocks, request_id=spec.request_id,
                group=spec.group, tokens=spec.tokens, messages=spec.copies, durability=spec.durability,
            )  # fmt: skip
        named = spec.request_id if copy.session.hello.traces else ""
        contents = spec.contents if self._rank.number == 0 else None
        return Store(
            **fields, request_id=named, contents=contents,
            group=spec.group, dropped=spec.dropped, first_chunk=spec.first_chunk, after=spec.after,
            durability=spec.durability, session_id=spec.session_id, session_salt=spec.session_salt,
            tenant=spec.tenant,
        )  # fmt: skip

    # ---- copies end ---------------------------------------------------------------------------

    def poll(self, idle: bool) -> None:
        """Check every copy in flight. A fault in one copy or in the link keeps no other copy from its end."""
        if not self._copies:
            return
        with self._faults.guarded("receiving answers"):
            self._usable()
            if idle:
                self._wait_idle()
            self._receive()
        now = time.monotonic()
        for copy in list(self._copies.values()):
            with self._faults.guarded(f"looking at a {copy.spec.kind}"):
                self._look(copy, now)

    def _wait_idle(self) -> None:
        """Wait for the oldest load by its state word, which the copying thread moves: its reply takes longer. For other copies, for an answer."""
        copies = list(self._copies.values())
        if self._session is None or self._link is None or self._link.breaker.open:
            time.sleep(_IDLE_WAIT_SECONDS)  # only deadlines are left to wait for
        elif loads := [copy for copy in copies if copy.open and isinstance(copy.spec, LoadSpec)]:
            deadline = time.monotonic() + _IDLE_WAIT_SECONDS
            for copy in loads:
                if copy.spec.request_id == loads[0].spec.request_id:
                    copy.wait(deadline - time.monotonic())
        elif any(copy.open or copy.writing for copy in copies):
            self._send_queue.wait(_IDLE_WAIT_SECONDS)

    def _look(self, copy: Copy, now: float) -> None:
        """Report the copy's end if it has ended; cancel it if it is late, and look again."""
        spec = copy.spec
        try:
            state = copy.state()
        except Exception as error:
            self._faults.count(f"looking at a {spec.kind}", error)
            state = State.RUNNING  # perhaps it is
        ended, late = copy.session.ended.is_set(), now - copy.deadline
        if isinstance(spec, StoreSpec):
            action = store_action(state, session_ended=ended, seconds_late=late, timed_out=copy.timed_out)
        else:
            action = load_action(
                state,
                session_ended=ended,
                seconds_late=late,
                timed_out=copy.timed_out,
                seconds_given_up=now - copy.given_up,
                quarantined=copy.quarantined,
                may_quarantine=self._fails_requests,
            )
        if action is Action.WAIT:
            return
        if action is Action.TIME_OUT:
            self._time_out(copy)
            self._look(copy, now)
        elif isinstance(spec, StoreSpec):
            self._store_ended(copy, spec, None)
        elif action is Action.QUARANTINE:
            copy.quarantined = True
            self._report.quarantined.append((spec.copy_id, [i for i in ids_of(spec) if i != NULL_BLOCK]))
            self._part_ended(spec, failed=True)
        else:
            self._load_ended(copy, spec, action)

    def _time_out(self, copy: Copy) -> None:
        copy.timed_out = True
        copy.cancel()
        self._count_timeout([copy])

    def _count_timeout(self, copies: Sequence[Copy]) -> None:
        if self._link is None or all(self._send_queue.is_queued(copy.spec.copy_id) for copy in copies):
            return  # no message was sent
        self.counters["timeouts"] += 1
        self._link.breaker.timed_out()

    def _store_ended(self, copy: Copy, spec: StoreSpec, answer: Reply | NotSent | None) -> None:
        """The blocks may be overwritten: the server publishes nothing that it reads from now on."""
        self._forget(copy)
        self._report.ended_stores.append(spec.copy_id)
        if not isinstance(answer, Stored) or answer.starved or answer.declined:
            self._report.incomplete_stores.append(spec.copy_id)
        if isinstance(answer, Stored):
            if answer.stored:
                self._report.copied.append((spec.copy_id, answer.stored))
            self.count_copy(copy, answer.stored * spec.chunk_blocks * self._rank.positions[spec.group].bytes)
        else:
            self.counters["store_failures"] += 1

    def _load_ended(self, copy: Copy, spec: LoadSpec, action: Action) -> None:
        """The server no longer writes the load's blocks. First it is forgotten: an engine may die of a load that ends twice."""
        self._forget(copy)
        if action is Action.RELEASE:
            self._report.released.append(spec.copy_id)
        elif action is Action.FINISH:
            size = self._rank.positions[spec.group]
            self._part_ended(spec, failed=False)
            self.count_copy(copy, len(ids_of(spec)) // size.blocks * size.bytes)
        else:
            self._part_ended(spec, failed=True)

    def _forget(self, copy: Copy) -> None:
        del self._copies[copy.spec.copy_id]
        if copy.session is self._session:
            self._free_words.append(copy.word)

    def _part_ended(self, spec: LoadSpec, *, failed: bool) -> None:
        """First what must be reported with the load's end, then the end, then the counts."""
        any_failed = self.load_ends.part_ended(spec, failed=failed)
        if any_failed:
            self._report.failed_loads.append(spec.request_id)
        if any_failed is not None:
            self.counters["load_failures" if any_failed else "loaded"] += 1

    def _receive(self) -> None:
        """Process every answer. A store's answer is its end: only then can its chunks be found."""
        if self._session is None or self._link is None:
            return
        for copy_id, answer in self._send_queue.receive():
            with self._faults.guarded("an answer"):
                copy = self._copies.get(copy_id)
                if copy is not None and isinstance(copy.spec, StoreSpec):
                    self._store_ended(copy, copy.spec, answer)
                elif copy is not None and isinstance(answer, Error):
                    # Refused before the server knew the word: the worker must end the copy.
                    copy.move(State.PENDING, State.CANCELLED)
                if isinstance(answer, NotSent):
                    self._not_sent(answer)
                else:
                    self._link.breaker.answered()
                if isinstance(answer, Error):
                    self._refused(answer)

    def count_copy(self, copy: Copy, copied: int) -> None:
        """A load or a store that completed, and its bytes."""
        self._seconds.setdefault(f"{copy.spec.kind}_seconds", []).append(time.monotonic() - copy.began)
        self.counters[f"{copy.spec.kind}_bytes"] += copied

    def _not_sent(self, answer: NotSent) -> None:
        self.counters[f"not_sent_{answer.reason}"] += 1
        self.counters["unsent"] += answer.reason != "cancelled"
        if answer.error is not None:
            with self._faults.guarded("waiting for the engine's own work"):
                raise answer.error

    def _refused(self, error: Error) -> None:
        self.counters[f"refused_{error.code}"] += 1
        if self.counters[f"refused_{error.code}"] == 1:
            log.warning("kvserver refused or ended a copy: %s: %s", error.code, error.message)

    # ---- what the engine collects ----------------------------------------------------------------

    def take_seconds(self) -> dict[str, list[float]]:
        """Durations of the copies that completed after the last call, by "load_seconds" and "store_seconds"."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def take_report(self, step: int = 0) -> StepReport | None:
        """The report of this step: events since the last call. None if there is nothing to report."""
        self._report.step, self._report.wakes = step, ASLEEP if self._asleep else self._wakes
        if not self._report:
            return None
        report, self._report = self._report, StepReport()
        return report

    @property
    def cache_status(self) -> CacheStatus:
        return self._link.cache_status if self._link is not None else CacheStatus("asleep", "the KV cache was given up")

    # ---- registered memory --------------------------------------------------------------------

    def detach(self, seconds: float) -> bool:
        """Cancel every copy and unregister; without cache from then on, until attach(). Whether the memory may be freed.

        Waits `seconds` at most for the server to close its mappings: from then on it neither reads nor writes. If it has
        not, the memory may be freed unless a load may still write. May be called again.
        """
        for copy in self._copies.values():
            with self._faults.guarded("cancelling a copy"):
                copy.cancel()
        if self._link is not None:
            self._leaving.append(self._link)
            self._link, self._asleep = None, True
        deadline = time.monotonic() + seconds
        for link in list(self._leaving):
            with self._faults.guarded("ending the connection"):
                if link.stop(max(0, deadline - time.monotonic())):
                    self._leaving.remove(link)
        self._adopt(None)
        if any(copy.writing for copy in self._copies.values() if isinstance(copy.spec, LoadSpec)):
            return False
        if self._leaving:
            log.warning(
                "kvserver did not close its mappings of the KV cache within %.1f s; the memory stays in use until it does",
                seconds,
            )
        return True

    def attach(self, link: Link) -> None:
        """Continue with this link after sleep. REQUIRES: detached."""
        self._link, self._asleep = link, False
        self._wakes += 1

    def shut(self) -> None:
        try:
            self.detach(_SHUT_SECONDS)
        finally:
            self._send_queue.close()

    # ---- inside -------------------------------------------------------------------------------

    def _usable(self) -> Session | None:
        """The session to send to; adopts a new one when the link has it."""
        if self._link is None:
            return None
        usable, current = self._link.usable(), self._link.session
        if current is not self._session:
            self._adopt(current)
        return usable if usable is current else None  # the link's thread may change it between the two reads

    def _adopt(self, session: Session | None) -> None:
        self._send_queue.adopt(session)
        self._session = session
        self._free_words = list(range(WORDS)) if session is not None else []
