"""Digests of a model's or a LoRA's files, and of code: equal for equal content, wherever and whenever the files were made.

A digest is of samples. Of safetensors it covers the names, types and shapes of all tensors and some bytes of each; of other
files, pieces all through them. A *whole* digest covers every byte and takes about a second for each gigabyte. Names of folders
and times of files do not matter. Digests are remembered by a file's inode, size and ctime; whole ones in
`$XDG_CACHE_HOME/kvserver`, for other processes too.

Owns: reading and digesting files. Refuses to know: which of them an engine reads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".npy")
_WHOLE_SUFFIXES = (".json", ".py")  # small, and read by engines: of quantization, processors, remote code
_CODE_SUFFIXES = (".py", ".so")
_SKIPPED_FOLDERS = {"original"}  # as engines do
# Files that change no KV, or count elsewhere: config.json as the engine's own configuration, with what was overridden.
_HARMLESS_FILES = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json"
    " vocab.json chat_template.json tekken.json"
)
_SAMPLE_BYTES = 256
_SAMPLES_OF_TENSOR = 3
_SAMPLES_OF_FILE = 4096
_PIECE_BYTES = 1 << 24  # of a file that is read whole
_LONGEST_HEADER = 100_000_000  # as safetensors itself has it


class NoWeights(Exception):
    """Folder that has no weights or cannot be read."""


class Stamp(NamedTuple):
    """State of a file: a change of its content changes the stamp."""

    inode: int
    size: int
    ctime_ns: int
    mtime_ns: int


def stamp_of(path: Path) -> Stamp:
    stat = path.stat()
    return Stamp(stat.st_ino, stat.st_size, stat.st_ctime_ns, stat.st_mtime_ns)


def stamps_of(folder: Path) -> tuple[tuple[str, Stamp], ...]:
    """Stamps of all files that count and are directly in a folder; empty if there is no such folder."""
    return tuple((path.name, stamp_of(path)) for path in _files(folder, deep=False))


def folder_digest(folder: Path, deep: bool = True, whole: bool = False) -> str:
    """Digest of all files that a model reads from a folder, and if `deep` from folders in it. NoWeights, or an OSError."""
    files = list(_files(folder, deep))
    if not any(path.name.endswith(WEIGHT_SUFFIXES) for path in files):
        raise NoWeights("no weight files in the model's folder")
    parts = [(path.relative_to(folder).as_posix(), file_digest(path, whole)) for path in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def code_digest(places: Iterable[Path]) -> str:
    """Digest of the sources, and samples of what was compiled, in folders and of files. NoWeights if there are none, or an OSError."""
    parts = sorted((name, file_digest(path)) for place in places for name, path in _code(place))
    if not parts:
        raise NoWeights("no sources")
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _code(place: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file of code in a folder; or of one file."""
    for path in place.rglob("*") if place.is_dir() else [place]:
        if path.suffix in _CODE_SUFFIXES and path.is_file():
            yield path.relative_to(place if place.is_dir() else place.parent).as_posix(), path


def file_digest(path: Path, whole: bool = False) -> str:
    return _whole_digest(path, stamp_of(path)) if whole else _file_digest(path, stamp_of(path))


@functools.lru_cache(maxsize=4096)
def _whole_digest(path: Path, stamp: Stamp) -> str:
    """OSError also if the file changes meanwhile."""
    known = _remembered(path, stamp)
    with contextlib.suppress(OSError, ValueError):  # it is computed
        if known is not None:
            return _checked(known.read_text())
    with path.open("rb") as file:
        hashed = hashlib.sha256()
        while piece := file.read(_PIECE_BYTES):
            hashed.update(piece)
        found = hashed.hexdigest()
    if stamp_of(path) != stamp:
        raise OSError(f"{path.name} changed while it was read")
    if known is None:
        return found
    with contextlib.suppress(OSError):  # the next process computes it again
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = known.with_suffix(f".{os.getpid()}")
        part.write_text(found)
        part.replace(known)
    return found


def _remembered(path: Path, stamp: Stamp) -> Path | None:
    """Path of the stored digest of a file's whole content; None for a user without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    name = repr((path.stat().st_dev, stamp.inode, stamp.size, stamp.ctime_ns))
    return cache / "kvserver" / "weights" / hashlib.sha256(name.encode()).hexdigest()


def _checked(digest: str) -> str:
    """ValueError unless it is one."""
    if len(bytes.fromhex(digest)) != hashlib.sha256().digest_size:
        raise ValueError("not a digest")
    return digest


@functools.lru_cache(maxsize=4096)
def _file_digest(path: Path, stamp: Stamp) -> str:
    found = hashlib.sha256(stamp.size.to_bytes(8, "little"))
    with path.open("rb") as file:
        descriptor = file.fileno()
        for begin, size in _pieces(path, descriptor, stamp.size):
            found.update(os.pread(descriptor, size, begin))
    return found.hexdigest()


def _files(folder: Path, deep: bool) -> Iterator[Path]:
    """Files of a folder that an engine may read, in the order of names."""
    for here, folders, names in os.walk(folder):
        inside = (name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        folders[:] = sorted(inside) if deep else []
        for name in sorted(names):
            counts = (
                name.endswith(_WHOLE_SUFFIXES)
                and name not in _HARMLESS_FILES.split()
                and not name.startswith("tokenizer")
            )
            if counts or name.endswith(WEIGHT_SUFFIXES):
                yield Path(here, name)


def _pieces(path: Path, descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of what is read of a file."""
    if path.name.endswith(_WHOLE_SUFFIXES):
        yield 0, size
        return
    tensors = _tensors(descriptor, size) if path.name.endswith(".safetensors") else None
    if tensors is None:
        yield from _samples(0, size, _SAMPLES_OF_FILE)
        return
    data, places = tensors
    yield 0, data
    for begin, end in places:
        yield from _samples(data + begin, data + end, _SAMPLES_OF_TENSOR)


def _samples(begin: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` pieces at even distances, the first bytes and the last among them; all, if that is not more."""
    if end - begin <= count * _SAMPLE_BYTES:
        yield begin, end - begin
        return
    last = end - _SAMPLE_BYTES
    for number in range(count):
        yield begin + (last - begin) * number // (count - 1), _SAMPLE_BYTES


def _tensors(descriptor: int, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """(bytes before the data, where each tensor is in it); None if that is not how safetensors are written."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
        return None
    try:
        header: dict[str, dict[str, Any]] = json.loads(os.pread(descriptor, length, 8))
        places = sorted(tuple(tensor["data_offsets"]) for name, tensor in header.items() if name != "__metadata__")
        if any(not 0 <= begin <= end <= size - 8 - length for begin, end in places):
            return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return 8 + length, [(begin, end) for begin, end in places]
