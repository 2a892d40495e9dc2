"""Events of the daemon, as frozen structs of one union: lifecycles, metrics, traces and KV events are made of them.

Units: `*_ns` is CLOCK_MONOTONIC nanoseconds, the same in all processes of a machine; wall time is for output only. An event's tag
is its public name, in `/status` and in labels of metrics. It stays when a class is renamed.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias, get_args

import msgspec

from kvserver.cache import WHOLE_CHUNKS, GroupObjects, LookupOutcome
from kvserver.protocol import ChunkContents, DescribeScheduler, ObjectGroup, Payload, RegisterWorker


class ResyncPart(enum.Enum):
    BEGIN = 0
    SLICE = 1
    END = 2


class _Event(msgspec.Struct, frozen=True, tag=True, gc=False):
    time_ns: int  # when it happened


class _OfInstance(_Event, frozen=True):
    instance_id: str
    model_name: str


class _OfWorker(_OfInstance, frozen=True):
    rank: int


class _OfCopy(_OfWorker, frozen=True):
    direction: str  # "store" or "load"
    request_id: str


class _OfChunks(_OfInstance, frozen=True):
    namespace: bytes
    keys: bytes  # KEY_BYTES each
    group: GroupObjects = WHOLE_CHUNKS  # these chunks' objects of other groups are stored and loaded by themselves


# ---- instances and workers --------------------------------------------------------------------


class InstanceRegistered(_OfInstance, frozen=True, tag="InstanceCame"):
    incarnation: str
    num_blocks: int
    has_computed: bool = False  # before it registered: its blocks may have content
    reports_blocks: bool = True


class InstanceDisconnected(_OfInstance, frozen=True, tag="InstanceGone"):
    died: bool  # its connection ended; False: it unregistered


class InstanceDescribed(_Event, frozen=True):
    """The description that a scheduler sent; published again when `namespace_prefix` changes."""

    description: DescribeScheduler
    namespace_prefix: bytes  # the instance can read the namespaces whose id begins with it
    chunk_blocks: int
    block_tokens: int
    object_groups: tuple[ObjectGroup, ...] = ()  # (): one of full attention


class NamespaceFormed(_OfInstance, frozen=True):
    """All ranks of the instance are registered and agree. `ranks` is the registration of each, in rank order."""

    namespace: bytes  # without a variant
    ranks: tuple[RegisterWorker, ...]


class WorkerRegistered(_OfWorker, frozen=True, tag="WorkerCame"):
    """A rank registered: its memory is not mapped yet."""


class WorkerDisconnected(_OfWorker, frozen=True, tag="WorkerGone"):
    """A rank ended: its copies and mappings may not have ended yet."""


# ---- requests of engines ----------------------------------------------------------------------


class LookupEnded(_OfInstance, frozen=True):
    """A lookup ended, at `time_ns`. `keys`: of `outcome.chunks` chunks."""

    request_id: str
    began_ns: int
    keys: bytes
    outcome: LookupOutcome
    chunk_tokens: int
    namespace: bytes = b""  # b"": not all ranks of the instance are registered
    prompt_tokens: int = 0  # 0: not reported
    traceparent: str = ""
    tail_keys: bytes = b""  # of the blocks looked up behind the hit
    block_tokens: int = 0  # of these
    handed_over_tokens: int = 0  # that another engine had promised of these chunks and blocks

    @property
    def tokens(self) -> int:
        return self.outcome.looked_up_tokens(self.chunk_tokens)

    @property
    def hit_tokens(self) -> int:
        return self.outcome.hit_chunks * self.chunk_tokens + self.outcome.tail_tokens


class CopyBegan(_OfCopy, frozen=True):
    """A store or a load was queued at the device."""


class CopyEnded(_OfCopy, frozen=True):
    """A copy ended. `outcome`: "done", or why the copy failed.

    `device_ns`: time that the device spent on the copy. `waited_ns`: from the arrival of the request to the copy's end. `chunks`:
    of the first object group. A request's copies of other groups have objects of the same chunks.
    """

    began_ns: int
    chunks: int
    bytes: int
    device_ns: int
    outcome: str
    waited_ns: int = 0


class CopyRefused(_OfCopy, frozen=True):
    """A store or a load that was not queued at the device: nothing was copied."""

    code: str  # an ErrorCode


class RequestEnded(_OfInstance, frozen=True):
    """A request ended. Fields as in EndRequest, but consistent: local and loaded tokens together are at most the prompt's."""

    request_id: str
    gap: bool = False  # as in BlockReport
    prompt_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    loads: int = 0
    failed_loads: int = 0
    not_loaded: str = ""  # why the engine loaded nothing, if it knows
    filled_tokens: int = 0  # of the loaded ones those that were read from L2 for this request


class BlockReport(_OfInstance, frozen=True):
    """A ReportBlockAllocations. The loop has checked the payload, so nothing in it is wrong."""

    payload: Payload
    blocks: tuple[bytes, ...] = ()  # of ReportedBlocks: the u32 block ids of each record
    gap: bool = False  # reports or ends of requests before this one were lost: the state of the pools is unknown
    in_sync: bool = True  # the full state of every pool has arrived since


class ErrorSent(_Event, frozen=True):
    request: str  # type of the request
    code: str


# ---- L1 ---------------------------------------------------------------------------------------


class ChunksStored(_OfChunks, frozen=True):
    """Objects became READY by a store of the instance."""

    pages: int = 0  # of L1 that each of them uses, all ranks together


class ChunksDescribed(_Event, frozen=True):
    """Contents of chunks that a store names, stored before or by that store. The engine's hashes are not checked."""

    instance_id: str
    namespace: bytes
    keys: bytes
    ready: tuple[tuple[GroupObjects, bytes], ...]  # those of `keys` whose objects of a group are READY already
    block_tokens: int  # of the contents' blocks
    contents: ChunkContents
    in_l2: tuple[bytes, ...] = ()  # for each group of `ready` those of `keys` whose objects are in L2; (): none
    session_id: str = ""  # of the store's request


class ChunksLoaded(_OfChunks, frozen=True):
    """Chunks were copied to the instance: an access."""


class ChunksEvicted(_Event, frozen=True):
    """Chunks were evicted with the objects of all groups; or the objects of one group were dropped, if `group` is set.

    An eviction of single blocks names their group.
    """

    namespace: bytes
    keys: bytes
    group: GroupObjects | None = None


class L1Cleared(_Event, frozen=True):
    """All chunks of the namespaces whose id begins with `namespace` were removed."""

    namespace: bytes


class L1Resynced(_Event, frozen=True, tag="L1Recounted"):
    """Part of a resync: all objects that are READY, because events about chunks had been dropped.

    A resync is one begin, any number of slices and one end. Other events go on between the slices.
    """

    part: ResyncPart
    namespace: bytes = b""
    keys: bytes = b""
    group: GroupObjects = WHOLE_CHUNKS


# ---- the tiers of L2 that know what they have -------------------------------------------------


class _InL2(_Event, frozen=True):
    namespace: bytes
    keys: bytes  # KEY_BYTES each
    group: int  # number of the object group


class L2Stored(_InL2, frozen=True):
    """Objects are in a tier, and were in none before."""


class L2Removed(_InL2, frozen=True):
    """Objects are in no tier any more; some may never have been in one."""


class L2Cleared(_Event, frozen=True):
    """All objects of the namespaces whose id begins with `namespace` were removed."""

    namespace: bytes


class L2Resynced(_Event, frozen=True):
    """Part of a resync of L2, as L1Resynced. A slice names no object that an L2Stored after the begin names."""

    part: ResyncPart
    namespace: bytes = b""
    keys: bytes = b""
    group: int = 0


Event: TypeAlias = (
    InstanceRegistered
    | InstanceDisconnected
    | InstanceDescribed
    | NamespaceFormed
    | WorkerRegistered
    | WorkerDisconnected
    | LookupEnded
    | CopyBegan
    | CopyEnded
    | CopyRefused
    | RequestEnded
    | BlockReport
    | ErrorSent
    | ChunksStored
    | ChunksDescribed
    | ChunksLoaded
    | ChunksEvicted
    | L1Cleared
    | L1Resynced
    | L2Stored
    | L2Removed
    | L2Cleared
    | L2Resynced
)
TYPES: tuple[type[Any], ...] = get_args(Event)
NAMES: dict[type[Any], str] = {kind: kind.__struct_config__.tag for kind in TYPES}
