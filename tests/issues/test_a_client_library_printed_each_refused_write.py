"""valkey-glide prints each failed command of its own accord: a replica or a full server filled the daemon's stderr beside its log."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.valkey import ValkeyStore

from kvserver.config import parse_tiers
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.make import store_of
from kvserver.l2.remote.store import StoreError, StoreFull, StoreRefused

VALUE = memoryview(bytes(1 << 16))


@pytest.mark.parametrize(("state", "kind"), [("replica", StoreRefused), ("full", StoreFull)])
def test_a_refused_write_is_an_error_and_no_line_of_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], state: str, kind: type[StoreError]
) -> None:
    server = ValkeyStore(tmp_path, maxmemory_policy="noeviction")
    try:
        _, connect = store_of(*parse_tiers([server.url_of("prefix")]))
        client = connect(LaneBuffer())
        with server.client() as other:
            if state == "replica":
                other.execute_command("REPLICAOF", "127.0.0.1", 1)
            else:
                other.config_set("maxmemory", "1mb")
                other.config_set("maxmemory", "1")
        capfd.readouterr()
        for names in (["a"], ["a", "b"]):
            answers = client.put(names, [VALUE] * len(names))
            assert [type(answer) for answer in answers] == [kind] * len(names)
            assert client.exist(names) == [False] * len(names)
        for write in (client.create_id, client.write_id):
            with pytest.raises(kind):
                write("id", b"id")
        client.close()
        assert capfd.readouterr().err == ""
    finally:
        server.close()
