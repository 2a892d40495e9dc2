"""Stores that tiers share, one of each kind for a module, and tiers in them and in folders that end with the test."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.file_tiers import FileRig
from support.mooncake import MooncakeStore
from support.s3 import CREDENTIALS, S3Server
from support.shared_tiers import MakeDaemon, SharedStore, TierDaemon
from support.valkey import ValkeyStore

from unit.l2.file_rigs import MakeRig


@pytest.fixture(scope="module", params=["valkey", "s3", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStore]:
    """A server of each kind. A test leaves it running."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in CREDENTIALS.items():
            patch.setenv(variable, value)
        folder = tmp_path_factory.mktemp(request.param)
        server: SharedStore = {
            "valkey": lambda: ValkeyStore(folder, requirepass="test-valkey-secret"),
            "s3": S3Server,
            "mooncake": lambda: MooncakeStore(folder),
        }[request.param]()
        yield server
        server.close()


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def make_daemon_of() -> Iterator[MakeDaemon]:
    """A tier of this URL with an L1 of its own; `opens`: wait until it is ready."""
    daemons: list[TierDaemon] = []

    def make(url: str, opens: bool = True, pages: int = 1024) -> TierDaemon:
        daemons.append(TierDaemon(url, pages))
        if opens:
            daemons[-1].until_open()
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.tier.close(time.monotonic_ns() + 5_000_000_000)


@pytest.fixture
def daemon(store: SharedStore, prefix: str, make_daemon_of: MakeDaemon) -> TierDaemon:
    return make_daemon_of(store.url_of(prefix))


@pytest.fixture
def neighbour(store: SharedStore, prefix: str, make_daemon_of: MakeDaemon, daemon: TierDaemon) -> TierDaemon:
    """Another daemon that shares the objects."""
    return make_daemon_of(store.url_of(prefix))


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[FileRig] = []

    def make(**options: Any) -> FileRig:
        rigs.append(FileRig(tmp_path / "tier", **options))
        return rigs[-1].opened()

    yield make
    for rig in rigs:
        rig.close()
