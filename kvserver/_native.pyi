"""Types of the native module; `csrc/copy/device.h` is its manual."""

import builtins
import enum
import mmap
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

Buffer = builtins.bytes | bytearray | memoryview | mmap.mmap
Value = TypeVar("Value")

NO_BLOCK: int
MAX_GROUPS: int

class State(enum.IntEnum):
    IDLE = 0
    PENDING = 1
    RUNNING = 2
    DONE = 3
    FAILED = 4
    CANCELLED = 5
    CANCELLING = 6

class Direction(enum.Enum):
    STORE = 0
    LOAD = 1

class Outcome(enum.Enum):
    DONE = 0
    FAILED = 1
    CANCELLED = 2
    LATE = 3
    MEMORY_LOST = 4
    DEVICE_LOST = 5

def next_lines(from_: int) -> bytes:
    """Lines in a stream socket; `csrc/copy/last_words.h` is the manual."""

def copy_last_words(from_: int, to: int) -> None:
    """Descriptors; `csrc/copy/last_words.h` is the manual."""

def pack_blocks(ids: list[int]) -> bytes:
    """The wire form of ids; `csrc/tables/block_runs.h` is the manual."""

def unpack_blocks(packed: bytes, most: int) -> bytes:
    """The u32 ids of a wire form with at most `most` ids; ValueError states what is wrong."""

class Mapping:
    @property
    def mapped(self) -> bool: ...
    @property
    def size(self) -> int: ...
    def intact(self) -> bool: ...

class FileMapping(Mapping):
    def __init__(self, fd: int, size: int) -> None: ...

class WordMapping(Mapping):
    def __init__(self, fd: int, size: int) -> None: ...
    def fail_word(self, index: int, sequence: int) -> bool: ...

class PlaneTable:
    def __init__(
        self, memories: list[Mapping], rows: list[tuple[int, int, int, int, int]], num_blocks: int
    ) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def groups(self) -> int: ...

class BlockIds:
    """The blocks that a copy names, checked; `csrc/copy/block_ids.h` is the manual."""

    def __init__(
        self, planes: PlaneTable, direction: Direction, packed: bytes, least: int, most: int, null_block: int = 0
    ) -> None:
        """ValueError states what is wrong."""
    @property
    def direction(self) -> Direction: ...
    @property
    def positions(self) -> int: ...

class HostRegion:
    def __init__(
        self,
        size: int,
        huge_page_bytes: int = 0,
        transparent: bool = True,
        nodes: list[int] = ...,
        bound: bool = False,
        fd: int = -1,
    ) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def numa_error(self) -> str: ...
    @property
    def numa_policy(self) -> tuple[str, list[int]]: ...

def process_numa_policy() -> tuple[str, list[int]]: ...

class WordPage:
    def __init__(self, words: int) -> None: ...
    @property
    def fd(self) -> int: ...
    @property
    def count(self) -> int: ...
    def arm(self, index: int, sequence: int) -> None: ...
    def state(self, index: int) -> State: ...
    def move(self, index: int, sequence: int, from_: State, to: State) -> bool: ...
    def wait(self, index: int, seconds: float) -> bool: ...

class Device:
    @property
    def completion_fd(self) -> int: ...
    @property
    def lost(self) -> str: ...
    def submit_copy(
        self,
        ticket: int,
        blocks: BlockIds,
        extents: bytes,
        pages_per_slot: int,
        blocks_per_slot: int,
        skip: int = 0,
        chunks: list[int] | None = None,
        word_memory: Mapping | None = None,
        word_index: int = 0,
        sequence: int = 0,
        deadline_nanos: int = 0,
    ) -> None: ...
    def cancel(self, ticket: int) -> None: ...
    def submit_map(self, ticket: int, mappings: list[Mapping]) -> None: ...
    def submit_unmap(self, ticket: int, mappings: list[Mapping]) -> None: ...
    def drain(self) -> list[tuple[int, Outcome, int, int, str]]: ...

class CpuDevice(Device):
    def __init__(self, region: HostRegion, page_bytes: int, threads: int) -> None: ...

# ---- GPUs: csrc/gpu/gpu.h, csrc/gpu/gpu_device.h, csrc/gpu/pinner.h --------------------------------------

GPU_BATCH_BYTES: int
GPU_STAGING_BYTES: int
GPU_SLOTS: int
GPU_MOST_SLOTS: int
GPU_SPARE_BYTES: int
GPU_SHORT_LOAD_BYTES: int
GPU_SHORT_STORE_BYTES: int
PIN_BYTES: int

class Way(enum.Enum):
    DMA = 0
    STAGED = 1

class Gpu:
    @property
    def uuid(self) -> str: ...
    @property
    def lost(self) -> str: ...

def built_with_cuda() -> bool: ...
def cuda_gpus() -> list[tuple[str, str, str, int]]: ...
def cuda_gpu(uuid: str) -> Gpu: ...
def dma_pieces(
    region: HostRegion,
    page_bytes: int,
    blocks: BlockIds,
    extents: bytes,
    pages_per_slot: int,
    blocks_per_slot: int,
    skip: int = 0,
) -> list[tuple[int, int, int, int, int, int]]:
    """The DMA copies of one batch, each (to, from, bytes of a row, rows, pitch of to, pitch of from)."""

class GpuMapping(Mapping):
    @staticmethod
    def by_ipc(gpu: Gpu, handle: bytes, offset: int, size: int) -> GpuMapping: ...
    @staticmethod
    def by_fd(gpu: Gpu, fd: int, offset: int, size: int) -> GpuMapping: ...

class GpuDevice(Device):
    def __init__(
        self,
        region: HostRegion,
        page_bytes: int,
        gpu: Gpu,
        batch_bytes: int = ...,
        way: Way | None = None,
        short_store_bytes: int = ...,
        short_load_bytes: int = ...,
        most_slots: int = ...,
    ) -> None: ...
    @property
    def gpu(self) -> Gpu: ...
    @property
    def mapped_bytes(self) -> int: ...
    def counts(self, direction: Direction) -> tuple[int, int, int, int]: ...

class Pinner:
    def __init__(self, region: HostRegion, gpu: Gpu, threads: int, cpus: list[int] = ...) -> None: ...
    @property
    def error(self) -> str: ...
    @property
    def done(self) -> bool: ...
    @property
    def seconds(self) -> float: ...

# ---- lifetimes of L0 blocks: csrc/tables/block_lifetimes.h ---------------------------------------------------

def check_records(records: bytes, marks: bytes, num_blocks: int) -> None:
    """ValueError states which record or mark is wrong, and why."""

class LifetimeHistogram:
    @property
    def counts(self) -> list[int]: ...
    @property
    def sum(self) -> float: ...

class LifetimeSnapshot:
    @property
    def allocations(self) -> int: ...
    @property
    def reuses(self) -> int: ...
    @property
    def shared_accesses(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def recycled(self) -> int: ...
    @property
    def cleared(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def active_blocks(self) -> int: ...
    @property
    def released_blocks(self) -> int: ...
    @property
    def lifetime(self) -> LifetimeHistogram: ...
    @property
    def idle_before_evict(self) -> LifetimeHistogram: ...
    @property
    def since_last_access(self) -> LifetimeHistogram: ...
    @property
    def reuse_gap(self) -> LifetimeHistogram: ...

class LifetimeMetrics:
    def __init__(self, bounds: list[float]) -> None: ...
    def read(self) -> LifetimeSnapshot: ...

class BlockLifetimes:
    bytes_per_block: ClassVar[int]
    def __init__(self, metrics: LifetimeMetrics, num_blocks: int, sample_rate: float, seed: int) -> None: ...
    @property
    def requests(self) -> int: ...
    def apply(self, records: bytes, marks: bytes) -> None: ...
    def own_blocks(
        self, request: int, group: int, blocks: bytes, contents: bytes, time_ns: int, watched: bool = True
    ) -> None: ...
    def release_blocks(self, request: int, blocks: bytes, time_ns: int) -> None: ...
    def end_request(self, request: int, time_ns: int) -> None: ...
    def end_all(self) -> None: ...

class KeyTable(Generic[Value]):
    """Values by keys of 32 bytes, with a reference to both; `csrc/tables/key_table.h` is the manual.

    ValueError for keys of other lengths, or one that is added while it is in the table; KeyError if there is none to remove.
    """

    def __init__(self, seed: int) -> None: ...
    def find(self, keys: bytes) -> list[Value | None]:
        """A value for each of the keys, which lie end to end; None for an absent one."""
    def find_leading(self, keys: bytes) -> list[Value]:
        """The values before the first absent key."""
    def get(self, key: bytes) -> Value | None: ...
    def add(self, key: bytes, value: Value) -> None: ...
    def remove(self, key: bytes) -> Value: ...
    def pop(self) -> Value:
        """Remove any entry; the time does not grow with their number."""
    def values(self) -> list[Value]: ...
    def __len__(self) -> int: ...

class HashCounts:
    """The number of copies of each block hash; `csrc/tables/hash_counts.h` is the manual."""

    def __init__(self, seed: int) -> None: ...
    def add(self, hashes: bytes, hash_bytes: int) -> bytes:
        """One byte for each hash: 1 if this is its first copy. No thread may use the table during the call."""
    def remove(self, hashes: bytes, hash_bytes: int) -> bytes:
        """One byte for each hash: 1 if this removed its last copy, 2 if it had no copy."""
    def contains(self, hashes: bytes, hash_bytes: int) -> bytes: ...
    def slice(self, cursor: int, most: int) -> tuple[bytes, int]:
        """Up to `most` of the hashes, 32 bytes each, and the cursor of the next slice; the first cursor is 0."""
    def __len__(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

class PrefixIndex:
    """The owners of each block; `csrc/tables/prefix_index.h` is the manual. Any thread may use it."""

    def __init__(self, seed: int, most_bytes: int) -> None: ...
    def add_owner(self) -> int:
        """A new owner without blocks; -1 if there are 64 owners."""
    def clear_owner(self, owner: int) -> None: ...
    def remove_owner(self, owner: int) -> None: ...
    def add_blocks(self, owner: int, hashes: bytes, hash_bytes: int) -> int:
        """The number of blocks refused for lack of memory."""
    def remove_blocks(self, owner: int, hashes: bytes, hash_bytes: int) -> int:
        """The number of blocks that `owner` did not have."""
    def match(
        self, hashes: bytes | memoryview, hash_bytes: int, readers: list[tuple[int, int, int, int]]
    ) -> list[tuple[int, int, int, int]]:
        """For each reader (owners of L0, L1, L2, or -1; blocks of a chunk): leading blocks of each tier, the best."""
    def owners_of(self, hashes: bytes | memoryview, hash_bytes: int, every: int) -> bytes:
        """A u64 for the last block of each `every` blocks: bit n is set if owner n has it."""
    def owned_blocks(self, owner: int) -> int: ...
    def __len__(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

class HitRules:
    """What a hit needs: the bits of the full groups, and of each other group (bit, chunks, or tokens of a local attention's chunk).

    Objects of the other groups are kept at multiples of `interval` chunks, too; 0: at none.
    """

    def __init__(
        self,
        full: int,
        chunk_tokens: int,
        others: list[tuple[int, int, int]],
        distinct: bool = True,
        interval: int = 0,
    ) -> None: ...

class WhatIfHits:
    """Of one lookup, where the hit of each size would have ended."""

class WhatIf:
    """What caches of six sizes, in pages, and of no limit would have; `csrc/tables/what_if.h` is the manual."""

    def __init__(self, secret: int, sizes: Sequence[int], protects: bool) -> None: ...
    def lookup(self, salt: int, keys: bytes, rules: HitRules, chunk_tokens: float) -> WhatIfHits: ...
    def lookup_tail(
        self, salt: int, keys: bytes, rules: HitRules, block_tokens: float, behind: WhatIfHits, found: int
    ) -> WhatIfHits:
        """Counted for the sizes whose hit `behind` ended at chunk `found`."""
    def use(self, salt: int, keys: bytes, rules: HitRules, hits: WhatIfHits, found: int, pages: int) -> None: ...
    def add(self, salt: int, keys: bytes, rules: HitRules, bit: int, pages: int) -> None: ...
    def remove(self, salt: int, keys: bytes, bit: int, pages: int) -> None: ...
    def clear(self) -> None: ...
    def hit_tokens(self) -> list[float]:
        """Of all lookups, by size. From any thread."""
    def distinct(self) -> bytes:
        """HyperLogLog: one byte a register."""
    def __len__(self) -> int: ...
    @property
    def sample_rate(self) -> float: ...
    @property
    def memory_bytes(self) -> int: ...

# ---- L2: csrc/l2/record.h ------------------------------------------------------------------------------------

RECORD_HEADER_BYTES: int
RECORD_FORMAT: int

class RecordMatch(enum.Enum):
    MATCH = 0
    OTHER = 1
    CORRUPT = 2

class Record:
    """An object of L1 as L2 stores it, and the memory of its slots; `csrc/l2/record.h` is the manual.

    ValueError if the slots do not lie in L1 or have no room for `slot_bytes`.
    """

    def __init__(
        self,
        region: HostRegion,
        page_bytes: int,
        namespace: bytes,
        group: int,
        key: bytes,
        coverage: bytes,
        generation: int,
        slots: Sequence[bytes],
        slot_bytes: Sequence[int],
    ) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    def pack(self) -> builtins.bytes:
        """The header and the slots' bytes, end to end. Other threads of Python run meanwhile."""
    def pack_into(self, buffer: bytearray | memoryview) -> None:
        """The same into a writable buffer of `packed_bytes`."""
    def unpack(self, buffer: Buffer) -> RecordMatch:
        """Write a packed record to L1, and match what was written; one of another header or length writes nothing."""

class FileOutcome(enum.Enum):
    DONE = 0
    OTHER = 1
    CORRUPT = 2
    FULL = 3
    LATE = 4
    FAILED = 5
    CANCELLED = 6

class FileCalls:
    """The calls below a FileDevice; tests have one with faults."""

class FileDevice:
    """Threads that move records between L1 and a data file; `csrc/l2/file_device.h` is the manual."""

    def __init__(self, fd: int, page_bytes: int, pages: int, threads: int, calls: FileCalls | None = None) -> None: ...
    @property
    def completion_fd(self) -> int: ...
    def drain(self) -> list[tuple[int, FileOutcome, int, int, str]]:
        """(ticket, outcome, bytes, nanoseconds, reason) of each ticket that ended."""
    def notify(self) -> None: ...
    def submit(self, ticket: int, put: bool, record: Record, extents: bytes, deadline_nanos: int = 0) -> None: ...
    def cancel(self, ticket: int) -> None: ...
    def expire(self) -> None: ...
    @property
    def stalled_nanos(self) -> int: ...
    def close(self, wait_nanos: int) -> bool: ...

def checksum(data: Buffer) -> int:
    """XXH3-64. Of long data other threads of Python run meanwhile."""

# ---- what a restart keeps of L1: csrc/l2/l1_objects.h ---------------------------------------------------

def kept_pages(counts: bytes, extents: bytes, pages: int) -> tuple[bytes, list[tuple[int, int]]]:
    """(1 for each object that fits, free extents). ValueError if objects overlap."""

def digest_objects(
    region: HostRegion, page_bytes: int, counts: bytes, extents: bytes, threads: int, deadline_nanos: int = 0
) -> bytes:
    """16 bytes for each object; zeros if it was not begun by the deadline. Other threads of Python run meanwhile."""

class RecordTable:
    """The index of a file tier; `csrc/l2/record_table.h` is the manual. One thread uses it."""

    def __init__(self, seed: int) -> None: ...
    def holds(self, namespace: bytes, generation: int, group: int, keys: bytes) -> int: ...
    def find(self, namespace: bytes, generation: int, group: int, key: bytes) -> tuple[int, bytes, bool] | None:
        """(meaning, extents, recovered)."""
    def add(
        self, namespace: bytes, generation: int, group: int, key: bytes, parent: bytes, meaning: int, extents: bytes
    ) -> None: ...
    def remove(self, namespace: bytes, generation: int, group: int, key: bytes) -> bytes | None:
        """Its extents."""
    def touch(self, namespace: bytes, generation: int, group: int, keys: bytes) -> None: ...
    def evict(self) -> tuple[bytes, int, bytes, bytes] | None:
        """(namespace, group, key, extents) of a record that was removed; None may mean later while it is not `swept`."""
    def spaces(self) -> list[tuple[bytes, int, int, int]]:
        """(namespace, generation, group, records)."""
    def walk(self, at: int, most: int) -> tuple[int | None, list[tuple[bytes, int, int, bytes]]]:
        """Where to go on, None at the end; (namespace, generation, group, keys) of up to `most` records from `at` on."""
    def drop_space(self, namespace: bytes, generation: int, group: int) -> bool: ...
    def sweep(self, most: int) -> bytes:
        """The extents of records that were removed."""
    @property
    def swept(self) -> bool: ...
    def begin_log(self, file_id: int, sequence: int) -> None: ...
    def drain_log(self) -> bytes: ...
    @property
    def log_bytes(self) -> int: ...
    def begin_next_log(self, file_id: int) -> None: ...
    def fill_next_log(self, most: int) -> bool: ...
    def drain_next_log(self) -> bytes: ...
    def switch_logs(self) -> None: ...
    def drop_next_log(self) -> None: ...
    @property
    def live_journal_bytes(self) -> int: ...
    def replay(self, data: bytes, file_id: int, sequence: int) -> tuple[int, int]:
        """(bytes applied, next sequence)."""
    def link_orphans(self) -> None: ...
    def check_extents(self, first: int, pages: int) -> tuple[int, bytes]:
        """(records dropped, free extents)."""
    @property
    def memory_bytes(self) -> int: ...
    @property
    def steps(self) -> int:
        """Records, buckets and leaves that all calls so far looked at."""
    def __len__(self) -> int: ...
