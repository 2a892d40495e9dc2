"""The messages between engines and the server.

Frames: `[8-byte request id][msgpack]` over ZMQ DEALER/ROUTER. Every message is a tagged struct (tag
field `type`, the class name). A request gets exactly one reply, its own or `Error`; a notice
(`Notice` lists them) is answered only on error. Beside the endpoint, on the
Unix socket `HelloReply.fd_path`, `Attach` hands over file descriptors; that connection is the
worker's lifeline.

Two forms: Lookup, Store and Retrieve, of which a long prompt takes dozens, are msgpack arrays,
`[type, field, ...]` in the order of the struct; every other message is a map by field names. Errors name
fields in both.

How a version may change without becoming another: a map gains fields with defaults anywhere, an array at
its end only; whoever does not know a field ignores it, and one that is missing has its default. An array's
fields never move, leave or change their meaning: that is a new PROTOCOL_VERSION.

Owns: the structs, the version and the decoders. Refuses to know: what any message means to the cache.

Units: `*_ns` is CLOCK_MONOTONIC nanoseconds; `keys` is KEY_BYTES bytes per chunk; `block_ids` is a list of
u32 as `_native.pack_blocks` makes it, one per KV cache group for each block position: [position][group].
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Meta

from kvserver.protocol.errors import ErrorCode, KVServerError
from kvserver.protocol.fields import KEY_BYTES as KEY_BYTES
from kvserver.protocol.fields import MAX_CHUNKS as MAX_CHUNKS
from kvserver.protocol.fields import (
    ArrayMessage,
    Bytes,
    Keys,
    Label,
    Message,
    Name,
    Positive,
    Ratio,
    Size,
    Small,
    Text,
    Tokens,
    Unsigned,
)
from kvserver.protocol.planes import Plane
from kvserver.protocol.routing import ChunkContents, DescribeScheduler, EngineLoad, KVEventsTaken, TakeKVEvents

PROTOCOL_VERSION = 4
# 3 registers a ModelIdentity instead of counted fields; 2 has nothing of kv_messages; in 1 ReportBlockAllocations has records and time_ns and no payload. All else is alike.
OLDEST_PROTOCOL_VERSION = 1
REGISTERED = "registered"  # HelloReply.standing: all ranks have registered and agree
MAX_REPORTED_BLOCKS = 1 << 16  # in one message, however few bytes name them
REQUEST_ID_BYTES = 8

GpuUuid = Annotated[str, Meta(pattern="^(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
GpuHandle = Annotated[bytes, Meta(min_length=64, max_length=64)]


# ---- what a worker registers ------------------------------------------------------------------


class SharedFd(Message):
    """Memory behind the `index`-th descriptor that came with Attach."""

    index: Small
    size_bytes: Size


class CudaIpc(Message):
    """`size_bytes` from `offset` on of an allocation of GPU `device`, by its base's cudaIpcMemHandle."""

    device: GpuUuid
    handle: GpuHandle
    offset: Bytes
    size_bytes: Size


class CudaVmmFd(Message):
    """Likewise of a cuMemCreate allocation that the `index`-th descriptor of Attach stands for."""

    device: GpuUuid
    index: Small
    offset: Bytes
    size_bytes: Size


class CudaVmmFabric(Message):
    """Likewise by its fabric handle. An older engine may send it; it is refused."""

    device: GpuUuid
    handle: GpuHandle
    offset: Bytes
    size_bytes: Size


Memory: TypeAlias = SharedFd | CudaIpc | CudaVmmFd | CudaVmmFabric


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """A field of the engine's configuration, or a fact like one, that must agree before KV may be shared."""

    name: Name
    digest: Label
    value: Label = ""  # for people, of fields that are neither a place nor a secret


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Until protocol 3: everything beside geometry that must agree before KV may be shared. Opaque text to the server."""

    model: Text  # resolved commit, or a fingerprint of the local files
    overrides: Text = ""  # hf_overrides, rope
    dtype: Label
    kv_dtype: Label
    quantization: Text = ""
    parallel: Label  # TP/PP sizes and what they imply for ranks
    hash_algorithm: Label
    private: Label = ""  # non-empty: shared with nobody who does not name the same text


# ---- requests ---------------------------------------------------------------------------------


class Hello(Message):
    """`instance_id` and `incarnation`: of an engine, where its standing is wanted."""

    protocol_version: int
    client: Label = ""
    instance_id: Label = ""
    incarnation: Label = ""


class RegisterWorker(Message):
    instance_id: Name
    incarnation: Name  # one life of the instance; the same in all its processes
    model_name: Name
    rank: Small
    world_size: Annotated[int, Meta(gt=0, le=4096)]
    attachment: Unsigned
    memory: Annotated[list[Memory], Meta(min_length=1, max_length=250)]
    words: Annotated[int, Meta(gt=0, le=1 << 20)]  # state words in the page behind the last descriptor
    planes: Annotated[list[Plane], Meta(min_length=1, max_length=65536)]
    num_blocks: Positive
    block_tokens: Positive
    chunk_blocks: Positive  # blocks per chunk, from HelloReply.chunk_tokens
    identity: ModelIdentity | None = None  # until protocol 3
    layout: Text = ""  # how this rank's blocks are arranged: layers, shapes, strides, attention backends
    replicated: bool = False  # all ranks hold the same bytes (MLA): rank 0 stores them, any rank loads them
    counted: Annotated[tuple[Counted, ...], Meta(max_length=4096)] = ()  # what must agree beside geometry
    private: Text = ""  # why KV is shared with no other incarnation; "" if it is
    has_computed: bool = False  # this incarnation ran a step before: its blocks may have content


class UnregisterWorker(Message):
    boot_id: Label
    registration: Unsigned


class Lookup(ArrayMessage):
    """How many of these chunks, from the first on, are READY; takes a lease on them for the request."""

    instance_id: Name
    incarnation: Name
    request_id: Name
    chunk_blocks: Positive
    keys: Keys
    variant: Label = ""  # what may differ within one registration: start of the hash chain, weights epoch, LoRA
    tokens: Unsigned = 0  # of the whole prompt, also those beyond the last full chunk; 0: not told
    traceparent: Label = ""  # W3C trace context of the request, if the engine was sent one


class _Copy(ArrayMessage):  # complete: a later field goes to the end of Store and of Retrieve
    boot_id: Label
    registration: Unsigned
    chunk_blocks: Positive
    keys: Keys
    block_ids: bytes
    word: Small  # index of the state word
    sequence: Unsigned  # what the word was armed with
    deadline_ns: Unsigned
    variant: Label = ""


class Store(_Copy):
    """Copy whole chunks from L0 to L1: chunk_blocks positions for each key."""

    request_id: Label = ""  # only where HelloReply.traces
    contents: ChunkContents | None = None  # only where HelloReply.kv_events, and from one rank


class Retrieve(_Copy):
    """Copy chunks from L1 to L0.

    `block_ids` leaves out the first `skip_blocks` positions of the first chunk, and may leave out the last
    ones of the last. Where there are several groups, id 0 leaves one group of a position alone, but not all.
    """

    skip_blocks: Small = 0
    request_id: Label = ""  # older engines: only where HelloReply.traces


class Clear(Message):
    """Forget everything, or what one instance can see."""

    instance_id: Label = ""


class Status(Message):
    pass


# ---- notices ----------------------------------------------------------------------------------


class ExactRecords(Message):
    """What one block pool did: u32 little-endian `operation << 29 | block_id` (RECORD_*), in order.

    `marks` says when: 16 bytes each, u64 little-endian (number of the first record meant, monotonic ns), ascending
    from record 0; each is the time of all records up to the next mark. With `full` the server forgets what it knew
    of the pool before it reads the records, which begin with the pool's whole state.
    """

    records: bytes
    marks: bytes
    pool: Small = 0
    full: bool = False


class Owned(msgspec.Struct, tag_field="type", tag="held", array_like=True):
    """A request owns these blocks: table positions [first_index, ...) of one KV cache group.

    `contents` names what is in the full ones, 8 bytes each from the first on; fewer than blocks where the last ones
    are partial. Engines without hashes leave it empty and give the u32 `tokens` of the positions instead.
    Where nothing is said of the content of a block that the request owns already, nothing about it has changed.
    """

    request_id: Name
    group: Small
    first_index: Small
    block_ids: bytes  # as pack_blocks() makes them
    blocks: Small  # how many those are
    contents: bytes = b""
    tokens: bytes = b""


class Released(msgspec.Struct, tag_field="type", tag="released", array_like=True):
    """A request no longer owns these blocks: it was preempted, or its table was replaced."""

    request_id: Name
    block_ids: bytes
    blocks: Small


class ReportedBlocks(Message):
    """For engines whose pool cannot be watched: who holds which block with which content."""

    time_ns: Unsigned
    block_tokens: Positive
    records: Annotated[list[Owned | Released], Meta(max_length=16384)]
    full: bool = False  # as in ExactRecords


class ReportBlockAllocations(Message):
    """What the engine's blocks did, exact or reported; an instance never mixes the two.

    REPORT_GAP answers it where the server lost track (a gap in `sequence`, an overflow of its own): the engine
    should send its full state next.
    """

    instance_id: Name
    incarnation: Name
    model_name: Name
    sequence: Unsigned  # counts this and EndRequest, from 0, without gaps
    payload: ExactRecords | ReportedBlocks | None = None
    records: bytes = b""  # version 1: ExactRecords of pool 0, all at time_ns
    time_ns: Unsigned = 0


class EndRequest(Message):
    instance_id: Name
    incarnation: Name
    model_name: Name
    sequence: Unsigned
    request_id: Name
    prefill_tokens_per_second: Ratio = 0.0  # the engine's present speed, if it knows
    prompt_tokens: Tokens = 0  # 0: not known, or the request ended before its prompt was whole
    local_tokens: Tokens = 0  # of them: the engine's own prefix cache had when it placed the request
    loaded_tokens: Tokens = 0  # of them: copied from this server; what is left of them the engine computed
    loads: Small = 0  # that ended, however many ranks took part; those after a preemption too
    failed_loads: Small = 0  # of them: failed on at least one rank
    # Why nothing was loaded of what a lookup found, if the engine knows: lookup_timeout, computes_all, whole_prompts_only or
    # weights_changed; "" else.
    not_loaded: Label = ""


class Heartbeat(Message):
    boot_id: Label


# ---- replies ----------------------------------------------------------------------------------


class HelloReply(Message):
    protocol_version: int
    server_version: str
    boot_id: str
    chunk_tokens: int
    fd_path: str
    token: str
    traces: bool = False  # whether requests should be named in Store; in Retrieve they always are
    kv_events: bool = False  # whether a Store should say what is in its chunks
    lease_seconds: float = 0.0  # how long a lookup protects what it found; 0: not told
    standing: str = ""  # of the engine that Hello named: REGISTERED, or the error code that says why not; "": not told
    standing_text: str = ""  # the same for people


class Registered(Message):
    registration: int
    namespace: str  # "" until all ranks have registered and agree


class Unregistered(Message):
    pass


class LookupReply(Message):
    hit_chunks: int


class Stored(Message):
    """`stored` chunks are READY for this rank; `skipped` were there or on their way; `starved` found no room.

    Of replicated ranks all but rank 0 have everything skipped: what they hold is rank 0's to store.
    """

    stored: int
    skipped: int
    starved: int = 0


class Retrieved(Message):
    chunks: int


class Cleared(Message):
    chunks: int


class StatusReply(Message):
    status: dict[str, Any]


class Error(Message):
    code: str
    message: str


# ---- the .fd socket ---------------------------------------------------------------------------


class Attach(Message):
    token: Label


class Attached(Message):
    attachment: int
    says_detached: bool = False  # whether Detached comes before the end of the connection, unless the server dies


class Detached(Message):
    """The server's last: it neither reads nor writes the worker's memory any more, and ends the connection."""


# ---- block-pool records -----------------------------------------------------------------------

RECORD_OPERATION_SHIFT = 29
MARK = struct.Struct("<QQ")  # of ExactRecords.marks: number of the first record meant, monotonic ns
RECORD_ALLOCATED = 0  # given out: one owner; whatever it held before has ended
RECORD_ACCESSED = 1  # one owner more, of what it holds
RECORD_RELEASED = 2  # one owner less
RECORD_EVICTED = 3  # what it holds can no longer be found
RECORD_CLEARED = 4  # no block holds anything any more; the block id means nothing
RECORD_PRESENT = 5  # full state: it holds something, since nobody knows when
RECORD_OWNED = 6  # full state: and has one owner more

_ArrayRequest: TypeAlias = Lookup | Store | Retrieve
_MapRequest: TypeAlias = (
    Hello
    | RegisterWorker
    | UnregisterWorker
    | Clear
    | Status
    | ReportBlockAllocations
    | EndRequest
    | Heartbeat
    | DescribeScheduler
    | TakeKVEvents
    | EngineLoad
)
Request: TypeAlias = _ArrayRequest | _MapRequest
Notice = (ReportBlockAllocations, EndRequest, Heartbeat, DescribeScheduler, EngineLoad)
Reply: TypeAlias = (
    HelloReply
    | Registered
    | Unregistered
    | LookupReply
    | Stored
    | Retrieved
    | Cleared
    | StatusReply
    | KVEventsTaken
    | Error
)

AttachReply: TypeAlias = Attached | Error | Detached

T = TypeVar("T")
Payload: TypeAlias = ExactRecords | ReportedBlocks
_A_REQUEST = f"a request of protocol {PROTOCOL_VERSION}"
_encoder = msgspec.msgpack.Encoder()
_array_decoder: msgspec.msgpack.Decoder[_ArrayRequest] = msgspec.msgpack.Decoder(_ArrayRequest)
_map_decoder: msgspec.msgpack.Decoder[_MapRequest] = msgspec.msgpack.Decoder(_MapRequest)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_attach_decoder = msgspec.msgpack.Decoder(Attach)
_attach_reply_decoder: msgspec.msgpack.Decoder[AttachReply] = msgspec.msgpack.Decoder(AttachReply)


def encode(message: Message | ArrayMessage) -> bytes:
    return _encoder.encode(message)


def decode_request(raw: bytes) -> Request:
    """KVServerError(BAD_MESSAGE) says which field of which type is wrong."""
    if raw[:1] in _ARRAY_BYTES:
        return _decode(_array_decoder, raw, f"{_A_REQUEST} that is an array ({_ARRAY_NAMES})", _name_fields)
    return _decode(_map_decoder, raw, f"{_A_REQUEST} that is a map")


def payload_of(report: ReportBlockAllocations) -> Payload:
    """Also of version 1, which has only records of one moment."""
    if report.payload is not None:
        return report.payload
    return ExactRecords(records=report.records, marks=MARK.pack(0, report.time_ns))


def decode_reply(raw: bytes) -> Reply:
    return _reply_decoder.decode(raw)


def decode_attach(raw: bytes) -> Attach:
    """KVServerError(BAD_MESSAGE), as decode_request()."""
    return _decode(_attach_decoder, raw, f"an Attach of protocol {PROTOCOL_VERSION}")


def decode_attach_reply(raw: bytes) -> AttachReply:
    return _attach_reply_decoder.decode(raw)


def _decode(
    decoder: msgspec.msgpack.Decoder[T],
    raw: bytes,
    what: str,
    explain: Callable[[str, bytes], str] = lambda text, raw: text,
) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = explain(str(error), raw)
        if len(text) > 400:  # it may quote the message, and a peer's megabytes must not come back as a reply
            text = f"{text[:200]} [...] {text[-100:]}"
        raise KVServerError(ErrorCode.BAD_MESSAGE, f"not {what}: {text}") from None


# ---- fields of arrays, by name ------------------------------------------------------------------


class _Tag(msgspec.Struct, array_like=True):
    """The first item of any array: the rest is passed over without being made."""

    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tag)
_ARRAY_FIELDS = {t.__name__: ("type", *t.__struct_fields__) for t in get_args(_ArrayRequest)}
_ARRAY_NAMES = ", ".join(_ARRAY_FIELDS)
_ARRAY_BYTES = {bytes([first]) for first in (*range(0x90, 0xA0), 0xDC, 0xDD)}  # that msgpack begins an array with


def _name_fields(text: str, raw: bytes) -> str:
    """The decoder's complaint, with names for positions: `$[4]` of a Store is `$.keys`."""
    try:
        names = _ARRAY_FIELDS.get(_tag_decoder.decode(raw).type, ("type",))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        names = ("type",)
    if short := re.fullmatch(r"Expected `array` of at least length \d+, got (\d+)", text):
        missing = int(short[1])
        return f"Array is missing required field `{names[missing]}`" if missing < len(names) else text
    return re.sub(
        r"`\$\[(\d{1,3})\]`$", lambda at: f"`$.{names[int(at[1])]}`" if int(at[1]) < len(names) else at[0], text
    )
