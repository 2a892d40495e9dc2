"""The measurements of `kvserver bench`, in their order, each as soon as it is known.

Owns: what is measured, and how long. Refuses to know: how results are shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from kvserver._native import Direction, built_with_cuda, cuda_gpus
from kvserver.bench.copies import CopierRig, KvLayout, llama_8b
from kvserver.bench.lookups import Echo, LookupSubject, millis
from kvserver.bench.storage import OBJECT_BYTES, StorageFailed, opened
from kvserver.bench.timing import MemcpyCeiling, alternate, median
from kvserver.bench.verdicts import (
    COPY_LEAST,
    LOOKUP_MOST,
    STORAGE_LEAST,
    THREADS_LEAST,
    Measurement,
    at_least,
    at_most,
    failed,
)
from kvserver.config import TierUrl, available_memory
from kvserver.protocol import ConfigError

MEMORY_FACTOR = 5  # buffers of memcpy, L1 and an engine's memory, and one more while the next are made
_BLOCK_TOKENS = 16  # vLLM's
_ROUNDS = 5
_PART_SECONDS = 6.0  # of one layout or direction, after which no further round begins
_ECHO_SAMPLES = 50
_MLA = KvLayout("MLA", 61, _BLOCK_TOKENS * 576 * 2, _BLOCK_TOKENS)  # DeepSeek-V3's


def check_memory(size: int) -> None:
    """ConfigError if the buffers would not fit."""
    free, bound = available_memory()
    if size * MEMORY_FACTOR > free:
        text = (
            f"--memory {size >> 20}MiB needs {size * MEMORY_FACTOR >> 20} MiB, and {free >> 20} MiB are left by {bound}"
        )
        raise ConfigError(text)


def measurements(size: int, threads: int, tiers: tuple[TierUrl, ...], only: frozenset[str]) -> Iterator[Measurement]:
    """`size`: bytes of one copy. `only`: parts; all if it is empty."""
    if not only or "memcpy" in only:
        yield from _memcpy(size, threads)
    if not only or "copies" in only:
        for layout in (*llama_8b(_BLOCK_TOKENS).values(), _MLA):
            yield from _copies(layout, size, threads)
        yield from _gpus()
    if not only or "lookup" in only:
        yield from _lookups()
    if not only or "storage" in only:
        for url in tiers:
            yield from _storage(url, max(8, size // 4 // OBJECT_BYTES))


def _memcpy(size: int, threads: int) -> Iterator[Measurement]:
    counts = sorted({1, threads})
    ceilings = [MemcpyCeiling(size, count) for count in counts]
    one, *more = map(median, alternate(_ROUNDS, *(c.gb_per_second for c in ceilings), most_seconds=_PART_SECONDS))
    yield Measurement(part="memcpy", what=f"1 thread, {size >> 20} MiB", value=one, unit="GB/s")
    for all in more:
        yield at_least("memcpy", f"{threads} threads", all, "GB/s", "memcpy by 1 thread", one, THREADS_LEAST)


def _copies(layout: KvLayout, size: int, threads: int) -> Iterator[Measurement]:
    rig = CopierRig(layout, max(1, size // layout.block_bytes) * layout.block_tokens, threads)
    ceiling = MemcpyCeiling(rig.payload, threads)
    memcpy, *found = alternate(
        _ROUNDS,
        ceiling.gb_per_second,
        lambda: rig.gb_per_second(Direction.STORE),
        lambda: rig.gb_per_second(Direction.LOAD),
        most_seconds=_PART_SECONDS,
    )
    for name, values in zip(("store", "load"), map(median, found), strict=True):
        what = f"{name}, {layout.name}, pieces of {layout.run >> 10} KiB"
        yield at_least("copies", what, values, "GB/s", f"memcpy by {threads} threads", median(memcpy), COPY_LEAST)


def _gpus() -> Iterator[Measurement]:
    """Named only: their memory is made by engines, and no part of this package makes any."""
    try:
        names = [name for _, name, *_ in cuda_gpus()] if built_with_cuda() else []
    except RuntimeError:
        return  # there is no driver, so no GPU
    for name in names:
        yield Measurement(part="gpu", what=f"copies to {name} are measured by bench/gpu_all.sh bench of the sources")


def _lookups() -> Iterator[Measurement]:
    with contextlib.ExitStack() as stack:
        subject = stack.enter_context(contextlib.closing(LookupSubject(max(LOOKUP_MOST))))
        echo = stack.enter_context(contextlib.closing(Echo()))
        for tokens, most in LOOKUP_MOST.items():
            size = subject.wire_bytes(tokens)
            echoes, lookups = alternate(
                10,
                partial(millis, partial(echo.once, size), _ECHO_SAMPLES),
                partial(millis, partial(subject.once, tokens), _ECHO_SAMPLES),
                most_seconds=_PART_SECONDS,
            )
            what = f"{tokens >> 10}k tokens, all found, p50"
            yield at_most("lookup", what, median(lookups), "ms", f"an echo of {size:,} bytes", median(echoes), most)


def _storage(url: TierUrl, count: int) -> Iterator[Measurement]:
    try:
        with opened(url, count) as (ceiling, loop, tier):
            for way in ("put", "get"):
                plain, ours = alternate(_ROUNDS - 2, getattr(loop, way), getattr(tier, way), most_seconds=_PART_SECONDS)
                what = f"{way}, {url.shown}"
                yield at_least("storage", what, median(ours), "GB/s", ceiling, median(plain), STORAGE_LEAST)
    except (StorageFailed, ConfigError) as error:
        yield failed("storage", url.shown, str(error))
