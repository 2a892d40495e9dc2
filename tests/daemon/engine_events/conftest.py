"""An index and an engine whose KV events it reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_publisher import EnginePublisher

from kvserver.routing import KVIndex


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as path:  # not tmp_path: a socket's path has little room
        yield Path(path)


@pytest.fixture
def index() -> Iterator[KVIndex]:
    index = KVIndex(64 << 20, follow_engines=True)
    yield index
    index.close()


@pytest.fixture
def engine(folder: Path) -> Iterator[EnginePublisher]:
    publisher = EnginePublisher(folder)
    yield publisher
    publisher.close()
