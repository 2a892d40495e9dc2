"""The server's parts over a watched device, and worker processes that connect, register, die and unregister."""

from __future__ import annotations

import itertools
import logging
import select
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from logging.handlers import BufferingHandler
from pathlib import Path

from kvserver._native import HostRegion
from kvserver.cache import POLICIES, Cache, PagePool
from kvserver.config import Settings, SocketFile
from kvserver.copy import Devices
from kvserver.engines import Lifelines
from kvserver.parts import Parts
from kvserver.protocol import (
    Attach,
    Attached,
    Detached,
    Error,
    ErrorCode,
    KVServerError,
    Registered,
    Reply,
    Request,
    Unregistered,
    UnregisterWorker,
    decode_attach_reply,
    encode,
)
from kvserver.tiering import ConfiguredTier

from .engines import CHUNK_TOKENS, Call, Engine, Model, Rank
from .plain import Plain
from .watched_device import WatchedDevice

PAGE_BYTES = 32


class Workers:
    """All of `engines`, none of which is connected at first."""

    page_bytes = PAGE_BYTES

    def __init__(self, folder: Path, models: dict[str, Model], pages: int, trouble: float) -> None:
        self.now = self.begins()
        self.plain = Plain()
        self.device = WatchedDevice(pages * self.page_bytes, self.page_bytes, 2, trouble)
        self.cache = Cache(PagePool(pages * self.page_bytes, self.page_bytes), POLICIES[Settings().eviction_policy]())
        self.lifelines = Lifelines(SocketFile(str(folder / "fd"), socket.SOCK_SEQPACKET), "token")
        settings = Settings(chunk_tokens=CHUNK_TOKENS, lease_seconds=20.0)
        devices = Devices(self.device)
        tiers = self.make_tiers(folder, self.device.region)
        self.parts = Parts(settings, self.cache, devices, self.lifelines, clock=lambda: self.now, tiers=tiers)
        self.parts.observability.start(list)
        self.engines = [Engine(name, model) for name, model in models.items()]
        self.pending: list[tuple[Rank, Call]] = []  # registrations
        self.processes = list(self.ranks())  # whose memory is still open
        self.calls: list[Call] = []  # all that want one reply by the time nothing is in flight
        self.incarnations = itertools.count()
        self.counts: Counter[str] = Counter()
        self.faults = BufferingHandler(1000)  # what the server logs as an error
        self.faults.setLevel(logging.ERROR)
        logging.getLogger("kvserver").addHandler(self.faults)

    def begins(self) -> float:
        """Its clock at first: by the device's no deadline passes but by trouble."""
        return time.monotonic() + 1e6

    def make_tiers(self, folder: Path, l1: HostRegion) -> Sequence[ConfiguredTier]:
        return ()

    def close(self) -> None:
        self.lifelines.shut()
        self.parts.observability.close(list)
        logging.getLogger("kvserver").removeHandler(self.faults)

    # ---- plumbing -----------------------------------------------------------------------------

    def ask(self, request: Request, call: Call) -> None:
        """As the server does: an error that is raised is the reply."""
        try:
            self.parts.handlers.handle(request, call.respond)
        except KVServerError as error:
            call.respond(Error(code=error.code.value, message=error.message))

    def answer(self, request: Request) -> Reply:
        call = Call()
        self.ask(request, call)
        assert call.reply is not None, f"{type(request).__name__} was not answered"
        return call.reply

    def ranks(self) -> Iterable[Rank]:
        return (rank for engine in self.engines for rank in engine.ranks)

    # ---- a process begins ---------------------------------------------------------------------

    def connect(self, dead: Rank) -> None:
        """A fresh process registers in the place of a dead one."""
        assert dead.connection is None
        engine = dead.engine
        if not any(other.connection for other in engine.ranks):
            engine.incarnation = f"life-{next(self.incarnations)}"
        rank = Rank(engine, dead.number)
        self.processes.append(rank)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self.lifelines.path)
        socket.send_fds(connection, [encode(Attach(token="token"))], [*rank.side.memory.fds, rank.side.words.fd])
        fd = self.lifelines.accept()
        assert fd is not None
        assert self.lifelines.read(fd) is None
        attached = decode_attach_reply(connection.recv(4096))
        assert isinstance(attached, Attached)
        rank.connection = connection
        call = Call()
        taken = engine.known and (not self.registered(engine) or dead.state != "gone")
        if not taken:
            self.device.expect(rank.side)
        self.ask(engine.registration(rank, attached.attachment), call)
        if taken:
            assert call.error == ErrorCode.DUPLICATE_INSTANCE.value
            self.hang_up(rank)
            return
        assert call.reply is None, call.reply
        rank.state = "mapping"
        engine.ranks[rank.number] = rank
        self.calls.append(call)
        self.pending.append((rank, call))

    def registered(self, engine: Engine) -> bool:
        """It is this incarnation that the server knows."""
        return engine.known and self.parts.instances.by_id[engine.instance_id].incarnation == engine.incarnation

    def end_registrations(self) -> None:
        for rank, call in [pair for pair in self.pending if pair[1].reply is not None]:
            self.pending.remove((rank, call))
            if rank.state != "mapping":
                assert call.error == ErrorCode.CANCELLED.value
                continue
            if call.error == ErrorCode.DEVICE_LOST.value:
                assert self.counts["losses"]
                self.closed(rank)
                continue
            assert isinstance(call.reply, Registered), call.reply
            rank.registration = call.reply.registration
            rank.state = "open"
            assert call.reply.namespace in ("", rank.engine.namespace("").hex())

    # ---- a process ends -----------------------------------------------------------------------

    def hang_up(self, rank: Rank) -> None:
        """The process dies; the server has not noticed yet."""
        assert rank.connection is not None
        rank.connection.close()
        rank.connection = None
        for operation in rank.operations:
            operation.released = True
        self.counts["deaths"] += 1

    def watch_lifelines(self) -> None:
        """The server looks at its connections."""
        poll = select.poll()
        for fd in self.lifelines.connection_fds():
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0):
            ended = self.lifelines.read(fd)
            assert ended is not None
            registration = ended.registration
            self.parts.workers.lifeline_ended(ended)
            for rank in self.ranks():
                if registration is not None and rank.registration == registration and rank.state == "open":
                    self.closed(rank)
        self.adopt_mapping_deaths()

    def adopt_mapping_deaths(self) -> None:
        """A worker that died while its memory was mapped has left the server's table."""
        for rank, _ in self.pending:
            if rank.state == "mapping":
                instance = self.parts.instances.by_id.get(rank.engine.instance_id)
                if instance is None or rank.number not in instance.workers:
                    assert rank.connection is None, "a living worker was dropped"
                    self.closed(rank)

    def closed(self, rank: Rank) -> None:
        """The server takes no more from this worker."""
        rank.state = "gone"
        assert all(job.cancelled for job in self.device.copies_of(rank.side)), "it copies on for the dead"
        if not rank.engine.known:
            self.plain.end_leases(lambda owner, _: owner[0] == rank.engine.instance_id)

    def unregister(self, rank: Rank) -> None:
        call = Call(kind=Unregistered if rank.state == "open" else Error)
        self.ask(UnregisterWorker(boot_id=self.parts.boot_id, registration=rank.registration), call)
        if rank.state != "open":
            assert call.error == ErrorCode.STALE_REGISTRATION.value
            return
        self.calls.append(call)
        self.closed(rank)

    def notice_server_hung_up(self, rank: Rank) -> None:
        """A worker whose connection the server closed starts anew later."""
        if rank.connection is None or rank.state != "gone":
            return
        poll = select.poll()
        poll.register(rank.connection, select.POLLIN)
        if poll.poll(0):
            assert isinstance(decode_attach_reply(rank.connection.recv(4096)), Detached)
            assert rank.connection.recv(16) == b""
            assert not self.device.copies_of(rank.side), "it may still be written to"
            self.hang_up(rank)

    def bury(self) -> None:
        """Nothing is in flight: close the memory of the dead."""
        for rank in [rank for rank in self.processes if rank.connection is None]:
            rank.side.memory.close()
            self.processes.remove(rank)
