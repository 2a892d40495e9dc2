"""`Clear` of one instance cleared what other instances and machines use, without the refusal that `POST /cache/clear` has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon
from support.valkey import ValkeyStore
from support.worker import Worker, make_keys

from kvserver.protocol import Clear, Cleared
from kvserver.protocol.client import RequestFailed


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ValkeyStore]:
    store = ValkeyStore(tmp_path)
    yield store
    store.close()


def test_clear_of_kv_that_another_instance_uses_is_refused_unless_shared(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon()
    one, two = make_worker(daemon, instance_id="one"), make_worker(daemon, instance_id="two")
    keys = make_keys(3)
    one.store(keys, one.blocks_for(3))
    with pytest.raises(RequestFailed, match=r"instances two.*shared=true") as caught:
        one.ask(Clear("one"), Cleared)
    assert caught.value.code == "shared"
    assert two.lookup(keys) == 3
    assert daemon.http("/cache/clear?instance_id=one", "POST")[0] == 409, "one rule for both"
    assert one.ask(Clear("one", shared=True), Cleared).chunks == 3
    assert two.lookup(keys) == 0


def test_clear_of_kv_in_a_shared_tier_is_refused_unless_shared(
    store: ValkeyStore, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = make_daemon(l2=[store.url_of("clears")], l1_size="16MiB")
    daemon.wait_for_tiers()
    keys = make_keys(3)
    with Worker(daemon.endpoint, instance_id="one") as worker:
        worker.store(keys, worker.blocks_for(3))
        with pytest.raises(RequestFailed, match="other machines, through valkey"):
            worker.ask(Clear("one"), Cleared)
        assert worker.lookup(keys) == 3
        assert worker.ask(Clear("one", shared=True), Cleared).chunks == 3
        worker.store(keys, worker.blocks_for(3))
        assert worker.ask(Clear(), Cleared).chunks == 3, "everything is never meant for one"
