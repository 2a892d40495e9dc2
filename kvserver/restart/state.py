"""The state of L1 that one daemon leaves to the next: which chunks are in which pages, in the order of eviction, and their digests.

Owns: its form, and the checks that it is whole and fits this daemon. Refuses to know: files, the cache.

The form: magic, u32 format, u64 XXH3-64 of the rest, which is a msgpack map. Columns have a row for each chunk, the next one to be evicted
last. A later daemon of another format begins empty.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import msgspec

from kvserver._native import checksum, checksum_of_parts
from kvserver.cache import SessionKey
from kvserver.protocol import KEY_BYTES, Durability, ObjectGroup

FORMAT = 3
DIGEST_BYTES = 16
EXTENT_BYTES = 8
PROTECTED = 1  # bit of `flags`
_MAGIC = b"KVSL1STA"
_ROW_BYTES = {"places": 4, "flags": 1, "ready": 4, "keys": KEY_BYTES, "counts": 4, "digests": DIGEST_BYTES}
_HEAD = struct.Struct("<8sIQ")
_MAP, _BIN = struct.Struct(">BH"), struct.Struct(">BI")  # of msgpack: 16 bits of fields, 32 bits of bytes


class StateError(Exception):
    """The state cannot be used; the message is why."""


class KeptNamespace(msgspec.Struct, frozen=True, array_like=True):
    id: bytes
    model_name: str
    groups: tuple[ObjectGroup, ...]
    ranks: int
    chunk_tokens: int  # of single blocks a block's
    tails: bool
    durability: Durability = Durability.MACHINE
    generations: dict[str, int | None] = {}  # by the URL of a tier of L2, of tiers that may have its objects
    tenant: str = ""  # whom its chunks belong to; the others of the namespace are of another one

    @property
    def end_bytes(self) -> int:
        """Bytes of a chunk's row in `State.ends`."""
        slots = sum(1 if group.replicated else self.ranks for group in self.groups)
        return 4 * slots if slots > 1 else 0


class KeptPin(msgspec.Struct, frozen=True, array_like=True):
    """A pin, and the keys of the chunks that it names, by namespace."""

    id: str
    owner: str
    namespace: bytes
    model_name: str
    deadline: float  # of CLOCK_MONOTONIC, which the memory does not outlive
    expires_at: float
    note: str
    keys: dict[bytes, bytes]
    session: SessionKey | None = None


class State(msgspec.Struct, kw_only=True):
    """Columns of u32 and u64 are in the machine's byte order: memory does not leave the machine."""

    version: str  # of the daemon that wrote it
    page_bytes: int
    inode: int  # of L1's file
    use: int = 0  # number of the file's use (`L1File.begin_use`)
    namespaces: list[KeptNamespace] = []
    places: bytes = b""  # u32: the chunk's namespace
    flags: bytes = b""
    ready: bytes = b""  # u32: `Chunk.ready`
    keys: bytes = b""
    ends: bytes = b""  # of each slot, as a chunk of several slots has them
    counts: bytes = b""  # u32: extents of the chunk
    extents: bytes = b""
    digests: bytes = b""  # of the chunk's pages
    descriptions: bytes = b""  # no column: contents of chunks, for KV events
    pins: tuple[KeptPin, ...] = ()  # no column

    @property
    def chunks(self) -> int:
        return len(self.flags)

    def part(self, first: int, last: int) -> State:
        """The rows [first, last)."""
        if first == 0 and last == self.chunks:
            return self
        return msgspec.structs.replace(self, **{name: b"".join(list(rows)[first:last]) for name, rows in self._rows()})

    def in_namespaces(self, kept: Sequence[bool]) -> State:
        return self.selected(bytes(map(kept.__getitem__, array("I", self.places))))

    def selected(self, chosen: bytes) -> State:
        """The rows for which `chosen` has not 0, and their namespaces."""
        if all(chosen):
            return self._of_rows()
        columns = {name: b"".join(compress(rows, chosen)) for name, rows in self._rows()}
        return msgspec.structs.replace(self, **columns)._of_rows()

    def joined(self, other: State) -> State:
        """The rows of both, these first, and their namespaces."""
        places = array("I", [place + len(self.namespaces) for place in array("I", other.places)])
        columns = [name for name in (*_ROW_BYTES, "ends", "extents") if name != "places"]
        return msgspec.structs.replace(
            self,
            namespaces=[*self.namespaces, *other.namespaces],
            places=self.places + places.tobytes(),
            **{name: getattr(self, name) + getattr(other, name) for name in columns},
        )._of_rows()

    def _of_rows(self) -> State:
        """Without the namespaces that have no row; the others get new places, in the same order."""
        places = array("I", self.places)
        used = sorted(set(places))
        if len(used) == len(self.namespaces):
            return self
        renumbered = {place: number for number, place in enumerate(used)}
        return msgspec.structs.replace(
            self,
            namespaces=[self.namespaces[place] for place in used],
            places=array("I", map(renumbered.__getitem__, places)).tobytes(),
        )

    def _rows(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Rows of each column, by its name."""
        for name, size in _ROW_BYTES.items():
            yield name, (row for (row,) in struct.iter_unpack(f"{size}s", getattr(self, name)))
        end_bytes = [namespace.end_bytes for namespace in self.namespaces]
        yield "ends", _split(self.ends, (end_bytes[place] for place in array("I", self.places)))
        yield "extents", _split(self.extents, (EXTENT_BYTES * count for count in array("I", self.counts)))


def _split(column: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield column[at : at + size]
        at += size


def encode(state: State) -> list[bytes]:
    """Parts of the file. Columns are parts of their own and not copied: memory that is touched for the first time costs more than the rest."""
    encoder = msgspec.msgpack.Encoder()
    fields = msgspec.structs.asdict(state)
    body = [_MAP.pack(0xDE, len(fields))]
    for name, value in fields.items():
        long = isinstance(value, bytes)
        body += [encoder.encode(name), *([_BIN.pack(0xC6, len(value)), value] if long else [encoder.encode(value)])]
    return [_HEAD.pack(_MAGIC, FORMAT, checksum_of_parts(body)), *body]


def decode(raw: bytes) -> State:
    """StateError unless it is whole and of this format."""
    if len(raw) < _HEAD.size:
        raise StateError("it is not whole")
    magic, format, found = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        raise StateError("it is no state of L1")
    if format != FORMAT:
        raise StateError(f"it is of format {format}, and this daemon has format {FORMAT}")
    body = memoryview(raw)[_HEAD.size :]
    if checksum(body) != found:
        raise StateError("it is not whole")
    try:
        state = msgspec.msgpack.decode(body, type=State)
    except msgspec.MsgspecError as error:
        raise StateError(f"it cannot be read: {error}") from None
    _check(state)
    return state


def _check(state: State) -> None:
    """The columns are of one length, and name namespaces that there are."""
    count = state.chunks
    if any(len(getattr(state, name)) != size * count for name, size in _ROW_BYTES.items()):
        raise StateError("its columns differ in length")
    if any(len(keys) % KEY_BYTES for pin in state.pins for keys in pin.keys.values()):
        raise StateError("its pins have no whole keys")
    places = array("I", state.places)
    if places and max(places) >= len(state.namespaces):
        raise StateError("it names an unknown namespace")
    end_bytes = [namespace.end_bytes for namespace in state.namespaces]
    end_total = sum(end_bytes[place] for place in places) if any(end_bytes) else 0
    if end_total != len(state.ends) or EXTENT_BYTES * sum(array("I", state.counts)) != len(state.extents):
        raise StateError("its columns differ in length")
