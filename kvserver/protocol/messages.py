"""Messages between engines and the server.

Frames: `[8-byte request id][msgpack]` over ZMQ DEALER/ROUTER. Every message is a tagged struct (tag field `type`, the class
name). A request gets exactly one reply, its own or `Error`. A notice (ReportBlockAllocations, EndRequest, Heartbeat,
DescribeScheduler, EngineLoad) is answered only on error. On the Unix socket `HelloReply.fd_path`, beside the endpoint, `Attach`
hands over file descriptors; that connection is the worker's lifeline.

Forms: a long prompt needs dozens of Lookup, LookupTail, Store and Retrieve, so these are msgpack arrays, `[type, field, ...]` in
the order of the struct. Every other message is a map by field names. Errors name fields in both forms.

Changes without a new PROTOCOL_VERSION: a map may gain fields with defaults anywhere, an array at its end only. A decoder ignores
fields that it does not know, and a missing field has its default. To move, remove or redefine a field of an array needs a new
PROTOCOL_VERSION.

Units: `*_ns` is CLOCK_MONOTONIC nanoseconds; `keys` is KEY_BYTES bytes per chunk; `block_ids` is a list of u32 as
`_native.pack_blocks` makes it, one per member of the object group for each position: [position][member].

Owns: the structs and the version; those of a block pool are in `block_reports`, those of routers in `routing`. Refuses to know:
what any message means to the cache, and its bytes (`codec`).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvserver.protocol.block_reports import ReportBlockAllocations
from kvserver.protocol.fields import (
    MAX_PIN_SECONDS,
    ArrayMessage,
    Bytes,
    Durability,
    Keys,
    Label,
    Message,
    Name,
    Positive,
    Ratio,
    SaltDigest,
    SessionId,
    Size,
    Small,
    Text,
    Tokens,
    Unsigned,
)
from kvserver.protocol.groups import MAX_OBJECT_GROUPS, ObjectGroup
from kvserver.protocol.planes import Plane, group_count
from kvserver.protocol.routing import ChunkContents, DescribeScheduler, EngineLoad, KVEventsTaken, TakeKVEvents

PROTOCOL_VERSION = 5
OLDEST_PROTOCOL_VERSION = 4  # that the server speaks: its engines store all KV cache groups as one object group
REGISTERED = "registered"  # HelloReply.standing: all ranks have registered and agree
SERVING_OFF = "serving_off"  # HelloReply.standing: as REGISTERED, and the operator has switched serving off
REQUEST_ID_BYTES = 8
MOST_MESSAGE_BYTES = 4 << 20  # clients split far below; a larger message gets an error

REQUESTS = "requests"  # RegisterWorker.unreported: ends of requests, and so prompt tokens by source
BLOCKS = "blocks"  # RegisterWorker.unreported: the block pool, L0
STATS = "stats"  # RegisterWorker.unreported: running and waiting requests
SESSIONS = "sessions"  # RegisterWorker.unreported: the session of a lookup; stores name theirs
UNREPORTED = frozenset({REQUESTS, BLOCKS, STATS, SESSIONS})
MOST_ENGINE = 64  # characters of an engine's name or version that are shown

GpuUuid = Annotated[str, Meta(pattern="^(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
GpuHandle = Annotated[bytes, Meta(min_length=64, max_length=64)]


# ---- what a worker registers ------------------------------------------------------------------


class SharedFd(Message):
    """Memory behind the `index`-th descriptor of Attach."""

    index: Small
    size_bytes: Size


class CudaIpc(Message):
    """`size_bytes` at `offset` of an allocation of GPU `device`, by the cudaIpcMemHandle of the allocation's base."""

    device: GpuUuid
    handle: GpuHandle
    offset: Bytes
    size_bytes: Size


class CudaVmmFd(Message):
    """`size_bytes` at `offset` of a cuMemCreate allocation of GPU `device`, by the `index`-th descriptor of Attach."""

    device: GpuUuid
    index: Small
    offset: Bytes
    size_bytes: Size


class CudaVmmFabric(Message):
    """Memory by a fabric handle. An older engine may send it; the server refuses it."""

    device: GpuUuid
    handle: GpuHandle
    offset: Bytes
    size_bytes: Size


Memory: TypeAlias = SharedFd | CudaIpc | CudaVmmFd | CudaVmmFabric


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """A field of the engine's configuration, or another fact, that must agree before KV may be shared."""

    name: Name
    digest: Label
    value: Label = ""  # for people; empty for fields that contain a place or a secret


# ---- requests ---------------------------------------------------------------------------------


class Hello(Message):
    """Open a session. `instance_id` and `incarnation` name an engine, if the client wants HelloReply.standing."""

    protocol_version: int
    client: Label = ""
    instance_id: Label = ""
    incarnation: Label = ""


class RegisterWorker(Message):
    instance_id: Name
    incarnation: Name  # the same in all processes of the instance, new at each start of the engine
    model_name: Name
    rank: Small
    world_size: Annotated[int, Meta(gt=0, le=4096)]
    attachment: Unsigned
    memory: Annotated[list[Memory], Meta(min_length=1, max_length=250)]
    words: Annotated[int, Meta(gt=0, le=1 << 20)]  # state words in the page behind the last descriptor
    planes: Annotated[list[Plane], Meta(min_length=1, max_length=65536)]
    num_blocks: Positive
    block_tokens: Positive  # of groups[0]
    chunk_blocks: (
        Positive  # blocks of groups[0] in a chunk, by chunk_tokens_for(HelloReply.chunk_tokens), or in the smallest one
    )
    layout: Text = ""  # how this rank's blocks are arranged: layers, shapes, strides, attention backends
    replicated: bool = False  # protocol 4: ObjectGroup.replicated of the one group
    counted: Annotated[tuple[Counted, ...], Meta(max_length=4096)] = ()  # the facts that must agree beside geometry
    private: Text = ""  # why KV is shared with no other incarnation; "" if it is
    has_computed: bool = False  # this incarnation has run a step: its blocks may have content
    # Full attention first. Empty, as protocol 4 has it: one full group, whose members are all groups of the planes.
    groups: Annotated[tuple[ObjectGroup, ...], Meta(max_length=MAX_OBJECT_GROUPS)] = ()
    # Single blocks are stored, looked up and loaded too, as objects of the group len(groups) + g for each group g. Only
    # with HelloReply.tails, and if has_tails(groups).
    tails: bool = False
    machine_only: Text = ""  # why its KV must stay on this machine, though it may outlive the engine; "" if it need not
    engine: Label = ""  # for people: "vllm", "sglang"; "" of older adapters
    engine_version: Label = ""
    unreported: Annotated[tuple[Label, ...], Meta(max_length=16)] = ()  # of UNREPORTED: what it will never report
    # Blocks of each object group, where an engine has a pool of its own for each, with its own ids; (): num_blocks of each.
    group_blocks: Annotated[tuple[Positive, ...], Meta(max_length=MAX_OBJECT_GROUPS)] = ()
    kv_role: Label = ""  # for people: "kv_both", "kv_producer" or "kv_consumer" of vLLM; "" where engines have no roles

    @property
    def engine_names(self) -> tuple[str, str]:
        """`engine` and `engine_version`, short and printable."""
        return _shown(self.engine), _shown(self.engine_version)

    @property
    def shown_role(self) -> str:
        return _shown(self.kv_role)

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.chunk_blocks

    @property
    def object_groups(self) -> tuple[ObjectGroup, ...]:
        """`groups`, also of protocol 4."""
        if self.groups:
            return self.groups
        members = tuple(range(group_count(self.planes)))
        return (ObjectGroup("full", members, self.block_tokens, replicated=self.replicated),)


def _shown(name: str) -> str:
    return "".join(filter(str.isprintable, name))[:MOST_ENGINE]


class UnregisterWorker(Message):
    boot_id: Label
    registration: Unsigned


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """Promise of the engine that computed a prompt to the one that looks it up: the stores may not have arrived yet."""

    instance_id: Label  # of the engine that stores it
    tokens: Tokens  # from the prompt's first one on


class Lookup(ArrayMessage):
    """Request the greatest boundary at which the request can continue, and a lease on what a load up to it needs."""

    instance_id: Name
    incarnation: Name
    request_id: Name
    chunk_blocks: Positive  # as registered
    keys: Keys
    variant: Label = ""  # may differ within one registration: start of the hash chain, weights epoch, LoRA
    tokens: Tokens = 0  # of the whole prompt, also beyond the last full chunk; 0: not stated
    traceparent: Label = ""  # W3C trace context of the request, if the engine was sent one
    tail_keys: Keys = b""  # of the whole blocks behind the last chunk of `keys`, which may then be empty
    durability: Durability = Durability.PROCESS  # of the variant
    boundaries: bool = False  # whether the reply should have `boundaries`
    session_id: SessionId | None = (
        ""  # "": none, or it is not known, so what is found is shared; None: nothing is stated, and nothing becomes shared
    )
    session_salt: SaltDigest | None = None  # of the request's cache salt, if it has one; a session is of one salt
    # How long L1 should keep the chunks of `keys` and the blocks of `tail_keys` once the request has stored them; None: no pin.
    pin_seconds: Annotated[float, Meta(ge=0, le=MAX_PIN_SECONDS)] | None = None
    handed_over: HandOver | None = None
    # Whom the chunks belong to that are read from L2 for it: the model's, unless the tenant has a share.
    tenant: Label = ""


class LookupTail(ArrayMessage):
    """Continue the request's lookup, whose reply had `wants_tail`, with the blocks of the first chunk that it missed.

    The reply is that of the whole lookup.
    """

    instance_id: Name
    incarnation: Name
    request_id: Name
    tail_keys: Keys


class AwaitFill(ArrayMessage):
    """Bring to L1 what a Lookup misses, and running stores, its hand-over or L2 have. One reply, a LookupReply: when all is there, or after `wait_ms`.

    For a store of this daemon that was handed over and has not begun it waits half of that. A second one of the same request ends the first.
    """

    lookup: Lookup
    wait_ms: Annotated[int, Meta(ge=0, le=10_000)]


class _Copy(ArrayMessage):  # closed: a new field goes to the end of Store and of Retrieve
    boot_id: Label
    registration: Unsigned
    chunk_blocks: Positive  # object_blocks of the group
    keys: Keys
    block_ids: bytes  # [position][member of the group]
    word: Small  # index of the state word
    sequence: Unsigned  # the number that the word was armed with
    deadline_ns: Unsigned
    variant: Label = ""


class Store(_Copy):
    """Copy the objects of one group from L0 to L1: chunk_blocks positions for each key."""

    request_id: Label = ""  # only if HelloReply.traces
    contents: ChunkContents | None = None  # only if HelloReply.kv_events, of group 0, and from one rank
    group: Small = 0  # number of the object group
    dropped: Keys = b""  # the group's objects that no kept boundary needs once these are stored
    # Which chunk of its prompt the first key is. Of a replicated group rank r copies chunk n if n % world_size == r; each rank
    # sends all keys. Protocol 4: rank 0 copies all. Of single blocks: which block.
    first_chunk: Unsigned = 0
    # The key of the chunk before the first key, if there is one: of single blocks, and of full attention if HelloReply.parents.
    after: Keys | None = None
    durability: Durability = Durability.PROCESS  # of the variant
    session_id: SessionId = ""  # of the request; of a model with several groups in the stores of all
    session_salt: SaltDigest | None = None
    tenant: Label = ""  # whom new chunks belong to, as Lookup.tenant


class Retrieve(_Copy):
    """Copy objects of one group from L1 to L0. A load of a model with several groups is one Retrieve for each.

    `block_ids` omits the first `skip_blocks` positions of the first object, and may omit the last positions of the
    last object. With several members, id 0 excludes one member of a position from the copy, but not all members.
    """

    skip_blocks: Small = 0
    request_id: Label = ""  # older engines: only if HelloReply.traces
    group: Small = 0  # number of the object group; one Retrieve of a load is of group 0
    tokens: Tokens = 0  # that the engine need not compute after this load; 0: those of the block ids
    messages: Annotated[int, Meta(gt=0, le=MAX_OBJECT_GROUPS)] = 1  # of this rank that the load consists of
    durability: Durability = Durability.PROCESS  # of the variant


class Clear(Message):
    """Remove all chunks from L1 and L2, or the chunks that one instance can see; `shared`: also where others may use them."""

    instance_id: Label = ""
    shared: bool = False


class Status(Message):
    pass


# ---- notices ----------------------------------------------------------------------------------


class EndRequest(Message, omit_defaults=True):
    instance_id: Name
    incarnation: Name
    model_name: Name
    sequence: Unsigned
    request_id: Name
    prefill_tokens_per_second: Ratio = 0.0  # the engine's present speed; 0: not known
    prompt_tokens: Tokens = 0  # 0: not known, or the request ended before its prompt was computed
    local_tokens: Tokens = 0  # prompt tokens found in the engine's own prefix cache when the request was scheduled
    loaded_tokens: Tokens = 0  # prompt tokens copied from this server; the engine computed the rest
    loads: Small = 0  # ended loads, counted once for all ranks; includes loads after a preemption
    failed_loads: Small = 0  # ended loads that failed on at least one rank
    # Why the engine loaded nothing although a lookup found chunks: lookup_timeout, computes_all, whole_prompts_only,
    # weights_changed, request_limit, save_only, load_failed, not_used, embeddings_dtype; "" if something was loaded or the reason is not known.
    not_loaded: Label = ""
    l2_tokens: Tokens | None = None  # of loaded_tokens: read from L2 for this request; None: not stated


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
    traces: bool = False  # whether a Store should carry its request_id; a Retrieve always does
    kv_events: bool = False  # whether a Store should carry the contents of its chunks
    boundary_interval: int = 0  # tokens between boundaries to keep beside the ends of prompts and requests; 0: none
    lease_seconds: float = 0.0  # how long a lookup protects the chunks that it found; 0: not stated
    standing: str = ""  # of the engine that Hello named: REGISTERED, SERVING_OFF or an error code; "": not stated
    standing_text: str = ""  # the same state for people
    tails: bool = False  # whether a worker may register with tails
    parents: bool = False  # whether each Store of full attention should have `after`


class Registered(Message):
    registration: int
    namespace: str  # "" until all ranks have registered and agree


class Unregistered(Message):
    pass


class LookupReply(Message):
    hit_chunks: int
    full_chunks: int = (
        0  # leading chunks that all full groups have: hit_chunks, or more if other groups' objects are missing
    )
    tail_blocks: int = 0  # blocks behind these chunks that the hit has too
    wants_tail: bool = False  # the hit ends before the last chunk: send LookupTail, this lookup is not over
    fill_chunks: int = 0  # the most that hit_chunks could be after AwaitFill; one more than hit_chunks may mean blocks of the tail; 0: no more than now
    l2_chunks: int = 0  # of hit_chunks: read from L2 for this AwaitFill; the others were in L1
    boundaries: tuple[
        int, ...
    ] = ()  # all up to hit_chunks at which a load can end, ascending; only if the lookup has `boundaries`


class Stored(Message):
    """Reply to Store: `stored` chunks were copied, `skipped` were resident or being stored, `starved` found no space.

    `declined` chunks were refused, since the operator has switched stores off. Chunks of a replicated group that other ranks copy
    are skipped.
    """

    stored: int
    skipped: int
    starved: int = 0
    declined: int = 0


class Retrieved(Message):
    chunks: int


class Cleared(Message):
    chunks: int


class StatusReply(Message):
    status: msgspec.Raw  # a status.DaemonStatus: engines, which never read it, do not load its structs


class Error(Message):
    code: str
    message: str


# ---- the .fd socket ---------------------------------------------------------------------------


class Attach(Message):
    token: Label


class Attached(Message):
    attachment: int
    says_detached: bool = False  # whether the server sends Detached before it ends the connection, unless it dies


class Detached(Message):
    """The server's last message: it no longer reads or writes the worker's memory, and ends the connection."""


# ---- which messages there are -----------------------------------------------------------------

ArrayRequest: TypeAlias = Lookup | LookupTail | AwaitFill | Store | Retrieve
MapRequest: TypeAlias = (
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
Request: TypeAlias = ArrayRequest | MapRequest
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
