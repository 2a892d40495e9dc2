"""Types of the native module; `csrc/core.h` is its manual."""

import enum

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

class Order(enum.Enum):
    SUBMITTED = 0
    REVERSED = 1
    RANDOM = 2

def pack_blocks(ids: bytes) -> bytes:
    """Little-endian u32 ids as they travel: `csrc/block_runs.h` is the manual."""

def unpack_blocks(packed: bytes, most: int) -> bytes:
    """The reverse, for at most so many ids; ValueError says what is wrong with it."""

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

class HostRegion:
    def __init__(
        self,
        size: int,
        huge_page_bytes: int = 0,
        transparent: bool = True,
        nodes: list[int] = ...,
        bound: bool = False,
    ) -> None: ...
    @property
    def size(self) -> int: ...
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

class Device:
    @property
    def completion_fd(self) -> int: ...
    @property
    def lost(self) -> str: ...
    def submit_copy(
        self,
        ticket: int,
        direction: Direction,
        planes: PlaneTable,
        blocks: bytes,
        extents: bytes,
        pages_per_slot: int,
        blocks_per_slot: int,
        skip: int = 0,
        word_memory: Mapping | None = None,
        word_index: int = 0,
        sequence: int = 0,
        deadline_nanos: int = 0,
    ) -> None: ...
    def cancel(self, ticket: int) -> None: ...
    def submit_map(self, ticket: int, mappings: list[Mapping]) -> None: ...
    def submit_unmap(self, ticket: int, mappings: list[Mapping]) -> None: ...
    def drain(self) -> list[tuple[int, Outcome, int, int, str]]: ...

class Copier(Device):
    def __init__(self, region: HostRegion, page_bytes: int, threads: int, delay_micros: int = 0) -> None: ...

class FakeDevice(Device):
    def __init__(
        self,
        region: HostRegion,
        page_bytes: int,
        seed: int = 0,
        trouble: float = 0.0,
        delay_micros: int = 0,
    ) -> None: ...
    @property
    def open(self) -> list[int]: ...
    def run(self, ticket: int, blocks: int) -> None: ...
    def release(self, ticket: int) -> None: ...
    def release_all(self, order: Order = ...) -> None: ...
    def fail(self, ticket: int, blocks: int, what: str) -> None: ...
    def step(self) -> None: ...
    def lose(self, what: str) -> None: ...
    def recover(self) -> None: ...
    def read_l1(self, page: int) -> bytes: ...
