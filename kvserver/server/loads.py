"""Loads: from a message to a ticket, and from the ticket's end to a reply."""

from __future__ import annotations

from dataclasses import dataclass

from kvserver.cache import Cache
from kvserver.copy import Completion
from kvserver.engines import LoadTicket, Respond, Worker
from kvserver.events import Bus, ChunksLoaded
from kvserver.protocol import Retrieve, Retrieved
from kvserver.server.copies import Copies, failure
from kvserver.server.copy_checks import group_of, load_blocks
from kvserver.server.serving import Serving
from kvserver.tiering import Storage


@dataclass
class Loads:
    cache: Cache
    copies: Copies
    bus: Bus
    storage: Storage
    serving: Serving

    def begin(self, request: Retrieve, respond: Respond) -> None:
        """Queue the copy, or raise KVServerError after failing its state word. REQUIRES: the boot id was checked."""
        worker = self.copies.worker_of(request)
        try:
            self._copy(request, respond, worker)
        except Exception as error:
            self.copies.refuse(request, worker, error)
            raise

    def _copy(self, request: Retrieve, respond: Respond, worker: Worker) -> None:
        chunks = self.copies.namespace_of(request, worker)
        group = group_of(request, worker)
        namespace = group.namespace(chunks)
        blocks = load_blocks(request, group)
        arrived_ns = self.copies.now_ns()
        found = self.cache.plan_load(namespace, request.keys, group.number)
        self.copies.counts_of(worker).loads += 1
        self.storage.loading((worker.spec.instance_id, request.request_id))
        ticket = LoadTicket(request, respond, worker, group, namespace, blocks, found, arrived_ns)
        try:
            self.copies.submit(ticket, request.skip_blocks)
        except BaseException:
            self.cache.finish_load(found, copied=False)
            raise

    def ended(self, ticket: LoadTicket, completion: Completion) -> None:
        self.cache.finish_load(ticket.chunks, completion.done)
        self.copies.ended(ticket, completion, completion.done)
        if not completion.done:
            ticket.respond(failure(completion))
            return
        instance_id, model_name, rank = ticket.worker.identity
        if rank == 0 and not ticket.group.layout.tails:  # the ranks of an engine load the same chunks
            keys = ticket.request.keys
            self.bus.publish(
                ChunksLoaded(
                    self.copies.now_ns(),
                    instance_id,
                    model_name,
                    ticket.namespace,
                    keys,
                    ticket.group.objects,
                ),
                len(keys),
            )
            if (of_l2 := self.copies.coverage_in_l2(ticket)) is not None:
                self.storage.loaded(ticket.namespace, *of_l2, ticket.chunks, self.serving.takes_stores)
        ticket.respond(Retrieved(chunks=len(ticket.chunks)))
