"""Loads: from a message to a ticket, and from the ticket's end to a reply."""

from __future__ import annotations

from kvserver.cache import Cache
from kvserver.copy import Completion
from kvserver.events import Bus, ChunksLoaded
from kvserver.protocol import Retrieve, Retrieved
from kvserver.server.copies import Copies, failure
from kvserver.server.copy_checks import load_blocks
from kvserver.server.instances import Worker
from kvserver.server.tickets import LoadTicket, Respond


class Loads:
    def __init__(self, cache: Cache, copies: Copies, bus: Bus) -> None:
        self._cache = cache
        self._copies = copies
        self._bus = bus

    def begin(self, request: Retrieve, respond: Respond) -> None:
        """Queue the copy, or raise KVServerError after failing its state word. REQUIRES: the boot id was checked."""
        worker = self._copies.worker_of(request)
        try:
            self._copy(request, respond, worker)
        except Exception as error:
            self._copies.refuse(request, worker, error)
            raise

    def _copy(self, request: Retrieve, respond: Respond, worker: Worker) -> None:
        namespace = self._copies.namespace_of(request, worker)
        blocks = load_blocks(request, worker)
        arrived_ns = self._copies.now_ns()
        found = self._cache.plan_load(namespace, request.keys)
        self._copies.counts_of(worker).loads += 1
        ticket = LoadTicket(request, respond, worker, namespace, blocks, found, arrived_ns)
        try:
            self._copies.submit(ticket, request.skip_blocks)
        except BaseException:
            self._cache.finish_load(found, copied=False)
            raise

    def ended(self, ticket: LoadTicket, completion: Completion) -> None:
        self._cache.finish_load(ticket.chunks, completion.done)
        self._copies.ended(ticket, completion, completion.done)
        if not completion.done:
            ticket.respond(failure(completion))
            return
        spec, keys = ticket.worker.spec, ticket.request.keys
        if spec.rank == 0:  # the ranks of an engine load the same chunks
            self._bus.publish(
                ChunksLoaded(self._copies.now_ns(), spec.instance_id, spec.model_name, ticket.namespace, keys),
                len(keys),
            )
        ticket.respond(Retrieved(chunks=len(ticket.chunks)))
