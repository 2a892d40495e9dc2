"""Every bad input gets a typed error that states what was wrong and what was expected; the loop goes on."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import sys
import termios
import time

import msgspec
import pytest
from support.daemon import wait_until
from support.memory import Geometry, awkward
from support.raw import REQUEST_ID, RawPeer
from support.registration import WORDS
from support.worker import Worker, ids, make_keys, wire_form

from kvserver._native import State
from kvserver.protocol import (
    KEY_BYTES,
    MARK,
    MAX_CHUNKS,
    PROTOCOL_VERSION,
    Attach,
    Attached,
    ChunkContents,
    Clear,
    EndRequest,
    Error,
    ExactRecords,
    Heartbeat,
    Hello,
    HelloReply,
    Lookup,
    ModelIdentity,
    Plane,
    ReportBlockAllocations,
    SharedFd,
    Stored,
    TakeKVEvents,
    UnregisterWorker,
    decode_attach_reply,
    encode,
)
from kvserver.protocol.client import Attachment, RequestFailed

HELLO = encode(Hello(protocol_version=PROTOCOL_VERSION))


@pytest.fixture
def peer(daemon):
    with RawPeer(daemon.endpoint) as raw:
        yield raw


@pytest.fixture(autouse=True)
def _still_serves(daemon):
    """After every test a normal worker stores and loads."""
    yield
    with Worker(daemon.endpoint) as worker:
        worker.round_trip()


def assert_error(error: Error, code: str, *words: str) -> None:
    assert error.code == code, error
    missing = [word for word in words if word not in error.message]
    assert not missing, f"{missing} not in {error.message!r}"
    assert len(error.message) < 2000


# ---- frames -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([b"x"], "got 1 frames of sizes [1]; expected 2"),
        ([b""], "got 1 frames of sizes [0]; expected 2"),
        ([REQUEST_ID], "got 1 frames of sizes [8]; expected 2"),
        ([b"short", HELLO], "got 2 frames"),
        ([b"", REQUEST_ID, HELLO], "got 3 frames"),
        ([REQUEST_ID, HELLO, b""], "got 3 frames of sizes [8, "),
        ([b"y"] * 500, "got 500 frames of sizes [1, 1, 1, 1, 1, 1, 1, 1]; expected 2"),
    ],
    ids=lambda value: f"{len(value)}-frames" if isinstance(value, list) else "",
)
def test_the_reply_to_wrong_frames_states_what_frames_are_expected(peer, frames, words):
    assert_error(peer.error(*frames), "bad_frames", words, "8-byte request id", "msgpack message")


def test_an_error_carries_the_request_id_when_there_was_one(peer):
    peer.send(REQUEST_ID, b"\xc1")
    assert peer.receive()[0] == REQUEST_ID
    peer.send(REQUEST_ID, HELLO, b"more")
    assert peer.receive()[0] == REQUEST_ID
    peer.send(b"?", HELLO)
    assert peer.receive()[0] == bytes(8)


# ---- messages ---------------------------------------------------------------------------------

LOOKUP = Lookup(instance_id="i", incarnation="n", request_id="r", chunk_blocks=4, keys=bytes(KEY_BYTES))


def test_the_reply_to_an_unreadable_message_names_the_wrong_field(peer):
    assert_error(
        peer.error(REQUEST_ID, b"\xc1\xff\xfe"), "bad_message", f"not a request of protocol {PROTOCOL_VERSION}"
    )
    assert_error(peer.error_of(wire_form(LOOKUP, chunk_blocks=0)), "bad_message", ">= 1", "$.chunk_blocks")


def test_the_reply_to_a_message_over_the_limit_states_both_numbers(daemon, peer):
    size = 4 * 2**20 + 1
    assert_error(peer.error(REQUEST_ID, bytes(size)), "too_large", f"{size} bytes", f"limit is {4 * 2**20}", "split")


def test_a_message_far_over_the_limit_ends_only_its_own_connection(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    with RawPeer(daemon.endpoint) as peer:
        before = daemon.rss_bytes()
        for _ in range(3):
            peer.send(REQUEST_ID, bytes(64 * 2**20 + 1))
        with pytest.raises(TimeoutError):
            peer.receive(0.3)
        assert daemon.rss_bytes() - before < 50 * 2**20
    worker.round_trip()


# ---- versions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, -1, PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 1, 2**63])
def test_a_version_mismatch_names_both_versions(peer, version):
    error = peer.error_of({"type": "Hello", "protocol_version": version})
    assert_error(
        error,
        "version_mismatch",
        f"client speaks protocol {version}",
        f"speaks {PROTOCOL_VERSION - 1} to {PROTOCOL_VERSION}",
    )


def test_the_previous_version_is_served_and_its_identity_separates_engines(daemon, make_worker):
    facts = dict.fromkeys(("dtype", "kv_dtype", "parallel", "hash_algorithm"), "x")
    keys = make_keys(2)

    def connected(model: str) -> Worker:
        worker = make_worker(daemon, connect_now=False)
        assert worker.client.ask(Hello(PROTOCOL_VERSION - 1), HelloReply).protocol_version == PROTOCOL_VERSION - 1
        worker.attach()
        return worker.register(counted=(), identity=ModelIdentity(model=model, **facts))

    cold, same, other = connected("one"), connected("one"), connected("another")
    cold.store(keys, cold.blocks_for(2))
    assert (same.lookup(keys), other.lookup(keys)) == (2, 0)


# ---- who is asking ----------------------------------------------------------------------------


def test_unknown_instances_are_named(worker):
    lookup = Lookup(instance_id="who", incarnation="x", request_id="r", chunk_blocks=4, keys=bytes(32))
    end = EndRequest(instance_id="who", incarnation="x", model_name="m", sequence=0, request_id="r")
    report = ReportBlockAllocations("who", "x", "m", sequence=0, payload=ExactRecords(records=b"", marks=b""))
    for message in (lookup, end, report, Clear(instance_id="who")):
        assert_error(worker.error_of(message), "unknown_instance", "'who'", "registered")


def test_another_incarnation_of_an_instance_is_refused(worker):
    lookup = worker.lookup_message(make_keys(1), incarnation="other")
    assert_error(worker.error_of(lookup), "duplicate_instance", worker.instance_id, "engine_id")


@pytest.mark.parametrize(("rank", "world"), [(1, 1), (2, 2), (4000, 3)])
def test_a_rank_outside_its_world_is_refused(daemon, make_worker, rank, world):
    worker = make_worker(daemon, connect_now=False)
    worker.attach()
    error = worker.error_of(worker.registration(rank=rank, world_size=world))
    assert_error(error, "unknown_rank", f"rank {rank} of a world of {world}")


def test_a_rank_that_is_taken_is_refused(daemon, make_worker, worker):
    second = make_worker(daemon, instance_id=worker.instance_id, incarnation=worker.incarnation, connect_now=False)
    second.attach()
    assert_error(second.error_of(second.registration()), "duplicate_instance", "rank 0", "registered already")


def test_unknown_registrations_are_named(worker):
    keys, blocks = make_keys(1), worker.blocks_for(1)
    boot = worker.hello.boot_id
    for message in (
        worker.store_message(keys, blocks, registration=4711),
        worker.load_message(keys, blocks, registration=4711),
        UnregisterWorker(boot_id=boot, registration=4711),
    ):
        assert_error(worker.error_of(message), "stale_registration", "4711", "no longer")


def test_the_reply_to_messages_for_another_boot_demands_a_new_registration(worker):
    keys, blocks = make_keys(1), worker.blocks_for(1)
    for message in (
        worker.store_message(keys, blocks, boot_id="before"),
        worker.load_message(keys, blocks, boot_id="before"),
        UnregisterWorker(boot_id="before", registration=worker.number),
        Heartbeat(boot_id="before"),
    ):
        assert_error(worker.error_of(message), "stale_boot", "'before'", worker.hello.boot_id, "register again")


# ---- keys and blocks --------------------------------------------------------------------------


def copies(worker: Worker, keys: list[bytes], blocks: list[int], /, **changes: object):
    """The same bad copy as a store and as a load."""
    return [
        msgspec.structs.replace(make(keys, blocks), **changes) for make in (worker.store_message, worker.load_message)
    ]


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([1, 2, 3, 64], ["block id 64 is out of range", "64 blocks"]),
        ([1, 2, 3, 2**32 - 1], ["block id 4294967295 is out of range"]),
        ([1, 2, 3, 2], ["block id 2 is named more than once"]),
        ([1, 2, 3, 0], ["block id 0 is the null block"]),
        ([1, 2, 3, 4, 5], ["more than 4 ids", "4 blocks"]),
        ([], ["holds 0 bytes", "4 blocks of 4 bytes"]),
    ],
)
def test_bad_block_ids_are_named(worker, blocks, words):
    keys = make_keys(1)
    worker.store(keys, worker.blocks_for(1, first=20))
    for message in copies(worker, keys, blocks):
        assert_error(worker.error_of(message), "bad_blocks", *words)


def test_a_store_of_part_of_a_chunk_is_refused(worker):
    assert_error(worker.error_of(worker.store_message(make_keys(1), [1, 2, 3])), "bad_blocks", "12 bytes", "4 blocks")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"123456789012345", "neither ids nor runs"),
        (b"\1\2", "cut off"),
        (b"\1\2\x80\x80\x80\x80\x10", "more than 4 ids"),
        (b"\0" + b"\xff" * 9, "too large"),
    ],
)
def test_block_ids_that_cannot_be_unpacked_are_refused(worker, raw, words):
    for message in copies(worker, make_keys(1), [1, 2, 3, 4], block_ids=raw):
        assert_error(worker.error_of(message), "bad_blocks", f"{len(raw)} bytes", words, "4 blocks")


def test_a_load_that_leaves_out_a_whole_chunk_is_refused(worker):
    keys = make_keys(2)
    worker.store(keys, worker.blocks_for(2))
    assert_error(worker.error_of(worker.load_message(keys, [1, 2, 3, 4], skip=4)), "bad_blocks", "skip_blocks 4")
    assert_error(worker.error_of(worker.load_message(keys, [1, 2, 3, 4])), "bad_blocks", "holds 16 bytes", "5 to 8")
    assert_error(worker.error_of(worker.load_message(keys, [1, 2, 3], skip=1)), "bad_blocks", "holds 12 bytes")


def test_many_repeated_block_ids_do_not_hold_up_the_loop(daemon, make_worker):
    """The loop once took minutes to name the repeated id of a long list."""
    count = 4 * MAX_CHUNKS
    plane = Plane(0, 0, 1, 1)
    worker = make_worker(daemon, geometry=Geometry(2 * count, 16, sizes=(2 * count,), planes=(plane,)))
    blocks = [*range(1, count), count - 1]
    error = worker.reply_to(worker.send(worker.store_message(make_keys(MAX_CHUNKS), blocks)), 60)
    assert isinstance(error, Error)
    assert_error(error, "bad_blocks", f"block id {count - 1} is named more than once")


@pytest.mark.parametrize("length", [0, 1, KEY_BYTES - 1, KEY_BYTES + 1, 5 * KEY_BYTES - 1])
def test_keys_that_are_not_whole_are_refused(worker, length):
    words = f"{length} bytes", f"whole keys of {KEY_BYTES}"
    lookup = worker.lookup_message([bytes(length)])
    for message in (lookup, *copies(worker, make_keys(1), [1, 2, 3, 4], keys=bytes(length))):
        assert_error(worker.error_of(message), "bad_keys", *words)


def test_keys_of_another_chunk_size_are_refused(worker):
    keys = make_keys(1)
    lookup = worker.lookup_message(keys, chunk_blocks=5)
    for message in (lookup, *copies(worker, keys, [1, 2, 3, 4, 5], chunk_blocks=5)):
        assert_error(worker.error_of(message), "bad_keys", "per 5 blocks", "registered 4")


def test_a_load_of_chunks_that_are_not_there_reports_how_many(worker):
    keys = make_keys(3)
    worker.store(keys[1:], worker.blocks_for(2))
    error = worker.error_of(worker.load_message(keys, worker.blocks_for(3)))
    assert_error(error, "not_found", "1 of 3 chunks are not READY")


def test_of_a_store_larger_than_l1_the_prefix_that_fits_is_kept(daemon, make_worker):
    geometry = Geometry(300, 16, sizes=(300 * 65536,), planes=(Plane(0, 0, 65536, 65536),))
    worker = make_worker(daemon, geometry=geometry)
    assert worker.store(make_keys(65), worker.blocks_for(65)) == Stored(stored=64, skipped=0, starved=1)


def test_a_state_word_outside_its_page_is_refused(worker):
    for message in copies(worker, make_keys(1), [1, 2, 3, 4], word=WORDS):
        assert_error(worker.error_of(message), "bad_message", f"state word {WORDS}", f"page of {WORDS} words")


def test_a_copy_whose_deadline_has_passed_is_not_started(worker):
    keys = make_keys(1)
    worker.store(keys, worker.blocks_for(1))
    untouched = worker.memory.image()
    for message in (
        worker.load_message(keys, worker.blocks_for(1, first=20), deadline_ns=time.monotonic_ns() - 1),
        worker.store_message(make_keys(1), worker.blocks_for(1), deadline_ns=0),
    ):
        assert_error(worker.error_of(message), "late", "deadline had passed")
    assert worker.memory.image() == untouched


def test_nothing_is_evicted_for_a_store_whose_deadline_has_passed(make_daemon, make_worker):
    daemon = make_daemon(l1_size="1MiB")
    worker = make_worker(daemon)
    for _ in range(1000):
        worker.store(make_keys(1), worker.blocks_for(1))
        if daemon.status()["l1"]["evictions"]:
            break
    full = daemon.status()["l1"]
    assert full["evictions"] == 1
    late = worker.store_message(make_keys(8), worker.blocks_for(8), deadline_ns=time.monotonic_ns() - 1)
    assert_error(worker.error_of(late), "late", "deadline had passed")
    assert daemon.status()["l1"] == full


def test_the_word_of_a_refused_copy_reads_failed_before_its_reply(worker):
    keys = make_keys(1)
    for message in (
        *copies(worker, keys, [1, 2, 3, 999]),
        *copies(worker, keys, [1, 2, 3, 4], keys=b"odd"),
        *copies(worker, keys, [1, 2, 3, 4], deadline_ns=1),
        worker.load_message(keys, [1, 2, 3, 4]),
    ):
        operation = worker.begin(message)
        assert isinstance(operation.reply(), Error)
        assert operation.state == State.FAILED


# ---- registrations ----------------------------------------------------------------------------


def test_the_reply_to_registrations_that_do_not_fit_their_memory_states_the_numbers(daemon, make_worker):
    worker = make_worker(daemon, geometry=awkward(num_blocks=12), connect_now=False)
    plane = Plane(0, 0, 192, 192)
    size = worker.geometry.sizes[0]
    huge = 1 << 62
    for changes, code, words in [
        ({"planes": [plane, Plane(0, size - 191, 0, 192)], "num_blocks": 1}, "bad_planes", ["plane 1 ends outside", str(size)]),
        ({"planes": [Plane(0, 0, size, 192)]}, "bad_planes", ["plane 0 ends outside", f"stride {size}"]),
        ({"planes": [Plane(0, huge, 192, 192)]}, "bad_planes", ["plane 0 ends outside", f"offset {huge}"]),
        ({"planes": [Plane(0, 0, huge, 192)]}, "bad_planes", ["plane 0 ends outside", f"stride {huge}"]),
        ({"planes": [plane, Plane(2, 0, 1, 1)]}, "bad_planes", ["plane 1 names memory 2 of 2"]),
        ({"planes": [Plane(0, 0, 191, 192)]}, "bad_planes", ["plane 0", "overlap", "stride 191 < run 192"]),
        ({"num_blocks": 1 << 31}, "bad_planes", ["plane 0 ends outside", f"{1 << 31} blocks"]),
        ({"planes": [Plane(0, 0, huge, huge)]}, "too_large", ["one chunk", "L1 has 16777216", "--l1-size"]),
        ({"chunk_blocks": 5}, "bad_planes", ["chunk_blocks is 5", "64 chunk tokens", "16", "make 4"]),
        ({"memory": [SharedFd(0, size)]}, "bad_memory", ["3 descriptors", "0 to 1"]),
        ({"memory": [SharedFd(0, size), SharedFd(0, size)]}, "bad_memory", ["3 descriptors", "once"]),
        ({"memory": [SharedFd(0, size), SharedFd(7, size)]}, "bad_memory", ["3 descriptors", "0 to 1"]),
        ({"memory": [SharedFd(0, size), SharedFd(1, huge)]}, "bad_memory", [str(huge), "registration states"]),
        ({"words": WORDS + 1}, "bad_memory", [f"holds {WORDS * 8} bytes", f"states {WORDS * 8 + 8}"]),
        ({"counted": ()}, "bad_message", ["$.counted", "$.identity"]),
        ({"attachment": 999_999}, "unknown_attachment", ["999999", "Attach again"]),
    ]:  # fmt: skip
        worker.attach()
        error = worker.error_of(worker.registration(**changes))
        assert_error(error, code, *words)
        worker.hang_up()
    daemon.wait_for_accounting(mappings=0, attachments=0)
    assert daemon.open_memfds() == 0
    worker.connect().round_trip()


def test_memory_that_is_smaller_than_registered_is_refused(daemon, make_worker):
    worker = make_worker(daemon, connect_now=False)
    worker.memory.truncate(1, 4096)
    worker.attach()
    error = worker.error_of(worker.registration())
    assert_error(error, "bad_memory", "holds 4096 bytes", f"registration states {worker.geometry.sizes[1]}")


def test_an_unsealed_state_word_page_is_refused(daemon, make_worker):
    worker = make_worker(daemon, connect_now=False)
    unsealed = os.memfd_create("test-words", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, WORDS * 8)
    worker.attach([*worker.memory.fds, unsealed])
    os.close(unsealed)
    assert_error(worker.error_of(worker.registration()), "bad_memory", "state word page", "F_SEAL_SHRINK")


def test_descriptors_that_are_no_memory_are_refused(daemon, make_worker):
    worker = make_worker(daemon, connect_now=False)
    for odd in (os.open("/dev/null", os.O_RDWR), os.open("/", os.O_RDONLY), os.eventfd(0), *os.pipe()):
        worker.attach([odd, worker.memory.fds[1], worker.words.fd])
        os.close(odd)
        assert_error(worker.error_of(worker.registration()), "bad_memory", "registration states")
        worker.hang_up()


def test_memory_that_may_only_be_read_is_refused(daemon, make_worker, tmp_path):
    worker = make_worker(daemon, connect_now=False)
    path = tmp_path / "kv"
    path.write_bytes(bytes(worker.geometry.sizes[0]))
    read_only = os.open(path, os.O_RDONLY)
    worker.attach([read_only, worker.memory.fds[1], worker.words.fd])
    os.close(read_only)
    assert_error(worker.error_of(worker.registration()), "bad_memory", "mmap of", "Permission denied")


# ---- the .fd socket ---------------------------------------------------------------------------


@pytest.fixture
def hello(daemon, peer) -> HelloReply:
    peer.send(REQUEST_ID, HELLO)
    reply = peer.receive()[1]
    assert isinstance(reply, HelloReply)
    return reply


def connect(hello: HelloReply) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5)
    wait_until(lambda: connection.connect_ex(hello.fd_path) != errno.EAGAIN, what="room in the backlog")
    return connection


def unread(connection: socket.socket) -> int:
    """Bytes of sent messages that the other side has not received."""
    count = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(count, sys.byteorder)


def test_a_wrong_token_is_refused(daemon, hello):
    with pytest.raises(RequestFailed, match=r"bad_token: .*send Hello again"):
        Attachment(hello.fd_path, "guessed", [])


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1",
        b"\x00",
        b"\x81",
        HELLO,
        b"\x82\xa4type\xa6Attach\xa1x" + b"\x91" * 4000,
        msgspec.msgpack.encode({"type": "N" * 3900}),
        msgspec.msgpack.encode({"type": "Attach", "token": 7}),
        msgspec.msgpack.encode({"type": "Attach"}),
    ],
)
def test_garbage_on_the_fd_socket_gets_an_error_and_is_hung_up_on(daemon, hello, raw):
    with connect(hello) as connection:
        connection.send(raw)
        reply = decode_attach_reply(connection.recv(65536))
        assert isinstance(reply, Error)
        assert_error(reply, "bad_message")
        assert connection.recv(16) == b""


def test_an_attach_that_is_too_long_is_refused(daemon, hello):
    with connect(hello) as connection:
        connection.send(encode(Attach(token=hello.token)) + bytes(5000))
        reply = decode_attach_reply(connection.recv(65536))
        assert isinstance(reply, Error)
        assert_error(reply, "too_large")
        assert connection.recv(16) == b""


def test_too_many_descriptors_are_refused_and_closed(daemon, hello):
    fd = os.memfd_create("test-many")
    try:
        with pytest.raises(RequestFailed, match=r"too_large: .*at most 251 descriptors"):
            Attachment(hello.fd_path, hello.token, [fd] * 253)
    finally:
        os.close(fd)
    wait_until(lambda: daemon.open_memfds() == 0)


def test_descriptors_that_are_never_registered_are_closed_with_their_connection(daemon, hello):
    fd = os.memfd_create("test-unclaimed")
    attachment = Attachment(hello.fd_path, hello.token, [fd] * 200)
    os.close(fd)
    wait_until(lambda: daemon.open_memfds() == 200)
    attachment.close()
    wait_until(lambda: daemon.open_memfds() == 0)


def test_what_comes_after_attach_is_ignored(daemon, worker):
    fd = os.memfd_create("test-late")
    # The client library has no way to send more: this is what another one might do.
    connection = connect(worker.hello)
    try:
        socket.send_fds(connection, [encode(Attach(token=worker.hello.token))], [])
        assert isinstance(decode_attach_reply(connection.recv(4096)), Attached)
        for _ in range(20):
            socket.send_fds(connection, [b"noise"], [fd] * 10)
        wait_until(lambda: not unread(connection), what="the daemon has read all")
        worker.round_trip()
        wait_until(lambda: daemon.open_memfds() == 3, what="descriptors that no message named are closed")
    finally:
        connection.close()
        os.close(fd)


def test_an_attachment_serves_one_registration(daemon, make_worker, worker):
    second = make_worker(daemon, connect_now=False)
    second.attach()
    error = second.error_of(second.registration(attachment=worker.attachment.number))
    assert_error(error, "unknown_attachment", "used")


def test_an_attachment_without_descriptors_cannot_be_registered(daemon, make_worker):
    worker = make_worker(daemon, connect_now=False)
    worker.attach([])
    assert_error(worker.error_of(worker.registration()), "bad_memory", "0 descriptors")


def test_a_daemon_without_free_descriptors_refuses_connections_and_serves_on(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    held = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (held + 10, held + 10))
    connections = [connect(worker.hello) for _ in range(60)]
    worker.round_trip()
    refused = [c for c in connections[40:] if c.recv(1) == b""]
    assert len(refused) == 20
    assert daemon.log.count("refused a connection") < 200
    for connection in connections:
        connection.close()
    wait_until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= held)
    make_worker(daemon).round_trip()


# ---- notices ----------------------------------------------------------------------------------


def report(worker: Worker, sequence: int, records: bytes = b"", full: bool = False) -> ReportBlockAllocations:
    marks = MARK.pack(0, time.monotonic_ns()) if records else b""
    return worker.report_message(ExactRecords(records=records, marks=marks, full=full), sequence=sequence)


def end_request(worker: Worker, sequence: int, request_id: str = "r") -> EndRequest:
    return worker.end_message(request_id, sequence=sequence)


def requests_of(daemon, worker: Worker) -> dict[str, int]:
    return next(i["requests"] for i in daemon.status()["instances"] if i["instance_id"] == worker.instance_id)


def test_notices_are_not_answered_and_are_counted(daemon, worker):
    keys = make_keys(2)
    worker.store(keys, worker.blocks_for(2))
    worker.lookup(keys, request_id="leased")
    sent = [
        worker.send(report(worker, 0, ids([1 | 4 << 29, 2, 3 | 1 << 29]), full=True)),
        worker.send(end_request(worker, 1, "leased")),
        worker.send(Heartbeat(boot_id=worker.hello.boot_id)),
    ]
    assert worker.lookup(make_keys(1)) == 0  # answered after them
    for number in sent:
        with pytest.raises(TimeoutError):
            worker.reply_to(number, 0.02)
    found = requests_of(daemon, worker)
    assert (found["block_records"], found["ended_requests"], found["sequence_gaps"]) == (3, 1, 0)
    assert daemon.accounting()["leases"] == 0


@pytest.mark.parametrize("make", [report, end_request])
def test_a_notice_for_another_model_than_the_registered_one_is_refused(daemon, worker, make):
    stray = msgspec.structs.replace(make(worker, 0), model_name="another")
    error = worker.reply_to(worker.send(stray), 5)
    assert isinstance(error, Error)
    assert error.code == "unknown_instance"
    assert f"registered model {worker.model_name!r}, not 'another'" in error.message
    assert requests_of(daemon, worker)["block_records"] == 0


def test_gaps_in_the_sequence_of_notices_are_counted(daemon, worker):
    for sequence in (0, 1, 2, 5, 6, 6):  # two messages are missing, one comes twice
        worker.send(report(worker, sequence))
    worker.send(end_request(worker, 9))
    worker.lookup(make_keys(1))
    assert requests_of(daemon, worker)["sequence_gaps"] == 3


def test_the_reply_to_bad_records_states_what_is_expected(worker):
    error = worker.error_of(report(worker, 0, b"12345"))
    assert_error(error, "bad_records", "5 bytes", "4 bytes")
    error = worker.error_of(report(worker, 0, ids([7 << 29])))
    assert_error(error, "bad_records", "operation 7", "0 to 6")


# ---- what is in chunks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"hash_bytes": 7}, "bad_message", [">= 8"]),
        ({"hash_bytes": 33}, "bad_message", ["<= 32"]),
        ({"hashes": bytes(7 * 32)}, "bad_keys", ["8 blocks", "(224, 512) bytes instead of (256, 512)"]),
        ({"hashes": b""}, "bad_keys", ["(0, 512)"]),
        ({"tokens": bytes(511)}, "bad_keys", ["(256, 511)"]),
        ({"parent": bytes(31)}, "bad_keys", ["a parent of 31"]),
        ({"parent": bytes(33)}, "bad_message", ["length <= 32"]),
        ({"extra_keys": bytes(8 * 1024 + 1)}, "bad_keys", ["8193 bytes", "at most 1024 a block"]),
        ({"lora_name": "x" * 513}, "bad_message", ["length <= 512"]),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, dict) else "",
)
def test_contents_of_the_wrong_size_are_refused_and_nothing_is_stored(worker, changes, code, words):
    keys = make_keys(2)
    contents = ChunkContents(32, bytes(8 * 32), bytes(8 * 16 * 4))
    message = worker.store_message(keys, worker.blocks_for(2))
    message.contents = msgspec.structs.replace(contents, **changes)
    assert_error(worker.error_of(message), code, *words)
    assert worker.lookup(keys) == 0


def test_contents_that_belong_to_other_keys_do_not_keep_a_chunk_from_being_stored(daemon, worker):
    keys = make_keys(2)
    contents = ChunkContents(32, bytes(8 * 32), bytes(8 * 16 * 4), extra_keys=b"\xc1")
    before = daemon.status()["kv_events"]["unannounced"]["mismatched"]
    assert worker.store(keys, worker.blocks_for(2), contents=contents).stored == 2
    worker.round_trip()
    wait_until(lambda: daemon.status()["kv_events"]["unannounced"]["mismatched"] == before + 2)


def test_a_scheduler_and_a_load_of_another_model_or_engine_are_refused(worker):
    for message in (worker.description(), worker.stats_message()):
        other = msgspec.structs.replace(message, model_name="another")
        assert_error(worker.error_of(other), "unknown_instance", "not 'another'")
        other = msgspec.structs.replace(message, instance_id="who")
        assert_error(worker.error_of(other), "unknown_instance", "'who'")
        other = msgspec.structs.replace(message, incarnation="x")
        assert_error(worker.error_of(other), "duplicate_instance", worker.instance_id)
    take = TakeKVEvents(instance_id=worker.instance_id, incarnation="x")
    assert_error(worker.error_of(take), "duplicate_instance", worker.instance_id)
