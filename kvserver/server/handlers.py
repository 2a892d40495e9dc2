"""Handlers of requests: one match arm per request.

Refuses to know: frames, sockets, polling (`loop`); what a lookup (`lookups`), a copy (`stores`, `loads`) or a worker (`workers`)
needs. Runs in the loop thread; nothing here blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from kvserver import __version__
from kvserver.engines import EngineReports, Instances, Respond, Workers
from kvserver.kv_events import Feed
from kvserver.protocol import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    REGISTERED,
    SERVING_OFF,
    AwaitFill,
    Clear,
    Cleared,
    DescribeScheduler,
    EndRequest,
    EngineLoad,
    Error,
    ErrorCode,
    Heartbeat,
    Hello,
    HelloReply,
    KVEventsTaken,
    KVServerError,
    Lookup,
    LookupReply,
    LookupTail,
    RegisterWorker,
    Reply,
    ReportBlockAllocations,
    Request,
    Retrieve,
    Store,
    TakeKVEvents,
    UnregisterWorker,
)
from kvserver.server.clears import ClearRefusal, ClearRequest, Clears
from kvserver.server.copy_checks import check_chunk, check_tail, chunk_count
from kvserver.server.loads import Loads
from kvserver.server.lookups import L1Lookups
from kvserver.server.pins import Pins
from kvserver.server.serving import Serving
from kvserver.server.store_waits import StoreWaits
from kvserver.server.stores import Stores
from kvserver.server.upkeep import Upkeep
from kvserver.tiering import Storage


@dataclass
class Handlers:
    """Dispatch of requests to parts. `hello`: the reply to every Hello, but for the version and the standing of its instance."""

    hello: HelloReply
    instances: Instances
    workers: Workers
    lookups: L1Lookups
    stores: Stores
    loads: Loads
    storage: Storage
    store_waits: StoreWaits
    reports: EngineReports
    upkeep: Upkeep
    feed: Feed
    serving: Serving

    def handle(self, request: Request, respond: Respond) -> None:
        """Answer now, or later when a ticket completes; notices only on error. KVServerError is the caller's to send.

        All requests but Status, which needs the server's own state.
        """
        match request:
            case Lookup():
                reply = self.lookups.answer(request)
                if request.pin_seconds:
                    self._pin(request)
                respond(reply)
            case LookupTail():
                respond(self.lookups.answer_tail(request))
            case AwaitFill():
                self._await_fill(request, respond)
            case Store():
                self._check_boot(request.boot_id)
                self.stores.begin(request, respond)
            case Retrieve():
                self._check_boot(request.boot_id)
                self.loads.begin(request, respond)
            case ReportBlockAllocations():
                self.reports.add_block_report(request)
            case EndRequest():
                self.instances.instance(request.instance_id, request.incarnation)  # another's request goes on
                owner = (request.instance_id, request.request_id)
                of_fills = self.storage.ended(owner)  # which may begin to wait for stores
                self.store_waits.end(owner)
                self.lookups.complete(owner)
                self.reports.end_request(request, of_fills)
                Pins(self.upkeep).request_ended(*owner)
            case DescribeScheduler():
                self.reports.describe_scheduler(request)
            case EngineLoad():
                self.reports.add_engine_stats(request)
            case TakeKVEvents():
                respond(self._take_kv_events(request))
            case Heartbeat():
                self._check_boot(request.boot_id)
            case Hello():
                respond(self._hello(request))
            case RegisterWorker():
                self.workers.register(request, respond)
            case UnregisterWorker():
                self._check_boot(request.boot_id)
                self.workers.unregister(request, respond)
            case Clear():
                self._clear(request, respond)

    def _pin(self, request: Lookup) -> None:
        instance = self.instances.instance(request.instance_id, request.incarnation)
        if (namespace := instance.namespace_of(request.variant)) is not None:
            Pins(self.upkeep).pin_request(namespace, instance.model_name, request)

    def _await_fill(self, request: AwaitFill, respond: Respond) -> None:
        lookup = request.lookup
        instance = self.instances.instance(lookup.instance_id, lookup.incarnation)
        spec = instance.any_worker().spec
        check_chunk(lookup.chunk_blocks, spec)
        check_tail(lookup.tail_keys, spec)
        if lookup.keys or not lookup.tail_keys:
            chunk_count(lookup.keys)
        if self.serving.why_nothing_is_found:  # since its lookup
            respond(LookupReply(0))
            return
        due_ns = int(self.upkeep.clock() * 1e9) + request.wait_ms * 1_000_000
        namespace = instance.namespace_of(lookup.variant) or b""

        def answer(reply: Reply) -> None:
            self.lookups.complete((lookup.instance_id, lookup.request_id))
            respond(reply)

        def filled(reply: Reply) -> None:
            """Wait for stores once L2 has been read."""
            l2_tokens = reply.l2_chunks * spec.chunk_tokens if isinstance(reply, LookupReply) else 0
            if not self.store_waits.begin(
                namespace, lookup, due_ns, lambda: answer(self.lookups.answer_again(lookup, l2_tokens))
            ):
                answer(reply)

        promised = 0
        if (given := lookup.handed_over) is not None and given.instance_id not in self.instances.by_id:
            promised = given.tokens // spec.chunk_tokens  # by another daemon's engine
        self.storage.begin(request, instance, filled, self.lookups.answer_again, promised)

    def _hello(self, request: Hello) -> HelloReply:
        if not OLDEST_PROTOCOL_VERSION <= request.protocol_version <= PROTOCOL_VERSION:
            raise KVServerError(
                ErrorCode.VERSION_MISMATCH,
                f"the client speaks protocol {request.protocol_version}, server {__version__} speaks "
                f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
            )
        standing, text = self.workers.registration_state(request.instance_id, request.incarnation)
        if standing == REGISTERED and (why := self.serving.why_nothing_is_found):
            standing, text = SERVING_OFF, why
        return replace(self.hello, protocol_version=request.protocol_version, standing=standing, standing_text=text)

    def _take_kv_events(self, request: TakeKVEvents) -> KVEventsTaken:
        instance = self.instances.instance(request.instance_id, request.incarnation)
        if instance.description is None:
            raise KVServerError(
                ErrorCode.NOT_READY, f"instance {request.instance_id!r} was not described; send DescribeScheduler first"
            )
        return self.feed.take_kv_events(request)

    def _clear(self, request: Clear, respond: Respond) -> None:
        """The rule is that of `POST /cache/clear` (`clears`)."""
        if request.instance_id:
            instance = self.instances.by_id.get(request.instance_id)
            if instance is None:
                raise KVServerError(ErrorCode.UNKNOWN_INSTANCE, f"instance {request.instance_id!r} is not registered")
            if instance.namespace is None:
                respond(Cleared(chunks=0))
                return

        def done(chunks: int, failure: str) -> None:
            respond(Error(code=ErrorCode.STORAGE.value, message=failure) if failure else Cleared(chunks=chunks))

        outcome = Clears(self.upkeep).clear(ClearRequest(request.instance_id, shared=request.shared), done)
        if isinstance(outcome, ClearRefusal):
            hint = "; send Clear with shared=true to clear it for all of them" if outcome.code == "shared" else ""
            raise KVServerError(ErrorCode(outcome.code), outcome.message + hint)

    def _check_boot(self, boot_id: str) -> None:
        if boot_id != self.hello.boot_id:
            raise KVServerError(
                ErrorCode.STALE_BOOT,
                f"meant for boot {boot_id!r}, this is {self.hello.boot_id!r}; register again",
            )
