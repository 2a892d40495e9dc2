"""What engines and the server share: messages, fields, planes, errors, measurements and the default endpoint."""

from kvserver.protocol.allowed import allowed_values, choices_of, failed_field
from kvserver.protocol.block_reports import (
    MARK,
    MAX_REPORTED_BLOCKS,
    RECORD_ACCESSED,
    RECORD_ALLOCATED,
    RECORD_CLEARED,
    RECORD_EVICTED,
    RECORD_OPERATION_SHIFT,
    RECORD_OWNED,
    RECORD_PRESENT,
    RECORD_RELEASED,
    ExactRecords,
    Owned,
    Payload,
    Released,
    ReportBlockAllocations,
    ReportedBlocks,
)
from kvserver.protocol.codec import decode_attach, decode_attach_reply, decode_reply, decode_request, encode
from kvserver.protocol.endpoint import NotPermitted, barrier, default_endpoint, stranger_at
from kvserver.protocol.errors import CONNECTION_REFUSED, ConfigError, ErrorCode, KVServerError
from kvserver.protocol.fields import CONTENT_BYTES, KEY_BYTES, MAX_CHUNKS, TOKEN_BYTES, Durability, Label, Name, Text
from kvserver.protocol.groups import (
    MAX_CHUNK_TOKENS,
    MAX_OBJECT_GROUPS,
    ObjectGroup,
    check_object_groups,
    chunk_tokens_for,
    has_tails,
)
from kvserver.protocol.measurements import (
    DEPARTED_SECONDS,
    MOST_DEPARTED,
    OTHER,
    RESIDENCY_SECONDS,
    WAIT_SECONDS,
    Buckets,
    Histogram,
    bounded,
)
from kvserver.protocol.messages import (
    MOST_MESSAGE_BYTES,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    REGISTERED,
    REQUEST_ID_BYTES,
    Attach,
    Attached,
    AwaitFill,
    Clear,
    Cleared,
    Counted,
    CudaIpc,
    CudaVmmFabric,
    CudaVmmFd,
    Detached,
    EndRequest,
    Error,
    Heartbeat,
    Hello,
    HelloReply,
    Lookup,
    LookupReply,
    LookupTail,
    Memory,
    Registered,
    RegisterWorker,
    Reply,
    Request,
    Retrieve,
    Retrieved,
    SharedFd,
    Status,
    StatusReply,
    Store,
    Stored,
    Unregistered,
    UnregisterWorker,
)
from kvserver.protocol.planes import Plane, block_bytes, group_count, planes_of
from kvserver.protocol.routing import (
    MOST_EXTRA_KEY_BYTES,
    ChunkContents,
    DescribeScheduler,
    EngineLoad,
    HashForm,
    KVBlocks,
    KVEventsTaken,
    KVGroup,
    TakeKVEvents,
)
