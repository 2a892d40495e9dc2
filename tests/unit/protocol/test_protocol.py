"""The one decoder: the messages that it accepts, and one typed error for any other input."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import damaged, examples
from support.registration import identity
from support.worker import packed, wire_form

from kvserver.protocol import (
    KEY_BYTES,
    MAX_CHUNKS,
    PROTOCOL_VERSION,
    Attach,
    Attached,
    AwaitFill,
    ChunkContents,
    Clear,
    Cleared,
    DescribeScheduler,
    EndRequest,
    EngineLoad,
    Error,
    ErrorCode,
    ExactRecords,
    Heartbeat,
    Hello,
    HelloReply,
    KVBlocks,
    KVEventsTaken,
    KVGroup,
    KVServerError,
    Lookup,
    LookupReply,
    LookupTail,
    ObjectGroup,
    Plane,
    Registered,
    RegisterWorker,
    ReportBlockAllocations,
    Retrieve,
    Retrieved,
    SharedFd,
    Status,
    StatusReply,
    Store,
    Stored,
    TakeKVEvents,
    Unregistered,
    UnregisterWorker,
    decode_attach,
    decode_attach_reply,
    decode_reply,
    decode_request,
    encode,
)
from kvserver.protocol import messages as protocol
from kvserver.protocol.status import DaemonStatus, L1Status

KEYS = bytes(range(KEY_BYTES)) * 2
COPY: dict[str, Any] = {
    "boot_id": "b",
    "registration": 1,
    "chunk_blocks": 4,
    "keys": KEYS,
    "block_ids": packed(range(1, 9)),
    "word": 3,
    "sequence": 1 << 40,
    "deadline_ns": (1 << 63) - 1,
}
REQUESTS = [
    Hello(protocol_version=1, client="test"),
    RegisterWorker(
        instance_id="i",
        incarnation="n",
        model_name="m",
        rank=1,
        world_size=2,
        attachment=7,
        memory=[SharedFd(index=0, size_bytes=1 << 40)],
        words=64,
        planes=[Plane(0, 0, 64, 64), Plane(0, 1 << 39, 32, 16)],
        num_blocks=1 << 20,
        block_tokens=16,
        chunk_blocks=16,
        groups=(ObjectGroup("full", (0,), 16), ObjectGroup("window", (1, 2), 16, tokens=127, replicated=True)),
        counted=identity(),
        private="no weight files",
    ),
    UnregisterWorker(boot_id="b", registration=1),
    Lookup(instance_id="i", incarnation="n", request_id="r", chunk_blocks=16, keys=KEYS, variant="lora"),
    LookupTail(instance_id="i", incarnation="n", request_id="r", tail_keys=KEYS),
    AwaitFill(Lookup(instance_id="i", incarnation="n", request_id="r", chunk_blocks=16, keys=KEYS), wait_ms=2000),
    Store(**COPY, contents=ChunkContents(32, KEYS, bytes(64), bytes(32), "lora")),
    Store(**COPY, group=1, dropped=KEYS),
    Retrieve(**COPY, skip_blocks=3, group=1, tokens=100, messages=2),
    Clear(),
    Status(),
    ReportBlockAllocations(
        instance_id="i", incarnation="n", model_name="m", sequence=0, payload=ExactRecords(bytes(8), bytes(16))
    ),
    EndRequest(instance_id="i", incarnation="n", model_name="m", sequence=1, request_id="r"),
    Heartbeat(boot_id="b"),
    DescribeScheduler(
        instance_id="i",
        incarnation="n",
        model_name="m",
        variant="v",
        hash_form="int",
        groups=(KVGroup("sliding_window", 64),),
    ),
    TakeKVEvents(instance_id="i", incarnation="n", follow=1, cursor=2),
    EngineLoad(
        instance_id="i", incarnation="n", model_name="m", interval_seconds=1.0, running=1, waiting=2, kv_cache_usage=0.5
    ),
]
REPLIES = [
    HelloReply(
        protocol_version=1, server_version="0", boot_id="b", chunk_tokens=256, fd_path="/tmp/x.fd", token="secret"
    ),
    Registered(registration=1, namespace="ab"),
    Unregistered(),
    LookupReply(hit_chunks=2, full_chunks=3),
    Stored(stored=1, skipped=2, starved=3),
    Retrieved(chunks=1),
    Cleared(chunks=4),
    StatusReply(status=msgspec.Raw(msgspec.msgpack.encode(DaemonStatus(l1=L1Status(chunks=1))))),
    KVEventsTaken(
        follow=1, cursor=2, events=[KVBlocks(True, "CPU", 32, bytes(32), 0, 16, bytes(32), bytes(64))], whole=True
    ),
    Error(code="late", message="too late"),
]


def type_name(message: object) -> str:
    return type(message).__name__


def raw(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def changed(message: Any, **changes: Any) -> bytes:
    return msgspec.msgpack.encode(wire_form(message, **changes))


def refusal(payload: bytes) -> str:
    with pytest.raises(KVServerError) as caught:
        decode_request(payload)
    assert caught.value.code is ErrorCode.BAD_MESSAGE
    assert len(caught.value.message) < 2000
    return caught.value.message


def message_of(name: str) -> Any:
    return next(message for message in REQUESTS if type_name(message) == name)


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message in REQUESTS} == set(get_args(protocol.Request))
    assert {type(message) for message in REPLIES} == set(get_args(protocol.Reply))


@pytest.mark.parametrize("message", REQUESTS, ids=type_name)
def test_requests_come_back_as_they_were_sent(message: Any) -> None:
    assert decode_request(encode(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=type_name)
def test_replies_come_back_as_they_were_sent(message: Any) -> None:
    assert decode_reply(encode(message)) == message


def test_attachments_come_back_as_they_were_sent() -> None:
    assert decode_attach(encode(Attach(token="t"))) == Attach(token="t")
    for reply in (Attached(attachment=1), Error(code="bad_token", message="no")):
        assert decode_attach_reply(encode(reply)) == reply


@pytest.mark.parametrize("message", REQUESTS, ids=type_name)
def test_the_type_of_a_message_is_its_name_on_the_wire(message: Any) -> None:
    content = msgspec.msgpack.decode(encode(message))
    assert (content[0] if isinstance(content, list) else content["type"]) == type_name(message)


@pytest.mark.parametrize("message", REQUESTS, ids=type_name)
def test_a_field_that_a_later_version_adds_is_ignored(message: Any) -> None:
    assert decode_request(changed(message, invented_later=[1, 2])) == message


@pytest.mark.parametrize("message", REPLIES, ids=type_name)
def test_a_reply_is_no_request(message: Any) -> None:
    assert type_name(message) in refusal(encode(message))


@pytest.mark.parametrize("message", REQUESTS, ids=type_name)
def test_a_missing_field_is_named(message: Any) -> None:
    for field in msgspec.structs.fields(message):
        if not field.required:
            continue
        content = wire_form(message)
        if isinstance(content, list):  # what is missing of an array is missing from its end
            del content[1 + [f.name for f in msgspec.structs.fields(message)].index(field.name) :]
        else:
            del content[field.name]
        assert f"`{field.name}`" in refusal(msgspec.msgpack.encode(content))


@pytest.mark.parametrize("message", REQUESTS, ids=type_name)
def test_a_field_of_a_wrong_type_is_named(message: Any) -> None:
    for field in msgspec.structs.fields(message):
        assert f"$.{field.name}" in refusal(changed(message, **{field.name: {"not": "this"}}))


@pytest.mark.parametrize("message", REQUESTS, ids=type_name)
def test_what_an_older_version_left_out_has_its_default(message: Any) -> None:
    optional = {f.name: f.default for f in msgspec.structs.fields(message) if not f.required}
    content = wire_form(message)
    if isinstance(content, list):
        content = content[: len(content) - len(optional)]
    else:
        content = {name: value for name, value in content.items() if name not in optional}
    assert decode_request(msgspec.msgpack.encode(content)) == msgspec.structs.replace(message, **optional)


@pytest.mark.parametrize("message", REQUESTS, ids=type_name)
def test_the_error_for_a_message_in_the_other_form_states_which_form_is_which(message: Any) -> None:
    content = wire_form(message)
    if isinstance(content, list):
        fields = msgspec.structs.fields(message)
        other: Any = {"type": content[0], **{f.name: v for f, v in zip(fields, content[1:], strict=True)}}
    else:
        other = list(content.values())
    refused = refusal(msgspec.msgpack.encode(other))
    assert (
        "array (Lookup, LookupTail, AwaitFill, Store, Retrieve)" in refused
        if isinstance(other, list)
        else "map" in refused
    )
    assert type_name(message) in refused
    assert "`$.type`" in refused


FOREIGN = f"not a request of protocol {PROTOCOL_VERSION}"
ALIEN = {  # and a word of the error
    "nothing": (b"", "truncated"),
    "a number": (b"\x01", ""),
    "a list": (msgspec.msgpack.encode([1, 2]), ""),
    "JSON": (b'{"type": "Hello", "protocol_version": 1}', FOREIGN),
    "a list that names no type": (msgspec.msgpack.encode([None, 1]), ""),
    "a list of a type that is a map": (msgspec.msgpack.encode(["Hello", 1]), "Invalid value 'Hello'"),
    "a list of a type that looks like a position": (msgspec.msgpack.encode(["`$[" + "9" * 10_000 + "]`"]), ""),
    "an empty list": (msgspec.msgpack.encode([]), "missing required field `type`"),
    "no type": (raw(protocol_version=1), "missing required field `type`"),
    "an unknown type": (raw(type="Helo", protocol_version=1), "Invalid value 'Helo'"),
    "a type that is a number": (raw(type=7), "Expected `str`"),
    "a message within a message": (raw(type="_Copy", **COPY), ""),
    "the never-used byte": (b"\xc1" * 50, FOREIGN),
    "text that is not UTF-8": (b"\x82\xa4type\xa5Hello\xa6client\xa2\xff\xfe", FOREIGN),
    "an array that claims 4 billion items": (b"\xdd\xff\xff\xff\xff", ""),
    "a map that claims 4 billion items": (b"\xdf\xff\xff\xff\xff", ""),
    "a text that claims 4 gigabytes": (b"\x81\xa4type\xdb\xff\xff\xff\xff", ""),
    "bytes that claim 4 gigabytes": (b"\x81\xa4type\xc6\xff\xff\xff\xff", ""),
    "a hundred thousand nested lists": (b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 100_000, FOREIGN),
    "a store of a hundred thousand nested lists": (b"\x99\xa5Store" + b"\x91" * 100_000, ""),
    "a store that is cut off": (encode(Store(**COPY))[:-3], "truncated"),
    "a store whose type is not UTF-8": (b"\x99\xa5\xff\xfe\xff\xfe\xff" + bytes(8), ""),
    "a hundred thousand nested maps": (b"\x82\xa4type\xa5Hello\xa1x" + b"\x81\xa1a" * 100_000, ""),
    "an extension": (b"\xc7\x04\x05abcd", ""),
    "two messages": (encode(Status()) * 2, "trailing"),
    "two stores": (encode(Store(**COPY)) * 2, "trailing"),
    "a type that is very long": (raw(type="N" * 100_000), "Invalid value 'NNN"),
    "a list of a type that is very long": (msgspec.msgpack.encode(["N" * 100_000]), "Invalid value 'NNN"),
    "a pickle": (b"\x80\x04\x95\x0b\x00.", FOREIGN),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", FOREIGN),
    "a number for text": (raw(type="Hello", protocol_version=1.5), "Expected `int`, got `float`"),
}


@pytest.mark.parametrize(("payload", "word"), ALIEN.values(), ids=ALIEN)
def test_payload_that_is_no_message_is_one_typed_error(payload: bytes, word: str) -> None:
    assert word in refusal(payload)


HOSTILE = [
    ("Lookup", "keys", bytes(MAX_CHUNKS * KEY_BYTES + 1)),
    ("Lookup", "chunk_blocks", 0),
    ("Lookup", "request_id", ""),
    ("Lookup", "request_id", "x" * 10_000),
    ("Lookup", "variant", "x" * 10_000),
    ("Store", "word", -1),
    ("Store", "word", 1 << 21),
    ("Store", "sequence", 1 << 63),
    ("Store", "sequence", (1 << 64) - 1),
    ("Store", "deadline_ns", -1),
    ("Store", "keys", bytes(MAX_CHUNKS * KEY_BYTES + KEY_BYTES)),
    ("Retrieve", "skip_blocks", 1 << 40),
    ("RegisterWorker", "rank", 1 << 30),
    ("RegisterWorker", "world_size", 0),
    ("RegisterWorker", "world_size", 1 << 30),
    ("RegisterWorker", "memory", []),
    ("RegisterWorker", "memory", [{"type": "SharedFd", "index": 0, "size_bytes": 0}]),
    ("RegisterWorker", "memory", [{"type": "SharedFd", "index": 0, "size_bytes": 1 << 63}]),
    ("RegisterWorker", "memory", [{"type": "SharedFd", "index": 0, "size_bytes": 1}] * 251),
    ("RegisterWorker", "memory", [{"type": "Other", "index": 0, "size_bytes": 1}]),
    ("RegisterWorker", "words", 0),
    ("RegisterWorker", "planes", []),
    ("RegisterWorker", "planes", [{"memory": 0, "offset": 0, "stride_bytes": 1, "run_bytes": 1}] * 65537),
    ("RegisterWorker", "planes", [{"memory": 0, "offset": -1, "stride_bytes": 1, "run_bytes": 1}]),
    ("RegisterWorker", "num_blocks", 0),
    ("RegisterWorker", "num_blocks", 1 << 40),
    ("RegisterWorker", "block_tokens", 0),
    ("RegisterWorker", "chunk_blocks", -1),
    ("RegisterWorker", "planes", [[0, 0, 1, 1]] * 3),
    ("RegisterWorker", "planes", [{"memory": 0, "offset": 0, "stride_bytes": 0, "run_bytes": 0}]),
    ("RegisterWorker", "planes", [{"memory": 0, "offset": 1 << 63, "stride_bytes": 0, "run_bytes": 1}]),
    ("RegisterWorker", "groups", [{"kind": "ring", "members": [0], "block_tokens": 16}]),
    ("RegisterWorker", "groups", [{"kind": "full", "members": [], "block_tokens": 16}]),
    ("RegisterWorker", "groups", [{"kind": "full", "members": [64], "block_tokens": 16}]),
    ("RegisterWorker", "groups", [{"kind": "full", "members": [0], "block_tokens": 0}]),
    ("RegisterWorker", "groups", [{"kind": "full", "members": [0], "block_tokens": 16}] * 17),
    ("RegisterWorker", "counted", [["dtype"]]),
    ("RegisterWorker", "counted", [["", "digest"]]),
    ("RegisterWorker", "counted", [["x" * 513, ""]]),
    ("RegisterWorker", "counted", [["name", "digest"]] * 4097),
    ("EngineLoad", "kv_cache_usage", math.nan),
    ("EngineLoad", "kv_cache_usage", math.inf),
    ("EngineLoad", "kv_cache_usage", -0.1),
    ("EngineLoad", "interval_seconds", math.nan),
    ("EngineLoad", "interval_seconds", math.inf),
    ("EngineLoad", "interval_seconds", 0),
    ("EngineLoad", "running", -1),
    ("EngineLoad", "prompt_tokens", 1 << 63),
    ("EngineLoad", "front_end", 1024),
]


@pytest.mark.parametrize(("name", "field", "value"), HOSTILE, ids=lambda value: str(value)[:20])
def test_a_number_or_length_out_of_bounds_is_named(name: str, field: str, value: Any) -> None:
    assert f"$.{field}" in refusal(changed(message_of(name), **{field: value}))


@pytest.mark.parametrize(
    ("contents", "bound"),
    [
        ([7, b"", b""], ">= 8"),
        ([33, b"", b""], "<= 32"),
        ([32, b"", b"", bytes(33)], "length <= 32"),
        ([32, b"", b"", b"", "x" * 513], "length <= 512"),
    ],
)
def test_the_bound_of_a_number_or_length_in_contents_is_named(contents: list[Any], bound: str) -> None:
    assert bound in refusal(changed(message_of("Store"), contents=contents))


def test_the_largest_lookup_is_taken() -> None:
    largest = Lookup("i", "n", "r", 1, bytes(MAX_CHUNKS * KEY_BYTES))
    assert decode_request(encode(largest)) == largest


@given(payload=damaged(st.sampled_from([encode(message) for message in REQUESTS])))
@examples(500)
def test_damaged_messages_are_read_or_refused_but_nothing_else(payload: bytes) -> None:
    code = ErrorCode.BAD_MESSAGE
    try:
        decode_request(payload)
    except KVServerError as error:
        code = error.code
    assert code is ErrorCode.BAD_MESSAGE
