"""Reads the KV events that engines publish themselves: one thread, a subscription for each engine.

Owns: the subscriptions and their turns. Refuses to know: how one engine is read (`engine_subscription`).

A turn reads a bounded number of messages, and a replay without messages ends after a while, so an engine that floods or
hangs does not delay the others. Messages that are not read in time are dropped by ZMQ at the engine, and replayed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from typing import TypeAlias

import zmq

from kvserver._native import PrefixIndex
from kvserver.protocol import DescribeScheduler
from kvserver.protocol.kv_status import EngineEventsStatus
from kvserver.routing.engine_stream import NoOwner
from kvserver.routing.engine_subscription import DescribePages, EngineSubscription, Socket, unreadable

log = logging.getLogger(__name__)

_Described: TypeAlias = tuple[DescribeScheduler, tuple[int, ...]]  # and a KV cache group of each object group
_NO_OWNER = "the index of POST /kv/match has too few free owners, of 64"
_CLOSE_SECONDS = 2.0  # for the turn of the thread that is under way


class EngineEvents:
    """Subscriptions to all engines.

    REQUIRES: follow_engine(), forget_engine() and close() are not called at once; any thread may call the rest.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.describe: DescribePages | None = None  # set before the first engine is followed
        self._subscriptions: dict[str, EngineSubscription] = {}  # changed by the thread only
        self._refused: dict[str, str] = {}
        self._without_owners: dict[str, _Described] = {}  # until the index has free ones; changed by the thread only
        self._orders: queue.SimpleQueue[tuple[str, _Described | None] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def follow_engine(self, scheduler: DescribeScheduler, members: tuple[int, ...] = ()) -> None:
        """Subscribe with this description, in place of an earlier one. Never connects to an endpoint on another machine.

        `members`: a KV cache group of each object group; (): there is one object group.
        """
        self._refused.pop(scheduler.instance_id, None)
        if not scheduler.events_endpoint:
            self.forget_engine(scheduler.instance_id)
        elif reason := unreadable(scheduler.events_endpoint):
            self.forget_engine(scheduler.instance_id)
            self._refused[scheduler.instance_id] = reason
        else:
            self._order(scheduler.instance_id, (scheduler, members))

    def forget_engine(self, instance_id: str) -> None:
        self._refused.pop(instance_id, None)
        if self._thread is not None:
            self._order(instance_id, None)

    def index_owners(self, instance_id: str) -> tuple[int, ...]:
        """The owner of the blocks of each object group in the index, -1 if it has none; () without a subscription."""
        subscription = self._subscriptions.get(instance_id)
        return subscription.blocks.owners if subscription is not None else ()

    def status(self, instance_id: str) -> EngineEventsStatus | None:
        """Status of the engine's events; None if the engine publishes none."""
        if reason := self._refused.get(instance_id):
            return EngineEventsStatus(state="refused", reason=reason)
        if instance_id in self._without_owners:
            return EngineEventsStatus(state="refused", reason=_NO_OWNER)
        subscription = self._subscriptions.get(instance_id)
        return subscription.status() if subscription is not None else None

    def close(self) -> None:
        if self._thread is not None:
            self._orders.put(None)
            os.eventfd_write(self._wake, 1)
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                return  # it still uses the eventfd
        os.close(self._wake)

    def _order(self, instance_id: str, described: _Described | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)
            self._thread.start()
        self._orders.put((instance_id, described))
        os.eventfd_write(self._wake, 1)

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context[Socket](io_threads=1)
        more = False
        while self._obey(context):
            now = time.monotonic()
            waits = [f.waits_for(now) for f in self._subscriptions.values() if not f.failure]
            until = min((end for _, end in waits), default=now + 1.0)
            sockets = [(socket, zmq.POLLIN) for socket, _ in waits if socket is not None]
            zmq.zmq_poll([(self._wake, zmq.POLLIN), *sockets], 0 if more else max(0, int((until - now) * 1000) + 1))
            now = time.monotonic()
            more = False
            for subscription in self._subscriptions.values():
                more |= not subscription.failure and self._turn(subscription, now)
        for subscription in self._subscriptions.values():
            subscription.close()
        context.destroy(0)

    def _turn(self, subscription: EngineSubscription, now: float) -> bool:
        try:
            return subscription.read_turn(now)
        except Exception as error:
            subscription.failure = f"{type(error).__name__}: {error}"
            subscription.close()
            name = subscription.scheduler.instance_id
            log.exception("stopped reading the KV events of %s", name, extra={"instance_id": name})
            return False

    def _obey(self, context: zmq.Context[Socket]) -> bool:
        """Carry out the queued orders. False: end the thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._orders.empty():
            order = self._orders.get()
            if order is None:
                return False
            instance_id, described = order
            self._without_owners.pop(instance_id, None)
            present = self._subscriptions.get(instance_id)
            if present is not None and described is not None and _same_stream(present, *described):
                continue
            if present is not None:
                del self._subscriptions[instance_id]
                present.close()
            if described is not None:
                self._subscribe(context, *described)
        for waiting in list(self._without_owners.values()):
            self._subscribe(context, *waiting)
        return True

    def _subscribe(self, context: zmq.Context[Socket], scheduler: DescribeScheduler, members: tuple[int, ...]) -> None:
        name, at = scheduler.instance_id, scheduler.events_endpoint
        try:
            subscription = EngineSubscription(context, self._index, scheduler, members, self.describe)
        except NoOwner:
            if name not in self._without_owners:
                log.warning(
                    "routers do not find what %s has in its own memory: %s",
                    name,
                    _NO_OWNER,
                    extra={"instance_id": name},
                )
            self._without_owners[name] = scheduler, members
            return
        self._without_owners.pop(name, None)
        try:
            subscription.connect()
        except zmq.ZMQError as error:
            subscription.close()
            log.warning(
                "cannot subscribe to the KV events of %s at %s: %s", name, at, error, extra={"instance_id": name}
            )
            self._refused[name] = str(error)
        else:
            self._subscriptions[name] = subscription


def _same_stream(present: EngineSubscription, scheduler: DescribeScheduler, members: tuple[int, ...]) -> bool:
    names = ("incarnation", "groups", "events_endpoint", "events_replay_endpoint", "events_topic")
    same = all(getattr(present.scheduler, name) == getattr(scheduler, name) for name in names)
    return same and present.members == members
