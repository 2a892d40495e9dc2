"""The worker half: registers the KV cache, sends copies, watches their state words.

Owns: the copies in flight of one rank. Refuses to know: requests' tokens and the scheduler's state.
Runs on the engine's worker thread. Its only waits: `settle_ms` per step for stores whose blocks are
about to be overwritten, one millisecond in a step that computes nothing, and detach().

A message may stay in the send queue until the engine's own work on its blocks is done: it is PENDING until then.

Who may still write after a wait ended (DESIGN's rule 1):
- store: the server only reads; what it read it does not publish after our CANCELLED, nor after the deadline.
- load, PENDING -> CANCELLED: no process, the server never began and will not.
- load, RUNNING: the server, until DONE, until it acknowledged CANCELLING by CANCELLED, or until its
  process has ended. Until then the blocks stay quarantined: failed for the request, and unused.

What happens in any case, also after an exception: stores whose blocks are overwritten are cancelled, each copy of a
plan is answered for, each copy in flight is checked. A fault in one copy is that copy's alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvserver.adapters.common.cache_status import CacheStatus
from kvserver.adapters.common.copies import Copy
from kvserver.adapters.common.link import Link, Session
from kvserver.adapters.common.send_queue import Message, NotSent, SendQueue
from kvserver.adapters.common.specs import LoadSpec, StoreSpec
from kvserver.adapters.vllm.metadata import NULL_BLOCK, StepPlan, StepReport
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.stats import KVServerStats

from kvserver._native import State, pack_blocks
from kvserver.protocol import Error, Reply, Retrieve, Store, Stored

log = logging.getLogger("vllm.kvserver")

WORDS = 4096  # copies in flight at once
_IDLE_WAIT_SECONDS = 0.001
_SHUT_SECONDS = 1.0
_CANCEL_GRACE_SECONDS = 0.25  # how long a cancelled load may take to be acknowledged before quarantine


def _beginning(spec: LoadSpec | StoreSpec) -> str:
    return f"beginning of a {'load' if isinstance(spec, LoadSpec) else 'store'}"


class WorkerHalf:
    def __init__(
        self,
        settings: AdapterSettings,
        link: Link | None,
        send_queue: SendQueue,
        *,
        fails_requests: bool,
        stores: bool = True,
        group_bytes: Sequence[int] = (0,),
        sends_contents: bool = True,
        fault: Callable[[str, Exception], None],
    ) -> None:
        """`link` is None when this worker runs without cache; it still reports the end of every load it is given.

        `fails_requests`: vLLM treats a failed load as a failure of the whole request, frees its blocks and starts again, rather
        than computing the failed blocks in place. Only that is right where a window's null blocks lie before them,
        and only then can blocks be kept out of use.
        `stores` is False for a rank whose KV rank 0 stores; `sends_contents` for all but rank 0.
        `group_bytes`: the size of a block of each KV cache group, to count copied bytes.
        `fault` counts and logs an exception: (where, which).
        """
        self.counters: Counter[str] = Counter()
        self.stats = KVServerStats()
        self._group_bytes = group_bytes
        self._settings = settings
        self._link = link
        self._leaving: list[Link] = []  # after detach(), until the server has closed its mappings
        self._send_queue = send_queue
        self._fails_requests = fails_requests
        self._stores_own = stores
        self._sends_contents = sends_contents
        self._fault = fault
        self._session: Session | None = None
        self._free_words: list[int] = []
        self._sequences = itertools.count(1)
        self._loads: dict[int, Copy] = {}  # by load id
        self._stores: dict[int, Copy] = {}  # by store id
        self._by_sequence: dict[int, Copy] = {}  # of this session, without an answer so far
        self._report = StepReport()
        self._finished: set[str] = set()
        self._failed: set[str] = set()  # of those, failed as a whole
        self._invalid: set[int] = set()

    # ---- before the forward -------------------------------------------------------------------

    def end_overwritten_stores(self, plan: StepPlan) -> None:
        """End the stores whose blocks this step overwrites: wait a little, then cancel."""
        waiting = [self._stores[i] for i in plan.overwritten_stores if i in self._stores]
        try:
            self._wait_for(waiting)
        finally:
            # Cancelling needs the state words only. A store that went on would publish what this step's forward writes.
            for copy in waiting:
                with self._guarded("cancelling a store"):
                    self.counters["stores_cancelled_for_reuse"] += copy.cancel()

    def _wait_for(self, stores: list[Copy]) -> None:
        if not stores:
            return
        deadline = time.monotonic() + (self._settings.settle_ms / 1000 if self._usable() is not None else 0)
        while any(copy.open for copy in stores) and (left := deadline - time.monotonic()) > 0:
            self._send_queue.wait(left)
            self._receive()

    # ---- copies begin -------------------------------------------------------------------------

    def start_loads(self, plan: StepPlan) -> None:
        for load_id in plan.abort_loads:
            if (aborted := self._loads.get(load_id)) is not None:
                with self._guarded("aborting a load"):
                    aborted.cancel()
        for load in plan.loads:
            if load.keys and (copy := self._begin(load, self._settings.load_timeout_ms)) is not None:
                self._loads[load.load_id] = copy

    def answer_for_loads(self, plan: StepPlan) -> None:
        """Fail the loads of this step that start_loads did not begin: their requests wait for them."""
        for load in plan.loads:
            if load.load_id not in self._loads:
                with self._guarded("failing a load"):
                    self._load_failed(load, quarantine=False)

    def start_stores(self, plan: StepPlan) -> None:
        for store in plan.stores if self._stores_own else ():
            if (copy := self._begin(store, self._settings.store_timeout_ms)) is not None:
                self._stores[store.store_id] = copy

    def answer_for_stores(self, plan: StepPlan) -> None:
        """Report the stores of this step that start_stores did not begin: the scheduler half guards their blocks."""
        for store in plan.stores:
            if store.store_id not in self._stores:
                self._report.ended_stores.append(store.store_id)
                if self._stores_own:
                    self.stats.add("store_failures")

    def _begin(self, spec: LoadSpec | StoreSpec, timeout_ms: float) -> Copy | None:
        """None if the copy cannot begin, for lack of a server or by a fault. The caller must report its end all the same."""
        try:
            return self._send(spec, timeout_ms)
        except Exception as error:
            self._fault(_beginning(spec), error)
            return None

    def _send(self, spec: LoadSpec | StoreSpec, timeout_ms: float) -> Copy | None:
        """Arm a word and send; None if there is no server to send to."""
        session = self._usable()
        if session is None or session.words is None or not self._free_words:
            self.counters["unsent"] += 1
            return None
        now = time.monotonic()
        copy = Copy(spec, session, self._free_words.pop(), next(self._sequences), now, now + timeout_ms / 1000)
        session.words.arm(copy.word, copy.sequence)
        posted = False
        try:
            posted = self._send_queue.post(self._message(copy))
        except Exception as error:
            self._fault(_beginning(spec), error)
            posted = not copy.move(
                State.PENDING, State.CANCELLED
            )  # the message was sent all the same, and the copy runs
        if not posted:
            self._free_words.append(copy.word)
            self.counters["unsent"] += 1
            return None
        self._by_sequence[copy.sequence] = copy
        return copy

    def _message(self, copy: Copy) -> Message:
        spec = copy.spec
        fields: dict[str, Any] = {
            "boot_id": copy.session.hello.boot_id,
            "registration": copy.session.registration,
            "chunk_blocks": spec.chunk_blocks,
            "keys": spec.keys,
            "block_ids": pack_blocks(array("I", spec.block_ids).tobytes()),
            "word": copy.word,
            "sequence": copy.sequence,
            "deadline_ns": int(copy.deadline * 1e9),
            "variant": spec.variant,
        }
        if isinstance(spec, LoadSpec):  # the daemon explains requests by their loads
            return Retrieve(**fields, skip_blocks=spec.skip_blocks, request_id=spec.request_id)
        named = spec.request_id if copy.session.hello.traces else ""
        return Store(**fields, request_id=named, contents=spec.contents if self._sends_contents else None)

    # ---- copies end ---------------------------------------------------------------------------

    def poll(self, idle: bool) -> None:
        """Check every copy in flight. A fault in one copy or in the link keeps no other copy from its end."""
        if not (self._loads or self._stores):
            return
        with self._guarded("receiving answers"):
            self._usable()
            self._receive()
            if idle:
                self._wait_idle()
        now = time.monotonic()
        for store_id, copy in list(self._stores.items()):
            over = now > copy.deadline  # also if checking it fails: the server will not publish it
            with self._guarded("looking at a store"):
                over = self._store_over(copy, now)
            if over:
                del self._stores[store_id]
                self._report.ended_stores.append(store_id)
                self._free_word(copy)
                self.stats.add("store_failures")
        for copy in list(self._loads.values()):
            try:
                self._look_at_load(copy, now)
            except Exception as error:
                self._fault("looking at a load", error)
                self._give_up(copy, now)

    def _wait_idle(self) -> None:
        if self._session is None or self._link is None or self._link.breaker.open:
            time.sleep(_IDLE_WAIT_SECONDS)  # only deadlines are left to wait for
        elif any(copy.open for copy in self._copies()):
            self._send_queue.wait(_IDLE_WAIT_SECONDS)
            self._receive()

    def _copies(self) -> list[Copy]:
        return [*self._stores.values(), *self._loads.values()]

    def _store_over(self, copy: Copy, now: float) -> bool:
        """Ended by its reply (see _receive), by the session's end, by the worker, or by its deadline."""
        if copy.session.ended.is_set() or copy.state() in (State.CANCELLED, State.FAILED):
            return True
        if now > copy.deadline:
            copy.cancel()
            self._timed_out(copy)
            return True
        return False

    def _look_at_load(self, copy: Copy, now: float) -> None:
        state = copy.state()
        if state == State.PENDING and (now > copy.deadline or copy.session.ended.is_set()):
            if copy.move(State.PENDING, State.CANCELLED):
                state = State.CANCELLED
                if not copy.session.ended.is_set():
                    self._timed_out(copy)
            else:
                state = copy.state()
        if state == State.DONE:
            self._load_ended(copy, now, loaded=True)
        elif state in (State.FAILED, State.CANCELLED) or copy.session.ended.is_set():
            self._load_ended(copy, now, loaded=False)
        elif now > copy.deadline:
            copy.cancel()
            self._timed_out(copy)
            self._give_up(copy, now)

    def _load_ended(self, copy: Copy, now: float, loaded: bool) -> None:
        """The server no longer writes the load's blocks. The load leaves the table first: vLLM dies of a load that ends twice."""
        spec = copy.spec
        assert isinstance(spec, LoadSpec)
        del self._loads[spec.load_id]
        if copy.quarantined:
            self._report.released.append(spec.load_id)
        elif loaded:
            self._finished.add(spec.request_id)
            self.counters["loaded"] += 1
            self.stats.ended("load", now - copy.began, self._bytes_of(spec.block_ids))
        else:
            self._load_failed(spec, quarantine=False)
        self._free_word(copy)

    def _give_up(self, copy: Copy, now: float) -> None:
        """Fail the request of a load whose cancel was not acknowledged in time, where its blocks can be kept out of use."""
        if not copy.quarantined and self._fails_requests and now > copy.deadline + _CANCEL_GRACE_SECONDS:
            copy.quarantined = True
            assert isinstance(copy.spec, LoadSpec)
            self._load_failed(copy.spec, quarantine=True)

    def _load_failed(self, spec: LoadSpec, quarantine: bool) -> None:
        """First what must be reported with the load's end, then the end, then the counts."""
        if quarantine:
            self._report.quarantined.append((spec.load_id, [i for i in spec.block_ids if i != NULL_BLOCK]))
        if self._fails_requests:
            self._failed.add(spec.request_id)
        else:
            self._invalid.update(spec.block_ids)
        self._finished.add(spec.request_id)
        self._report.failed_loads.append(spec.request_id)
        self.counters["failed_loads"] += 1
        self.stats.add("load_failures")

    def _timed_out(self, copy: Copy) -> None:
        if copy.timed_out or self._link is None:
            return
        copy.timed_out = True
        if self._send_queue.is_queued(copy.sequence):
            return  # the message was never sent
        self.counters["timeouts"] += 1
        self._link.breaker.timed_out()

    def _free_word(self, copy: Copy) -> None:
        if copy.session is self._session:
            self._free_words.append(copy.word)

    def _receive(self) -> None:
        """Process every answer. A store's answer is its end: only then can its chunks be found."""
        if self._session is None or self._link is None:
            return
        for sequence, answer in self._send_queue.receive():
            with self._guarded("an answer"):
                self._answered(self._by_sequence.pop(sequence, None), answer)

    def _answered(self, copy: Copy | None, answer: Reply | NotSent) -> None:
        if copy is not None and isinstance(copy.spec, StoreSpec):
            if self._stores.pop(copy.spec.store_id, None) is not None:
                self._report.ended_stores.append(copy.spec.store_id)
                self._free_word(copy)
                self._store_answered(copy, answer)
        elif copy is not None and isinstance(answer, Error):
            # Refused before the server knew the word: the worker must end the copy.
            copy.move(State.PENDING, State.CANCELLED)
        if isinstance(answer, NotSent):
            self._not_sent(answer)
        elif self._link is not None:
            self._link.breaker.answered()
        if isinstance(answer, Error):
            self._refused(answer)

    def _store_answered(self, copy: Copy, answer: Reply | NotSent) -> None:
        if isinstance(answer, Stored):
            copied = answer.stored * copy.spec.chunk_blocks * sum(self._group_bytes)
            self.stats.ended("store", time.monotonic() - copy.began, copied)
        else:
            self.stats.add("store_failures")

    def _bytes_of(self, block_ids: list[int]) -> int:
        """The size of these blocks, given in the order of a copy; null blocks are not copied."""
        groups = len(self._group_bytes)
        tables = [block_ids[group::groups] for group in range(groups)]
        return sum(
            (len(ids) - ids.count(NULL_BLOCK)) * size for ids, size in zip(tables, self._group_bytes, strict=True)
        )

    def _not_sent(self, answer: NotSent) -> None:
        self.counters[f"not_sent_{answer.reason}"] += 1
        if answer.error is not None:
            try:
                raise answer.error
            except Exception as error:
                self._fault("waiting for the engine's own work", error)

    def _refused(self, error: Error) -> None:
        self.counters[f"refused_{error.code}"] += 1
        if self.counters[f"refused_{error.code}"] == 1:
            log.warning("kvserver refused or ended a copy: %s: %s", error.code, error.message)

    # ---- what vLLM collects -------------------------------------------------------------------

    def take_finished(self) -> tuple[set[str], set[str]]:
        """(requests whose loads are over, those of them that failed as a whole); each exactly once."""
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed

    def take_invalid_blocks(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport | None:
        if not self._report:
            return None
        report, self._report = self._report, StepReport()
        return report

    @property
    def cache_status(self) -> CacheStatus:
        return self._link.cache_status if self._link is not None else CacheStatus("asleep", "the KV cache was given up")

    # ---- registered memory --------------------------------------------------------------------

    def detach(self, seconds: float) -> bool:
        """Cancel every copy and unregister; without cache from then on, until attach().

        Waits `seconds` at most for the server to close its mappings; True if it has: from then on the server
        neither reads nor writes. May be called again.
        """
        for copy in self._copies():
            with self._guarded("cancelling a copy"):
                copy.cancel()
        if self._link is not None:
            self._leaving.append(self._link)
            self._link = None
        deadline = time.monotonic() + seconds
        for link in list(self._leaving):
            with self._guarded("ending the connection"):
                if link.stop(max(0, deadline - time.monotonic())):
                    self._leaving.remove(link)
        self._adopt(None)
        return not self._leaving

    def attach(self, link: Link) -> None:
        """Continue with this link. REQUIRES: detached."""
        self._link = link

    @property
    def being_written(self) -> bool:
        """Whether the server may still write into the KV cache."""
        return any(copy.writing for copy in self._loads.values())

    def shut(self) -> None:
        try:
            self.detach(_SHUT_SECONDS)
        finally:
            self._send_queue.close()

    # ---- inside -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded(self, where: str) -> Iterator[None]:
        """A fault in the block is counted and logged, and the caller goes on."""
        try:
            yield
        except Exception as error:
            self._fault(where, error)

    def _usable(self) -> Session | None:
        """The session to send to; adopts a new one when the link has it."""
        if self._link is None:
            return None
        current = self._link.session
        if current is not self._session:
            self._adopt(current)
        return self._link.usable()

    def _adopt(self, session: Session | None) -> None:
        self._send_queue.adopt(session)
        self._session = session
        self._by_sequence.clear()
        self._free_words = list(range(WORDS)) if session is not None else []
