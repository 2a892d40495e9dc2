"""L1 that begins empty because of another page size, as one of more than 4 TiB has."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvserver._native import HostRegion
from kvserver.cache import POLICIES, Cache
from kvserver.config import Settings
from kvserver.restart import L1File, RestartableL1
from kvserver.restart.state import State, encode

SIZE = 1 << 20


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
