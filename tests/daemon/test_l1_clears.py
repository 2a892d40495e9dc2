"""Clears that another daemon makes in L2 while no daemon has the L1 of --l1-file: the next one with it serves nothing that was cleared."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.kept_l1 import Prompt, hits, start, state_of, store_prompt
from support.registration import identity
from support.shared_tiers import SharedStore
from support.valkey import ValkeyStore

from kvserver.protocol import Durability

Make = Callable[..., Daemon]
OTHER: dict[str, Any] = {"identity": identity(model="other@1"), "model_name": "test/other"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Folder on tmpfs."""
    found = Path(tempfile.mkdtemp(prefix="kvs-", dir="/dev/shm"))
    yield found
    shutil.rmtree(found)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStore]:
    server = ValkeyStore(tmp_path_factory.mktemp("store"))
    yield server
    server.close()


@pytest.fixture(params=["file", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A tier that two daemons can use, one after the other."""
    if request.param == "file":
        return f"file://{tmp_path}/tier?size=16MiB"
    store: SharedStore = request.getfixturevalue("valkey")
    return store.url_of(tmp_path.name)


@pytest.fixture
def kept(make_daemon: Make, folder: Path, url: str) -> Daemon:
    daemon = make_daemon(l1_file=folder / "l1", l2=url)
    wait_until(lambda: is_ready(daemon), what="the tier is ready")
    return daemon


def is_ready(daemon: Daemon) -> bool:
    return all(tier["state"] == "ready" for tier in daemon.status()["l2"])


def store_and_stop(daemon: Daemon, *engines: dict[str, Any]) -> list[Prompt]:
    """Store a prompt of each engine, and end the daemon when L2 has all of them."""
    prompts = [store_prompt(daemon, **engine) for engine in engines]

    def written() -> bool:
        return all(
            tier["written_objects"] >= 3 * len(engines) and not tier["queue_objects"] for tier in daemon.status()["l2"]
        )

    wait_until(written, what="all is written")
    assert daemon.terminate() == 0, daemon.log
    return prompts


def clear(make_daemon: Make, url: str, query: str = "") -> None:
    """A clear by a daemon that has this tier and another L1."""
    other = make_daemon(l2=url)
    wait_until(lambda: is_ready(other), what="the tier is ready")
    engines = [OTHER] if "other" in query else []
    for engine in engines:
        store_prompt(other, **engine)
    code, body = other.http(f"/cache/clear{query}", "POST")
    assert code == 200, body
    assert other.terminate() == 0


def test_clear_by_another_daemon_clears_what_a_restart_keeps(kept: Daemon, make_daemon: Make, url: str) -> None:
    prompt, another = store_and_stop(kept, {}, OTHER)
    clear(make_daemon, url)
    start(kept)
    assert (hits(kept, prompt), hits(kept, another, **OTHER)) == (0, 0)
    assert f"it was cleared in {url.partition('?')[0]}" in kept.log
    new = store_prompt(kept)
    assert kept.terminate() == 0
    start(kept)
    assert hits(kept, new) == 3
    kept.audit()


def test_clear_of_one_model_leaves_the_others(kept: Daemon, make_daemon: Make, url: str) -> None:
    prompt, another = store_and_stop(kept, {}, OTHER)
    clear(make_daemon, url, "?model_name=test/other&shared=true")
    start(kept)
    assert (hits(kept, prompt), hits(kept, another, **OTHER)) == (3, 0)
    kept.audit()


def test_chunks_are_kept_where_nothing_was_cleared(kept: Daemon) -> None:
    (prompt,) = store_and_stop(kept, {})
    for _ in range(3):
        start(kept)
        assert hits(kept, prompt) == 3
        assert kept.terminate() == 0


def test_clear_between_the_second_and_third_start_is_noticed(kept: Daemon, make_daemon: Make, url: str) -> None:
    (prompt,) = store_and_stop(kept, {})
    start(kept)
    assert kept.terminate() == 0  # nothing was stored or looked up
    clear(make_daemon, url)
    start(kept)
    assert hits(kept, prompt) == 0


def test_clear_in_a_tier_that_returns_is_noticed(kept: Daemon, make_daemon: Make, url: str) -> None:
    (prompt,) = store_and_stop(kept, {})
    del kept.flags["l2"]
    start(kept)
    assert hits(kept, prompt) == 3, "a tier that is not used any more is not asked"
    assert kept.terminate() == 0
    clear(make_daemon, url)
    start(kept, l2=url)
    assert hits(kept, prompt) == 0


# ---- a store that does not answer -----------------------------------------------------------------


@pytest.fixture
def shared(make_daemon: Make, folder: Path, valkey: SharedStore, tmp_path: Path) -> Daemon:
    """A daemon with a store that can be stopped."""
    daemon = make_daemon(l1_file=folder / "l1", l2=valkey.url_of(tmp_path.name))
    wait_until(lambda: is_ready(daemon), what="the tier is ready")
    return daemon


def test_chunks_wait_for_a_store_that_does_not_answer(shared: Daemon, valkey: SharedStore) -> None:
    (prompt,) = store_and_stop(shared, {})
    valkey.stop()
    try:
        for _ in range(2):
            (shared.folder / "log").unlink()
            shared.start()
            assert "3 chunks of L1 wait" in shared.log
            assert hits(shared, prompt) == 0
            assert shared.terminate() == 0
        shared.start()
    finally:
        valkey.go_on()
    wait_until(lambda: hits(shared, prompt) == 3, what="the chunks that waited are found")
    shared.audit()


def test_clear_by_this_daemon_reaches_chunks_that_wait(shared: Daemon, valkey: SharedStore) -> None:
    (prompt,) = store_and_stop(shared, {})
    valkey.stop()
    try:
        (shared.folder / "log").unlink()
        shared.start()
        shared.http("/cache/clear", "POST", timeout=20)
    finally:
        valkey.go_on()
    wait_until(lambda: "L1 kept 0 chunks" in shared.log, what="the chunks are dropped")
    assert hits(shared, prompt) == 0
    shared.audit()


def test_store_that_was_emptied_costs_the_chunks(shared: Daemon, valkey: SharedStore) -> None:
    (prompt,) = store_and_stop(shared, {})
    valkey.kill()
    valkey.start()
    start(shared)
    assert hits(shared, prompt) == 0
    assert "it was cleared" in shared.log


def test_chunks_of_one_machine_do_not_wait_for_a_shared_store(
    make_daemon: Make, folder: Path, valkey: SharedStore, tmp_path: Path
) -> None:
    daemon = make_daemon(l1_file=folder / "l1", l2=valkey.url_of(tmp_path.name))
    prompt = store_prompt(daemon, durability=Durability.MACHINE)
    assert daemon.terminate() == 0
    assert state_of(folder / "l1").exists()
    valkey.stop()
    try:
        start(daemon)
        assert hits(daemon, prompt) == 3
    finally:
        valkey.go_on()
    daemon.audit()
