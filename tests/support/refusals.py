"""Bad inputs by the code of their error, each with words of the reply: unit tests try all, over the daemon's sockets one of each code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kvserver._native import State
from kvserver.protocol import (
    KEY_BYTES,
    MARK,
    PROTOCOL_VERSION,
    ChunkContents,
    Clear,
    Error,
    ErrorCode,
    ExactRecords,
    Heartbeat,
    Hello,
    HelloReply,
    ObjectGroup,
    Plane,
    Request,
    SharedFd,
    TakeKVEvents,
    UnregisterWorker,
    encode,
)
from kvserver.protocol.client import Attachment, RequestFailed

from .memory import awkward
from .raw import REQUEST_ID, RawPeer
from .registration import WORDS
from .worker import Worker, ids, make_keys

Refused = Callable[[Worker], Error]  # the reply to a bad input, for a worker that is registered with default arguments
HELLO = encode(Hello(protocol_version=PROTOCOL_VERSION))

# ---- how they are sent ------------------------------------------------------------------------


def frames(*sent: bytes) -> Refused:
    """To frames of another peer, whose connection goes on."""

    def reply(worker: Worker) -> Error:
        with RawPeer(worker.endpoint) as peer:
            error = peer.error(*sent)
            peer.send(REQUEST_ID, HELLO)
            assert isinstance(peer.receive()[1], HelloReply)
            return error

    return reply


def attach(token: str) -> Refused:
    def reply(worker: Worker) -> Error:
        try:
            Attachment(worker.hello.fd_path, token, worker.memory.fds)
        except RequestFailed as refused:
            return Error(refused.code, refused.message)
        raise AssertionError("it was attached")

    return reply


def ask(make: Callable[[Worker], Request]) -> Refused:
    return lambda worker: worker.error_of(make(worker))


def lookup(**changes: Any) -> Refused:
    return ask(lambda w: replace(w.lookup_message(make_keys(1)), **changes))


def engine_events(**changes: Any) -> Refused:
    return ask(lambda w: replace(TakeKVEvents(w.instance_id, w.incarnation), **changes))


def report(records: bytes, **changes: Any) -> Refused:
    payload = ExactRecords(records, MARK.pack(0, time.monotonic_ns()) if records else b"")
    return ask(lambda w: w.report_message(payload, **changes))


def copy(load: bool, blocks: list[int] | None = None, **changes: Any) -> Refused:
    """To a copy of a chunk that is in L1: its word reads FAILED before the reply, and no byte was copied."""

    def reply(worker: Worker) -> Error:
        worker.store(keys := make_keys(1), worker.blocks_for(1, first=20))
        image = worker.memory.image()
        make = worker.load_message if load else worker.store_message
        operation = worker.begin(replace(make(keys, [1, 2, 3, 4] if blocks is None else blocks), **changes))
        error = operation.reply()
        assert isinstance(error, Error), error
        assert operation.state == State.FAILED
        assert worker.memory.image() == image
        return error

    return reply


def missing(worker: Worker) -> Error:
    worker.store((keys := make_keys(3))[1:], worker.blocks_for(2))
    operation = worker.begin_load(keys, worker.blocks_for(3))
    error = operation.reply()
    assert isinstance(error, Error), error
    assert operation.state == State.FAILED
    return error


def contents(**changes: Any) -> Refused:
    """To a store of two chunks of 4 blocks of 16 tokens. Nothing is stored."""
    good = ChunkContents(32, bytes(8 * 32), bytes(8 * 16 * 4))

    def reply(worker: Worker) -> Error:
        keys = make_keys(2)
        error = worker.error_of(worker.store_message(keys, worker.blocks_for(2), contents=replace(good, **changes)))
        assert worker.lookup(keys) == 0
        return error

    return reply


def register(
    odd: Callable[[], int] | None = None, place: int = 0, same_engine: bool = False, **changes: Any
) -> Refused:
    """To the registration of another worker. `odd` makes the descriptor that it hands over at that place."""

    def reply(worker: Worker) -> Error:
        engine = {"instance_id": worker.instance_id, "incarnation": worker.incarnation} if same_engine else {}
        with Worker(worker.endpoint, connect_now=False, **engine) as other:
            fds = [*other.memory.fds, other.words.fd]
            if odd is not None:
                fds[place] = odd()
            other.attach(fds)
            if odd is not None:
                os.close(fds[place])
            return other.error_of(other.registration(**changes))

    return reply


def memory(size: int) -> int:
    """Not sealed."""
    fd = os.memfd_create("test-odd", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def read_only() -> int:
    fd = memory(SIZE)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def end_of_pipe() -> int:
    fd, other = os.pipe()
    os.close(other)
    return fd


# ---- what they are ----------------------------------------------------------------------------

TWO_FRAMES = ["expected 2", "8-byte request id", "msgpack message"]
LIMIT = 4 * 2**20
VERSIONS = f"speaks {PROTOCOL_VERSION - 1} to {PROTOCOL_VERSION}"
OTHER_BOOT = ["meant for boot 'before', this is '", "register again"]
WHOLE_KEYS = f"whole keys of {KEY_BYTES}"
PLANE, SIZE, HUGE = Plane(0, 0, 192, 192), awkward().sizes[0], 1 << 62
BOTH = (False, True)


def named(**wrong: str) -> list[Refused]:
    """Of each request that names an engine."""
    return [lookup(**wrong), engine_events(**wrong), *notices(**wrong)]


def both(**changes: Any) -> list[Refused]:
    """Of a store and a load."""
    return [
        ask(lambda w: w.store_message(make_keys(1), [1, 2, 3, 4], **changes)),
        ask(lambda w: w.load_message(make_keys(1), [1, 2, 3, 4], **changes)),
    ]


def notices(**wrong: str) -> list[Refused]:
    return [
        report(b"", **wrong),
        ask(lambda w: w.end_message(**wrong)),
        ask(lambda w: w.stats_message(**wrong)),
        ask(lambda w: w.description(**wrong)),
    ]


REFUSALS: dict[ErrorCode, list[tuple[Refused, list[str]]]] = {
    ErrorCode.BAD_FRAMES: [
        (frames(b"x"), ["got 1 frames of sizes [1]", *TWO_FRAMES]),
        (frames(b""), ["got 1 frames of sizes [0]", *TWO_FRAMES]),
        (frames(REQUEST_ID), ["got 1 frames of sizes [8]", *TWO_FRAMES]),
        (frames(b"short", HELLO), ["got 2 frames", *TWO_FRAMES]),
        (frames(b"", REQUEST_ID, HELLO), ["got 3 frames", *TWO_FRAMES]),
        (frames(REQUEST_ID, HELLO, b""), ["got 3 frames of sizes [8, ", *TWO_FRAMES]),
        (frames(*[b"y"] * 500), ["got 500 frames of sizes [1, 1, 1, 1, 1, 1, 1, 1];", *TWO_FRAMES]),
    ],
    ErrorCode.BAD_MESSAGE: [
        (frames(REQUEST_ID, b"\xc1\xff\xfe"), [f"not a request of protocol {PROTOCOL_VERSION}"]),
        (lookup(chunk_blocks=0), ["$.chunk_blocks", ">= 1"]),
        (register(counted=()), ["$.counted"]),
        *((refused, [f"state word {WORDS}", f"page of {WORDS} words"]) for refused in both(word=WORDS)),
    ],
    ErrorCode.TOO_LARGE: [
        (frames(REQUEST_ID, bytes(LIMIT + 1)), [f"{LIMIT + 1} bytes", f"limit is {LIMIT}", "split"]),
        (register(planes=[Plane(0, 0, HUGE, HUGE)]), ["one chunk", "L1 has ", "--l1-size"]),
    ],
    ErrorCode.VERSION_MISMATCH: [
        (frames(REQUEST_ID, encode(Hello(version))), [f"client speaks protocol {version}", VERSIONS])
        for version in (0, -1, PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 1, 2**63)
    ],
    ErrorCode.BAD_TOKEN: [(attach("guessed"), ["send Hello again"])],
    ErrorCode.UNKNOWN_ATTACHMENT: [(register(attachment=999_999), ["999999", "Attach again"])],
    ErrorCode.UNKNOWN_INSTANCE: [
        *((refused, ["'who'", "registered"]) for refused in named(instance_id="who")),
        *((refused, ["registered model 'test/model', not 'another'"]) for refused in notices(model_name="another")),
        (ask(lambda w: Clear(instance_id="who")), ["'who'"]),
    ],
    ErrorCode.UNKNOWN_RANK: [
        (register(rank=rank, world_size=world), [f"rank {rank} of a world of {world}"])
        for rank, world in ((1, 1), (2, 2), (4000, 3))
    ],
    ErrorCode.DUPLICATE_INSTANCE: [
        *((refused, ["another live engine", "engine_id"]) for refused in named(incarnation="another")),
        (register(same_engine=True), ["rank 0", "registered already"]),
    ],
    ErrorCode.RANKS_DISAGREE: [(register(same_engine=True, rank=1, world_size=2), ["rank 1 states world_size=2"])],
    ErrorCode.NOT_READY: [(engine_events(), ["send DescribeScheduler first"])],
    ErrorCode.STALE_BOOT: [
        (ask(lambda w: Heartbeat("before")), OTHER_BOOT),
        (ask(lambda w: UnregisterWorker("before", w.number)), OTHER_BOOT),
        *((refused, OTHER_BOOT) for refused in both(boot_id="before")),
    ],
    ErrorCode.STALE_REGISTRATION: [
        (ask(lambda w: UnregisterWorker(w.hello.boot_id, 4711)), ["4711", "no longer"]),
        *((refused, ["4711", "no longer"]) for refused in both(registration=4711)),
    ],
    ErrorCode.LATE: [(copy(load, deadline_ns=at), ["deadline had passed"]) for at in (0, time.monotonic_ns()) for load in BOTH],
    ErrorCode.BAD_PLANES: [
        (register(planes=[PLANE, Plane(0, SIZE - 191, 0, 192)], num_blocks=1), ["plane 1 ends outside", str(SIZE)]),
        (register(planes=[Plane(0, 0, SIZE, 192)]), ["plane 0 ends outside", f"stride {SIZE}"]),
        (register(planes=[Plane(0, HUGE, 192, 192)]), ["plane 0 ends outside", f"offset {HUGE}"]),
        (register(planes=[Plane(0, 0, HUGE, 192)]), ["plane 0 ends outside", f"stride {HUGE}"]),
        (register(planes=[PLANE, Plane(2, 0, 1, 1)]), ["plane 1 names memory 2 of 2"]),
        (register(planes=[Plane(0, 0, 191, 192)]), ["plane 0", "overlap", "stride 191 < run 192"]),
        (register(planes=[PLANE, Plane(0, 0, 192, 8, group=2)]), ["no plane is of group 1"]),
        (register(num_blocks=1 << 31), ["plane 0 ends outside", f"{1 << 31} blocks"]),
        *((register(groups=groups), words) for groups, words in (
            ((ObjectGroup("full", (1,), 16),), ["members [1]", "groups [0]"]),
            ((ObjectGroup("full", (0,), 16), ObjectGroup("full", (0,), 16)), ["members [0, 0]", "groups [0]"]),
            ((ObjectGroup("full", (0,), 32),), ["4 blocks of 16 tokens", "[32]"]),
            ((ObjectGroup("window", (0,), 16),), ["object group 0 is a window of 0 tokens"]),
            ((ObjectGroup("local", (0,), 16),), ["object group 0 is a local of 0 tokens"]),
        )),
        (register(chunk_blocks=5), ["5 blocks of 16 tokens", "64 chunk tokens", "[16]", "64 tokens"]),
    ],
    ErrorCode.BAD_MEMORY: [
        (register(words=WORDS + 1), [f"holds {WORDS * 8} bytes", f"states {WORDS * 8 + 8}"]),
        (register(memory=[SharedFd(0, SIZE)]), ["3 descriptors", "0 to 1"]),
        (register(memory=[SharedFd(0, SIZE), SharedFd(0, SIZE)]), ["3 descriptors", "once"]),
        (register(memory=[SharedFd(0, SIZE), SharedFd(7, SIZE)]), ["3 descriptors", "0 to 1"]),
        (register(memory=[SharedFd(0, SIZE), SharedFd(1, HUGE)]), [str(HUGE), "registration states"]),
        (register(lambda: memory(4096)), ["holds 4096 bytes", f"registration states {SIZE}"]),
        (register(lambda: memory(WORDS * 8), place=2), ["state word page", "F_SEAL_SHRINK"]),
        (register(lambda: os.open("/dev/null", os.O_RDWR)), ["registration states"]),
        (register(lambda: os.open("/", os.O_RDONLY)), ["registration states"]),
        (register(lambda: os.eventfd(0)), ["registration states"]),
        (register(end_of_pipe), ["registration states"]),
        (register(read_only), ["mmap of", "Permission denied"]),
    ],
    ErrorCode.BAD_KEYS: [
        (lookup(keys=bytes(31)), ["31 bytes", WHOLE_KEYS]),
        (lookup(chunk_blocks=5), ["per 5 blocks", "registered 4"]),
        *((copy(load, keys=b"odd"), ["3 bytes", WHOLE_KEYS]) for load in BOTH),
        *((copy(False, after=after), [f"after holds {len(after)} bytes", "one key of 32"]) for after in (b"", b"odd", bytes(64))),
        *((copy(load, group=1), ["object group 1", "registered 1"]) for load in BOTH),
        *((copy(load, chunk_blocks=5), ["per 5 blocks", "group 0 have 4"]) for load in BOTH),
        (contents(hashes=bytes(7 * 32)), ["8 blocks", "(224, 512) bytes instead of (256, 512)"]),
        (contents(hashes=b""), ["(0, 512)"]),
        (contents(hashes=bytes(24 * 32)), ["8 blocks", "(768, 512)"]),
        (contents(tokens=bytes(511)), ["(256, 511)"]),
        (contents(parent=bytes(31)), ["a parent of 31"]),
        (contents(extra_keys=bytes(8 * 1024 + 1)), ["8193 bytes", "at most 1024 a block"]),
    ],
    ErrorCode.BAD_BLOCKS: [
        *((copy(load, blocks), words) for load in BOTH for blocks, words in (
            ([1, 2, 3, 64], ["block id 64 is out of range", "64 blocks"]),
            ([1, 2, 3, 2**32 - 1], ["block id 4294967295 is out of range"]),
            ([1, 2, 3, 2], ["block id 2 is named more than once"]),
            ([1, 2, 3, 0], ["block id 0 is the null block"]),
            ([1, 2, 3, 4, 5], ["more than 4 ids", "4 blocks"]),
            ([], ["holds 0 bytes", "4 blocks of 4 bytes"]),
        )),
        *((copy(load, block_ids=b"\1\2"), ["2 bytes", "cut off", "4 blocks"]) for load in BOTH),
        (copy(False, [1, 2, 3]), ["12 bytes", "4 blocks"]),
        (ask(lambda w: w.load_message(make_keys(2), [1, 2, 3, 4], skip=4)), ["skip_blocks 4"]),
        (ask(lambda w: w.load_message(make_keys(2), [1, 2, 3, 4])), ["holds 16 bytes", "5 to 8"]),
        (ask(lambda w: w.load_message(make_keys(2), [1, 2, 3], skip=1)), ["holds 12 bytes"]),
    ],
    ErrorCode.BAD_RECORDS: [
        (report(b"12345"), ["5 bytes", "4 bytes"]),
        (report(ids([7 << 29])), ["operation 7", "0 to 6"]),
    ],
    ErrorCode.REPORT_GAP: [(report(b""), ["send the full state"])],
    ErrorCode.NOT_FOUND: [(missing, ["1 of 3 chunks are not READY"])],
}  # fmt: skip
# The codes of copies under way, of devices, of bugs and of L2: test_failures.py, test_device_loss.py, issues/, test_spill.py.
OTHERS = {
    ErrorCode.CANCELLED,
    ErrorCode.MEMORY_LOST,
    ErrorCode.NO_DESCRIPTORS,
    ErrorCode.DEVICE_LOST,
    ErrorCode.INTERNAL,
    ErrorCode.STORAGE,
    ErrorCode.SHARED,
}
