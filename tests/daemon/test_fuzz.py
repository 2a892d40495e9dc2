"""Fifty thousand malformed and hostile messages: one reply each, bounded memory, clean accounting."""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.memory import awkward
from support.properties import damaged, examples
from support.raw import RawPeer
from support.worker import Worker, ids, make_keys, packed, wire_form

from kvserver.config.settings import MiB
from kvserver.protocol import (
    MARK,
    Attach,
    ChunkContents,
    Clear,
    DescribeScheduler,
    EndRequest,
    EngineLoad,
    ErrorCode,
    ExactRecords,
    Heartbeat,
    Hello,
    KVGroup,
    KVServerError,
    Owned,
    Plane,
    Released,
    ReportBlockAllocations,
    ReportedBlocks,
    SharedFd,
    Status,
    Store,
    TakeKVEvents,
    UnregisterWorker,
    decode_request,
    encode,
)
from kvserver.protocol.client import Attachment

WARM_UP = 5_000
PEERS = 4
L1_BYTES = 4 * MiB
GROWTH_BYTES = L1_BYTES + 24 * MiB  # of the daemon's memory after the warm-up; L1 is touched lazily
SEED = 20_260
# The codes that these messages must keep reaching; the others need descriptors, ranks or memory that ends.
REACHED = set(ErrorCode) - {
    ErrorCode.BAD_TOKEN,
    ErrorCode.DEVICE_LOST,
    ErrorCode.INTERNAL,
    ErrorCode.MEMORY_LOST,
    ErrorCode.NO_DESCRIPTORS,
    ErrorCode.NOT_READY,
    ErrorCode.RANKS_DISAGREE,
    ErrorCode.STORAGE,
    ErrorCode.TOO_LARGE,
}

EDGES = [0, 1, 2, 3, 4, 7, 8, 63, 64, 65, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, -1]


class Hostile:
    """Makes messages. `silent` names those that the protocol does not answer."""

    def __init__(self, worker: Worker, attachments: list[int], seed: int) -> None:
        self.worker = worker
        self.attachments = attachments
        self.random = random.Random(seed)
        self.keys = make_keys(8, seed="fuzz")
        self.makers: list[tuple[int, Callable[[], bytes | list[bytes]]]] = [
            (15, self.random_bytes),
            (15, self.random_msgpack),
            (40, self.mutated),
            (10, self.random_frames),
            (20, self.hostile_copy),
            (10, self.hostile_registration),
            (5, self.hostile_small_message),
        ]

    def frames(self, number: int) -> list[bytes]:
        """The next message; `number` becomes its request id if it has one."""
        weights = [weight for weight, _ in self.makers]
        made = self.random.choices(self.makers, weights)[0][1]()
        return made if isinstance(made, list) else [number.to_bytes(8, "big"), made]

    # ---- makers: a payload that gets a request id, or all frames ------------------------------

    def random_bytes(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 2, 10, 100, 3000)))

    def random_msgpack(self) -> bytes:
        return msgspec.msgpack.encode(self._value(3))

    def mutated(self) -> bytes:
        raw = bytearray(encode(self.random.choice(self._valid())))
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randrange(len(raw)) if raw else 0
            match self.random.randrange(5):
                case 0:
                    raw[at : at + 1] = self.random.randbytes(1)
                case 1:
                    del raw[at:]
                case 2:
                    raw[at:at] = self.random.randbytes(self.random.randint(1, 9))
                case 3:
                    del raw[at : at + self.random.randint(1, 9)]
                case 4:
                    raw[at:at] = raw[at : at + self.random.randint(1, 50)]
        return bytes(raw)

    def random_frames(self) -> list[bytes]:
        count = self.random.choice((1, 2, 3, 4, 50))
        return [self.random.randbytes(self.random.choice((0, 1, 7, 9, 40))) for _ in range(count)]

    def hostile_copy(self) -> bytes:
        """A valid store or load but for one or two fields."""
        keys = [self.random.choice(self.keys) for _ in range(self.random.randint(1, 3))]
        blocks = [self.random.choice((*range(70), 2**31, 2**32 - 1)) for _ in range(4 * len(keys))]
        make = self.random.choice((self.worker.store_message, self.worker.load_message))
        message = make(keys, blocks if self.random.random() < 0.5 else self._distinct(4 * len(keys)))
        if self.random.random() < 0.3:
            message.block_ids = self._hostile_ids()
        if isinstance(message, Store) and self.random.random() < 0.6:
            message.contents = self._contents(keys)
        return self._with_edges(message)

    def hostile_registration(self) -> bytes:
        planes = [Plane(*(self._small_or_edge() for _ in range(4))) for _ in range(self.random.randint(1, 5))]
        message = self.worker.registration(
            instance_id=f"fuzz-{self.random.randrange(100)}",
            attachment=self.random.choice(self.attachments),
            planes=planes if self.random.random() < 0.7 else list(self.worker.geometry.planes),
        )
        if self.random.random() < 0.3:
            message.memory = [SharedFd(self._small_or_edge(), self._small_or_edge()) for _ in range(2)]
        return self._with_edges(message)

    def hostile_small_message(self) -> bytes:
        return self._with_edges(self.random.choice([*self._notices(), Hello(protocol_version=1, client="fuzz")]))

    def _contents(self, keys: list[bytes]) -> ChunkContents:
        """Of chunks of 4 blocks of 16 tokens: mostly of the right size, and sometimes with the right hashes."""
        size = self.random.choice((7, 8, 16, 32, 32, 32, 33))
        hashes = b"".join(self.random.randbytes(3 * size) + key[:size] for key in keys)
        items = [self._value(2) for _ in range(4 * len(keys))]
        return ChunkContents(
            hash_bytes=size,
            hashes=hashes if self.random.random() < 0.8 else hashes[:-1],
            tokens=bytes(4 * 16 * 4 * len(keys) + self.random.choice((0, 0, 0, 1))),
            parent=self.random.choice((b"", bytes(size), b"short", bytes(40))),
            lora_name=self.random.choice(("", "tuned", "x" * 600)),
            extra_keys=self.random.choice(
                (
                    b"",
                    self.random.randbytes(30),
                    msgspec.msgpack.encode([None, ["salt"], None, None] * len(keys)),
                    msgspec.msgpack.encode(items),
                    msgspec.msgpack.encode([[item] for item in items]),
                    b"\x94" + b"\x91" * 2000,
                )
            ),
        )

    def _hostile_ids(self) -> bytes:
        """No packed ids, or ones that stand for very many."""
        varints = [
            self.random.choice((b"\0", b"\1", b"\x08", b"\xff" * 9 + b"\1", b"\xff\xff\xff\xff\x1f")) for _ in range(4)
        ]
        return self.random.choice((b"\0", b"\1", b"\2", b"", self.random.randbytes(3))) + b"".join(varints)

    # ---- what they are made of ----------------------------------------------------------------

    def _value(self, depth: int) -> Any:
        pick = self.random.randrange(9 if depth else 6)
        match pick:
            case 0:
                return self.random.choice(EDGES)
            case 1:
                return self.random.random() * 1e30
            case 2:
                return self.random.choice((None, True, False))
            case 3:
                return self.random.randbytes(self.random.randrange(40))
            case 4 | 5:
                return self.random.choice(("Store", "Hello", "type", "x" * 600, "", "\u00e9\U0001f600"))
            case 6:
                items = [self._value(depth - 1) for _ in range(self.random.randrange(5))]
                tag = [self.random.choice(("Store", "Lookup", "Retrieve", "AwaitFill", "Clear"))]
                return tag + items if self.random.random() < 0.5 else items
            case _:
                names = ("type", "keys", "boot_id", "registration", "word", "planes", "other")
                found = {self.random.choice(names): self._value(depth - 1) for _ in range(self.random.randrange(5))}
                if self.random.random() < 0.5:
                    found["type"] = self.random.choice(("Store", "Lookup", "RegisterWorker", "Clear", "Error"))
                return found

    def _with_edges(self, message: Any) -> bytes:
        """Encode it with one or two integer fields replaced by hostile ones."""
        integers = [name for name, value in msgspec.structs.asdict(message).items() if isinstance(value, int)]
        picked = self.random.sample(integers, min(len(integers), self.random.randint(0, 2)))
        edges = {name: self.random.choice(EDGES) for name in picked if name != "attachment"}
        return msgspec.msgpack.encode(wire_form(message, **edges))

    def _small_or_edge(self) -> int:
        return (
            self.random.choice((0, 1, 2, 100, 192, 1000)) if self.random.random() < 0.7 else self.random.choice(EDGES)
        )

    def _distinct(self, count: int) -> list[int]:
        return self.random.sample(range(1, 64), count)

    def _notices(self) -> list[Any]:
        of = {"sequence": self.random.randrange(1000)}
        return [
            self.worker.report_message(self._exact(self.random.getrandbits(32) for _ in range(4)), **of),
            self.worker.report_message(self._exact([1, 2, 3]), **of),
            self.worker.report_message(self._reported(), **of),
            self.worker.end_message(**of),
            Heartbeat(boot_id=self.worker.hello.boot_id),
            self.worker.description(variant=self.random.choice(("", "w1", "w2/tuned")), groups=(KVGroup("full"),) * 3),
            self.worker.stats_message(interval_seconds=self.random.random(), running=1, waiting=2),
        ]

    def _exact(self, records: Iterable[int]) -> ExactRecords:
        return ExactRecords(records=ids(records), marks=MARK.pack(0, 5), full=self.random.random() < 0.5)

    def _reported(self) -> ReportedBlocks:
        held = Owned("r", 0, 0, packed([1, 2]), 2, contents=bytes(8))
        return ReportedBlocks(time_ns=1, block_tokens=16, records=[held, Released("r", packed([1]), 1)])

    def _valid(self) -> list[Any]:
        keys = self.keys[: self.random.randint(1, 3)]
        return [
            *self._notices(),
            Hello(
                protocol_version=self.random.choice((1, 2, 3, 4, 5)), client="c" * 100
            ),  # most changes spare the version
            self.worker.lookup_message(keys, f"r{self.random.randrange(50)}"),
            self.worker.store_message(keys, self._distinct(4 * len(keys))),
            self.worker.load_message(keys, self._distinct(4 * len(keys))),
            msgspec.structs.replace(
                self.worker.store_message(keys, self._distinct(4 * len(keys))), contents=self._contents(keys)
            ),
            TakeKVEvents(
                instance_id=self.worker.instance_id,
                incarnation=self.worker.incarnation,
                follow=self.random.choice(EDGES[:-1]),
                cursor=self.random.choice(EDGES[:-1]),
            ),
            self.worker.registration(),
            UnregisterWorker(boot_id=self.worker.hello.boot_id, registration=1 << 50),  # no mutation reaches ours
            Clear(),
            Clear(instance_id=self.worker.instance_id),
            Status(),
        ]

    # ---- what the protocol states -------------------------------------------------------------

    def replies(self, frames: list[bytes]) -> int | None:
        """How many belong to it: one, but none to a valid notice. None: none or one, as it does with a valid report,
        which may find that others were lost, or be of the wrong form for this instance."""
        if len(frames) != 2 or len(frames[0]) != 8:
            return 1
        try:
            message = decode_request(frames[1])
        except KVServerError:
            return 1
        match message:
            case Heartbeat():
                return int(message.boot_id != self.worker.hello.boot_id)
            case EndRequest() | DescribeScheduler() | EngineLoad():
                return int(not self._known(message))
            case ReportBlockAllocations():
                return None if self._known(message) else 1
        return 1

    def _known(self, message: EndRequest | ReportBlockAllocations | DescribeScheduler | EngineLoad) -> bool:
        told = (message.instance_id, message.incarnation, message.model_name)
        return told == (self.worker.instance_id, self.worker.incarnation, self.worker.model_name)


def reply_id(frames: list[bytes]) -> bytes:
    """The request id that the answer to these frames carries."""
    return frames[0] if len(frames[0]) == 8 else bytes(8)


def collect(
    peers: list[RawPeer], received: list[Counter[bytes]], expected: list[Counter[bytes]], seconds: float
) -> None:
    """Receive until all that is expected has come, at most so long, and then what else there is."""
    deadline = time.monotonic() + seconds
    waiting = True
    while waiting and time.monotonic() < deadline:
        for peer, counter in zip(peers, received, strict=True):
            while peer.socket.poll(1):
                counter[peer.socket.recv_multipart(zmq.NOBLOCK)[0]] += 1
        waiting = any(want - got for want, got in zip(expected, received, strict=True))


@pytest.mark.parametrize("messages", [10_000, pytest.param(50_000, marks=pytest.mark.long)])
def test_hostile_messages_get_one_reply_each_and_leave_nothing(make_daemon, make_worker, messages):
    daemon = make_daemon(l1_size="4MiB", log_level="error")
    worker = make_worker(daemon, geometry=awkward())
    attachments = [
        Attachment(worker.hello.fd_path, worker.hello.token, [*worker.memory.fds, worker.words.fd]) for _ in range(40)
    ]
    hostile = Hostile(worker, [a.number for a in attachments], SEED)
    peers = [RawPeer(daemon.endpoint, high_water_mark=0) for _ in range(PEERS)]
    expected: list[Counter[bytes]] = [Counter() for _ in peers]
    allowed: list[Counter[bytes]] = [Counter() for _ in peers]  # besides
    received: list[Counter[bytes]] = [Counter() for _ in peers]
    warm = 0
    for number in range(messages):
        frames = hostile.frames(number + 1)
        which = number % PEERS
        replies = hostile.replies(frames)
        (allowed if replies is None else expected)[which][reply_id(frames)] += 1 if replies is None else replies
        peers[which].send(*frames)
        if number % 500 == 499:  # let it catch up: what is unread would be queue, not leak
            collect(peers, received, expected, 10)
            assert daemon.running(), daemon.log[-4000:]
        if number == WARM_UP:
            warm = daemon.rss_bytes()
    collect(peers, received, expected, 20)
    time.sleep(0.3)
    collect(peers, received, expected, 1)  # nothing more comes
    for want, besides, got in zip(expected, allowed, received, strict=True):
        assert got - want - besides == Counter(), "answered more than once, or though silent"
        assert want - got == Counter(), "not answered"

    replied = {s.labels["reason"] for s in daemon.samples("kvserver_rpc_errors_total") if s.value}
    reached = {code for code in ErrorCode if code.value in replied}
    assert reached >= REACHED, f"the messages no longer reach {REACHED - reached}"
    growth = daemon.rss_bytes() - warm
    assert growth < GROWTH_BYTES, f"grew by {growth} bytes"
    fresh = make_worker(daemon)
    fresh.round_trip()
    for each in (*attachments, *peers, worker, fresh):
        each.close()
    daemon.wait_for_clean_accounting()
    daemon.clear_and_check()
    assert "internal error" not in daemon.log, daemon.log[-4000:]
    assert {row["state"] for row in daemon.status()["kv_events"]["observers"]} == {"running"}
    assert all(row["errors"] == 0 for row in daemon.status()["events"]["subscribers"]), daemon.log[-4000:]


@pytest.mark.hypothesis
def test_garbage_with_descriptors_on_the_fd_socket_leaves_nothing(daemon, worker):
    valid = st.just(encode(Attach(token=worker.hello.token)))
    fds = os.listdir(f"/proc/{daemon.pid}/fd")

    @given(raw=valid | damaged(valid).filter(bool) | st.binary(min_size=1, max_size=300), count=st.integers(0, 19))
    @examples(200)
    def send(raw, count):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(worker.hello.fd_path)
            socket.send_fds(connection, [raw], [worker.memory.fds[0]] * count)
            connection.settimeout(5)
            assert connection.recv(65536) != b""

    send()
    daemon.wait_for_accounting(attachments=1, mappings=3)
    assert daemon.open_memfds() == 3
    assert len(os.listdir(f"/proc/{daemon.pid}/fd")) <= len(fds) + 2
    worker.round_trip()
