"""What workers request of the server, what its clock and its device do meanwhile, and the checks of each step."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.memory import put
from support.slots import pages_of
from support.turns import repeat
from support.worker import packed

from kvserver._native import NO_BLOCK, Direction, Outcome, State
from kvserver.cache import Chunk
from kvserver.protocol import (
    Clear,
    Cleared,
    Durability,
    EndRequest,
    Error,
    ErrorCode,
    Lookup,
    LookupReply,
    Retrieve,
    Retrieved,
    Store,
    Stored,
)

from .engines import CHUNK_TOKENS, Call, Engine, Model, Operation, Position, Rank
from .plain import Entry, Name, needs
from .workers import Workers


class World(Workers):
    """Moved by its public methods; each of them checks what must hold after it."""

    def __init__(self, folder: Path, models: dict[str, Model], pages: int, trouble: float = 0.0) -> None:
        super().__init__(folder, models, pages, trouble)
        self.rng = random.Random(1)
        self.operations: dict[int, Operation] = {}  # by ticket
        self.models: dict[bytes, Model] = {}  # by namespace

    def record(self, name: Name) -> Chunk | None:
        namespace = self.cache.index.find_namespace(name[0])
        return namespace.chunks.get(name[1]) if namespace is not None else None

    def lookup_message(self, engine: Engine, request_id: str, keys: list[bytes], variant: str) -> Lookup:
        return Lookup(
            engine.instance_id, engine.incarnation, request_id, engine.model.chunk_blocks, b"".join(keys), variant,
            durability=self.durability(variant),
        )  # fmt: skip

    def durability(self, variant: str) -> Durability:
        return Durability.PROCESS

    # ---- lookups ------------------------------------------------------------------------------

    def lookup(self, engine: Engine, request_id: str, keys: list[bytes], variant: str) -> int:
        reply = self.answer(self.lookup_message(engine, request_id, keys, variant))
        if not self.registered(engine):
            assert isinstance(reply, Error)
            return 0
        assert isinstance(reply, LookupReply), reply
        if not engine.ready or self.device.lost:
            assert reply.hit_chunks == 0, "a hit that no rank could load"
            return 0
        expected = self.lease_boundary(engine, request_id, keys, variant)
        assert (reply.hit_chunks, reply.full_chunks) == expected, f"{reply}, of what was stored whole {expected}"
        hits = reply.hit_chunks
        self.counts["hits"] += hits
        self.counts[f"hits of {engine.model.name}"] += hits
        return hits

    def lease_boundary(self, engine: Engine, request_id: str, keys: list[bytes], variant: str) -> tuple[int, int]:
        """The greatest hit of what was stored whole, which the request leases; as `Plain.boundary`."""
        names, groups = [(engine.namespace(variant), key) for key in keys], engine.model.groups
        expected = hits, _ = self.plain.boundary(names, groups, CHUNK_TOKENS)
        needed = [
            self.plain.entries[name]
            for number, name in enumerate(names[:hits])
            if any(needs(group, number, hits, CHUNK_TOKENS) for group in groups)
        ]
        self.plain.lease((engine.instance_id, request_id), self.now + 20.0, needed)
        return expected

    def end_request(self, engine: Engine, request_id: str) -> None:
        call = Call()
        sequence = next(engine.reports)
        self.ask(EndRequest(engine.instance_id, engine.incarnation, engine.model.name, sequence, request_id), call)
        if self.registered(engine):
            assert call.reply is None, "a notice was answered"
            self.plain.end_lease((engine.instance_id, request_id))
        else:
            assert call.error in (ErrorCode.UNKNOWN_INSTANCE.value, ErrorCode.DUPLICATE_INSTANCE.value)

    # ---- copies -------------------------------------------------------------------------------

    def arm(
        self,
        rank: Rank,
        direction: Direction,
        group: int,
        names: list[Name],
        blocks: list[Position] | None,
        late: bool,
    ) -> Operation | None:
        """None without blocks or a word for it."""
        word = next(rank.words)
        if blocks is None or any(operation.word == word for operation in rank.operations):
            return None
        sequence = next(rank.sequences)
        rank.side.words.arm(word, sequence)
        rank.free.difference_update(*blocks)
        deadline_ns = int((self.now + (-1.0 if late else 60.0)) * 1e9)
        operation = Operation(rank, direction, group, names, blocks, word, sequence, deadline_ns)
        rank.operations.append(operation)
        self.calls.append(operation)
        return operation

    def wire(self, operation: Operation, variant: str) -> dict[str, Any]:
        model = operation.rank.engine.model
        return {
            "boot_id": self.parts.boot_id,
            "registration": operation.rank.registration,
            "chunk_blocks": model.object_blocks(operation.group),
            "keys": b"".join(key for _, key in operation.names),
            "block_ids": packed(
                0 if position[member] == NO_BLOCK else position[member]
                for position in operation.blocks
                for member in model.groups[operation.group].members
            ),
            "word": operation.word,
            "sequence": operation.sequence,
            "deadline_ns": operation.deadline_ns,
            "variant": variant,
            "durability": self.durability(variant),
            "group": operation.group,
        }

    def send(self, operation: Operation, request: Store | Retrieve) -> None:
        self.device.newest = None
        self.ask(request, operation)
        if self.device.newest is not None:
            operation.ticket = self.device.newest.ticket
            self.operations[operation.ticket] = operation
            assert operation.reply is None

    def refusal(self, rank: Rank, late: bool) -> str | None:
        """Why the server should take no copy from this rank now."""
        if rank.state != "open":
            return ErrorCode.STALE_REGISTRATION.value
        if late:
            return ErrorCode.LATE.value
        return None if rank.engine.ready else ErrorCode.NOT_READY.value

    def check_refused(self, operation: Operation, code: str) -> None:
        assert operation.error == code, f"{operation.reply}, expected {code}"
        assert operation.rank.state != "open" or operation.state == State.FAILED

    def store(
        self,
        rank: Rank,
        keys: list[bytes],
        variant: str,
        late: bool = False,
        group: int = 0,
        dropped: Sequence[bytes] = (),
    ) -> None:
        model, space = rank.engine.model, rank.engine.namespace(variant)
        self.models[space] = model
        blocks = rank.positions(group, len(keys) * model.object_blocks(group), self.rng)
        operation = self.arm(rank, Direction.STORE, group, [(space, key) for key in keys], blocks, late)
        if operation is None:
            return
        operation.dropped = [(space, key) for key in dropped]
        for block in operation.blocks:
            rank.write(block, self.rng.randbytes(model.geometry.block_bytes))
        evictions = self.cache.space.evicted_chunks
        self.send(operation, Store(**self.wire(operation, variant), dropped=b"".join(dropped)))
        if refused := self.refusal(rank, late):
            self.check_refused(operation, refused)
            assert self.cache.space.evicted_chunks == evictions
            return
        if self.replaced(operation):
            self.follow_drops(operation)  # if there was nothing to copy
        evicted = self.plain.drop_evicted(self.record)
        assert self.cache.space.evicted_chunks - evictions == evicted, (
            "a chunk vanished without being evicted, or the reverse"
        )
        self.counts["evicted"] += evicted
        self.plan_store(operation)

    def plan_store(self, operation: Operation) -> None:
        """Work out from the blocks it copies which objects it fills."""
        rank, group, model = operation.rank, operation.group, operation.rank.engine.model
        slot, per_object, members = (
            model.slot(group, rank.number),
            model.object_blocks(group),
            model.groups[group].members,
        )
        job = self.device.newest
        copied = set(job.blocks) if job is not None else set()
        assert job is None or job.direction == Direction.STORE
        for number, name in enumerate(operation.names):
            blocks = operation.blocks[number * per_object : (number + 1) * per_object]
            ids = {block[member] for block in blocks for member in members}
            if not ids & copied:
                continue  # it is there, or there was no room
            assert ids <= copied, "half an object is copied"
            entry, record = self.plain.entries.get(name), self.record(name)
            assert record is not None
            if entry is None:
                entry = self.plain.entries[name] = Entry(model.slots, record)
            assert slot not in entry.done, "copied although it was there"
            assert slot not in entry.filling, "copied although it was on its way"
            entry.filling.add(slot)
            operation.entries.append((name, entry, rank.side.memory.blocks(blocks)))
        if job is None:
            self.check_stored(operation)
            assert operation.state == State.FAILED

    def replaced(self, operation: Operation) -> bool:
        """True if the objects that the store has in place of others are there."""
        return all(self.plain.ready(name, operation.group) for name in operation.names)

    def follow_drops(self, operation: Operation) -> None:
        """Drop those of the replaced objects that the server has freed; leases that ended a while ago may keep some."""
        for name in operation.dropped:
            entry = self.plain.entries.get(name)
            if entry is not None and entry.ready(operation.group) and not entry.chunk.ready >> operation.group & 1:
                self.plain.dropped(name, operation.group)
                self.counts["dropped"] += 1

    def check_stored(self, operation: Operation) -> None:
        reply = operation.reply
        assert isinstance(reply, Stored), reply
        assert reply.stored == len(operation.entries)
        assert reply.stored + reply.skipped + reply.starved == len(operation.names)

    def load(
        self, rank: Rank, keys: list[bytes], variant: str, skip: int, short: int, late: bool = False, group: int = 0
    ) -> None:
        """Into fresh blocks; the first `skip` and last `short` blocks stay out."""
        model, space = rank.engine.model, rank.engine.namespace(variant)
        names = [(space, key) for key in keys]
        count = len(keys) * model.object_blocks(group) - skip - short
        blocks = rank.positions(group, count, self.rng, holes=True) if count > 0 else None
        operation = self.arm(rank, Direction.LOAD, group, names, blocks, late)
        if operation is None:
            return
        self.send(operation, Retrieve(**self.wire(operation, variant), skip_blocks=skip))
        found = [self.plain.entries[name] for name in names if self.plain.ready(name, group)]
        refused = self.refusal(rank, late)
        if refused is None and len(found) < len(names):
            refused = ErrorCode.NOT_FOUND.value
        if refused is not None:
            self.check_refused(operation, refused)
            return
        assert operation.ticket is not None
        operation.readers = found
        contents = [block for entry in found for block in entry.done[model.slot(group, rank.number)]]
        operation.expected = {
            position: model.read(position, content)
            for position, content in zip(operation.blocks, contents[skip : skip + count], strict=True)
        }
        for entry in found:
            entry.readers += 1

    def cancel(self, operation: Operation) -> None:
        """The engine gives up on it, by the rules of the state word."""
        self.counts["cancels"] += 1
        if operation.move(State.PENDING, State.CANCELLED):
            self.release(operation)
        elif operation.direction == Direction.LOAD:
            operation.move(State.RUNNING, State.CANCELLING)
        elif operation.move(State.RUNNING, State.CANCELLED):
            self.release(operation)  # and the blocks are overwritten while the copy perhaps still reads them

    def release(self, operation: Operation) -> None:
        """The blocks are the engine's again: a copy that reads or writes them now is wrong."""
        rank = operation.rank
        if operation.released:
            return
        operation.released = True
        rank.operations.remove(operation)
        for block in operation.blocks:
            if operation.direction == Direction.STORE or operation.state != State.DONE:
                rank.write(block, self.rng.randbytes(rank.engine.model.geometry.block_bytes))
            else:
                content = rank.side.memory.read(block)
                assert content == operation.expected[block], "a load left other bytes than were stored"
                put(rank.engine.model.geometry, rank.image, block, content)
        rank.free |= {id for position in operation.blocks for id in position if id != NO_BLOCK}

    def look_at_words(self, rank: Rank) -> None:
        """The engine sees which of its operations are over."""
        for operation in list(rank.operations):
            over = operation.state in (State.DONE, State.FAILED, State.CANCELLED)
            if not over and operation.error is not None and operation.ticket is None:
                over = operation.move(State.PENDING, State.CANCELLED)  # refused before its word could be set
            if over:
                self.release(operation)

    # ---- the server's own time ----------------------------------------------------------------

    def complete_copies(self) -> None:
        self.device.drained, self.device.parts = [], []
        self.parts.upkeep.complete_tickets()
        self.parts.stores.step()
        self.faults.buffer = [each for each in self.faults.buffer if "the device is lost" not in each.getMessage()]
        self.follow_drained()
        self.end_registrations()

    def follow_drained(self) -> None:
        """Apply the ends of copies, then the drops. A store drops once its own objects are whole, and another one may drop these in the same turn."""
        stored = []
        while self.device.drained:
            ticket, outcome = self.device.drained.pop(0)
            operation = self.operations.pop(ticket, None)
            if operation is not None:
                self.ended(operation, outcome)
                stored += [operation] if operation.direction == Direction.STORE and self.replaced(operation) else []
            self.end_registrations()
        for operation in stored:
            self.follow_drops(operation)
        for ticket, slots in self.device.parts:
            if (operation := self.operations.get(ticket)) is not None:
                self.published(operation, slots)

    def published(self, operation: Operation, slots: int) -> None:
        """The first objects of a store count if other ranks have stored them, unless it is late or its worker has gone."""
        rank, group = operation.rank, operation.group
        if rank.state != "open" or int(self.now * 1e9) > operation.deadline_ns:
            return
        slot = rank.engine.model.slot(group, rank.number)
        for name, entry, content in operation.entries[operation.looked : slots]:
            others = {each for each in entry.slots if each[0] == group} - {slot}
            if self.plain.entries.get(name) is entry and others <= entry.done.keys():
                entry.done[slot] = content
                self.counts["published"] += 1
        operation.looked = slots

    def ended(self, operation: Operation, outcome: Outcome) -> None:
        rank = operation.rank
        for entry in operation.readers:
            entry.readers -= 1
        if operation.direction == Direction.STORE:
            late = int(self.now * 1e9) > operation.deadline_ns
            slot = rank.engine.model.slot(operation.group, rank.number)
            counts = outcome == Outcome.DONE and rank.state == "open" and not late
            for name, entry, content in operation.entries:
                self.plain.store_ended(name, entry, slot, content if counts else None)
            if counts:
                self.check_stored(operation)
                self.counts["stored"] += len(operation.entries)
            else:
                assert operation.error is not None
        elif outcome == Outcome.DONE:
            assert operation.reply == Retrieved(chunks=len(operation.names))
            self.counts["loaded"] += 1
        else:
            assert operation.error is not None
        if outcome == Outcome.DEVICE_LOST:
            assert operation.error == ErrorCode.DEVICE_LOST.value
        if outcome == Outcome.MEMORY_LOST and rank.state == "open":
            self.closed(rank)

    def clear(self, engine: Engine | None) -> None:
        self.counts["clears"] += 1
        reply = self.answer(Clear(engine.instance_id if engine is not None else "", shared=True))
        if engine is not None and not engine.known:
            assert isinstance(reply, Error)
            return
        base = None
        if engine is not None:
            base = engine.namespace("") if engine.ready else b""
        assert reply == Cleared(chunks=self.plain.clear(base))

    def fail_half(self) -> None:
        """Some copy fails with part of its bytes moved."""
        copies = [number for number in self.device.open if number in self.operations]
        if copies:
            self.device.fail(self.rng.choice(copies), self.rng.randint(1, 4), "it broke half way")
            self.counts["halves"] += 1

    def lose_device(self) -> None:
        """What is in flight fails; what comes after it, too, until the device is replaced."""
        self.device.lose("it fell off the bus")
        assert not self.device.open
        self.counts["losses"] += 1

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.parts.upkeep.tick()
        self.plain.end_leases(lambda _, deadline: deadline <= self.now)

    # ---- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds at any moment."""
        assert not self.faults.buffer, logging.Formatter().format(self.faults.buffer[0])
        for rank in self.processes:
            if rank.connection is not None:
                rank.check_memory()

    def copies_end(self) -> bool:
        """True if others began meanwhile."""
        repeat(lambda: self.device.step() or bool(self.device.open))
        self.complete_copies()
        for rank in self.ranks():
            if rank.connection is not None:
                self.look_at_words(rank)
                self.notice_server_hung_up(rank)
        self.watch_lifelines()
        return self.parts.tickets.open_tickets > 0

    def come_to_rest(self) -> None:
        """Let everything in flight end, then audit the accounting and compare all that can be seen."""
        repeat(self.copies_end)
        repeat(self.parts.upkeep.step)
        self.check()
        assert self.parts.upkeep.audit_if_idle(), "nothing is in flight, and yet it is not idle"
        for call in self.calls:
            assert call.reply is not None, "a request without its reply"
            assert call.kind is None or isinstance(call.reply, call.kind), call.reply
        self.calls.clear()
        assert not self.operations
        assert not self.pending
        assert all(rank.state == "open" or rank.connection is None for rank in self.ranks()), (
            "a closed worker was not notified"
        )
        self.check_contents()
        self.bury()

    def check_contents(self) -> None:
        assert self.cache.index.chunk_count == len(self.plain.entries)
        assert self.cache.lease_count == len(self.plain.leases)
        for name, entry in self.plain.entries.items():
            record = self.record(name)
            assert record is entry.chunk
            model = self.models[name[0]]
            assert record.ready == sum(1 << group for group in range(len(model.groups)) if entry.ready(group))
            for slot, content in entry.done.items():
                pages = pages_of(record.slot(entry.slots.index(slot)))
                assert pages
                raw = b"".join(self.device.read_l1(page) for page in pages)
                whole = model.object_bytes(slot[0], content)
                assert raw[: len(whole)] == whole, "L1 holds other bytes than were stored"

    def end(self) -> None:
        """Every worker disconnects; nothing may be left."""
        for rank in self.ranks():
            if rank.connection is not None:
                self.hang_up(rank)
        self.watch_lifelines()
        self.come_to_rest()
        assert self.parts.workers.mappings == 0
        assert len(self.lifelines) == 0
        assert self.cache.lease_count == 0
        assert not self.parts.instances.by_id
        self.clear(None)
        repeat(self.parts.upkeep.step)
        assert self.cache.pool.used_pages == 0
