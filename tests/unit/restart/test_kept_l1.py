"""L1 that begins empty because of another page size, as one of more than 4 TiB has; and clears that reach chunks not yet adopted."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvserver._native import HostRegion, digest_objects
from kvserver.cache import POLICIES, Cache
from kvserver.config import Settings
from kvserver.protocol import KEY_BYTES, Durability, ObjectGroup
from kvserver.restart import L1File, RestartableL1
from kvserver.restart.state import KeptNamespace, State, decode, encode
from kvserver.server.clears import ClearReport, ClearRequest, Clears

SIZE = 1 << 20
PAGE = 4096
URL = "valkey://host/0"
IDS = {"m": b"m" * 32, "n": b"n" * 32}  # of models


@pytest.fixture
def file() -> Iterator[L1File]:
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir="/dev/shm"))
    made = L1File(str(folder / "l1"))
    yield made
    os.close(made.fd)
    shutil.rmtree(folder)


def test_other_page_size_begins_empty_with_all_pages_free(file: L1File, caplog: pytest.LogCaptureFixture) -> None:
    file.resize(SIZE)
    file.write_state(encode(State(version="1", page_bytes=4096, inode=file.inode, use=file.use_before)))
    region = HostRegion(SIZE, fd=file.fd)
    kept_l1, nothing = RestartableL1(file, region, Settings(), 8192), Any
    cache = Cache(kept_l1.make_pool(SIZE, 8192), POLICIES["lru"]())
    with caplog.at_level(logging.INFO):
        kept_l1.begin(cache, nothing, nothing, [])  # type: ignore[arg-type]
    assert "its pages have 4096 bytes, and those of L1 8192" in caplog.text
    assert cache.pool.unused_pages == SIZE // 8192
    assert file.read_state() is None


class SteadyTier:
    """A tier that answers once it `answers`, and whose generations a clear leaves as they are."""

    url, shared, state = URL, True, "ready"
    answers = False

    def generation(self, namespace: bytes) -> int | None:
        return 7 if self.answers else None

    def learn_generations(self, namespaces: object) -> None:
        pass


class Configured:
    def __init__(self, tier: SteadyTier) -> None:
        self.tier = tier

    def admits(self, durability: Durability) -> bool:
        return True


class DeafBus:
    room = True

    def has_room(self, events: int) -> bool:
        return self.room

    def publish(self, *event: Any) -> None:
        pass


class DeafHub:
    def __init__(self) -> None:
        self.waiting: list[bool] = []

    def restore(self, descriptions: bytes) -> None:
        pass

    def encode_l1(self, and_waiting: bool) -> bytes:
        self.waiting.append(and_waiting)
        return b"described"


def kept_chunks(file: L1File, generations: dict[str, int | None]) -> tuple[RestartableL1, Cache]:
    """Three chunks of each model, which a daemon left."""
    region = HostRegion(SIZE, fd=file.fd)
    region.populate(0, SIZE)
    count = 3 * len(IDS)
    group = (ObjectGroup("full", (0,), 16),)
    counts = array("I", [1] * count).tobytes()
    extents = array("I", [number for page in range(count) for number in (page, 1)]).tobytes()
    file.size_before = SIZE
    file.write_state(
        encode(
            State(
                version="1", page_bytes=PAGE, inode=file.inode, use=file.use_before,
                namespaces=[KeptNamespace(id, name, group, 1, 64, False, Durability.ANYWHERE, generations) for name, id in IDS.items()],
                places=array("I", [0, 1] * 3).tobytes(), flags=bytes(count), ready=array("I", [1] * count).tobytes(),
                keys=os.urandom(KEY_BYTES * count), counts=counts, extents=extents,
                digests=digest_objects(region, PAGE, counts, extents, 1),
            )
        )
    )  # fmt: skip
    kept_l1 = RestartableL1(file, region, Settings(chunk_tokens=64), PAGE)
    return kept_l1, Cache(kept_l1.make_pool(SIZE, PAGE), POLICIES["lru"]())


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("cleared", "left"), [("", set()), ("m", {"n"})])
def test_clear_reaches_chunks_that_wait_or_are_adopted(file: L1File, waits: bool, cleared: str, left: set[str]) -> None:
    """The generations stay: no tier notices the clear."""
    file.resize(SIZE)
    tier = SteadyTier()
    kept_l1, cache = kept_chunks(file, {URL: 7} if waits else {})
    kept_l1.begin(cache, DeafBus(), DeafHub(), [Configured(tier)])  # type: ignore[arg-type, list-item]
    if waits:
        kept_l1.step()
    upkeep = SimpleNamespace(
        cache=cache,
        kept_l1=kept_l1,
        clear=lambda prefix, done: kept_l1.clear(prefix),
        workers=SimpleNamespace(instances=SimpleNamespace(by_id={}, departed={})),
        storage=SimpleNamespace(tiers=SimpleNamespace(all=[], local=[])),
    )
    report = Clears(upkeep).clear(ClearRequest(model_name=cleared), print)  # type: ignore[arg-type]
    assert isinstance(report, ClearReport), report
    tier.answers = True
    deadline = time.monotonic() + 60
    while kept_l1.ids_of_model("m") or kept_l1.ids_of_model("n"):
        kept_l1.step()
        assert time.monotonic() < deadline
    assert {name for name, id in IDS.items() if cache.index.count_with((id,))[0]} == left


@pytest.mark.parametrize(("published", "handled"), [(True, True), (True, False), (False, True)])
def test_descriptions_that_wait_are_left_too_unless_all_events_are_handled(
    file: L1File, published: bool, handled: bool
) -> None:
    """A stop soon after the adoption: the hub has not seen the events yet, and what the state described is only there."""
    file.resize(SIZE)
    bus, hub = DeafBus(), DeafHub()
    kept_l1, cache = kept_chunks(file, {})
    kept_l1.begin(cache, bus, hub, [])  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    bus.room = published
    while kept_l1.ids_of_model("m") or kept_l1.ids_of_model("n"):
        kept_l1.step()
        assert time.monotonic() < deadline
    while published and kept_l1.step():
        assert time.monotonic() < deadline
    assert "6 chunks" in kept_l1.end(cache, hub, lambda: handled)  # type: ignore[arg-type]
    assert hub.waiting == [not (published and handled)]
    left = decode(file.read_state() or b"")
    assert (left.chunks, left.descriptions) == (6, b"described")
