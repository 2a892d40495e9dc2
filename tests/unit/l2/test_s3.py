"""What is S3's own: its URLs, credentials and buckets."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Literal

import pytest
from support.l1_memory import PAGE, name, within
from support.s3 import CREDENTIALS, S3Server
from support.shared_tiers import MakeDaemon

from kvserver._native import HostRegion
from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome, make_tier
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.generations import IDS_SECONDS
from kvserver.l2.remote.make import store_of
from kvserver.protocol import ConfigError


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in CREDENTIALS.items():
            patch.setenv(variable, value)
        server = S3Server()
        yield server
        server.close()


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/a",
        "s3://bucket:9000/a",
        "s3://bucket?endpoint=host:9000",
        "s3://bucket?endpoint=ftp://h",
    ],
)
def test_urls_with_credentials_ports_or_other_endpoints_are_refused(url: str) -> None:
    (parsed,) = parse_tiers([url])
    with pytest.raises(ConfigError, match="write ") as refusal:
        make_tier(parsed, HostRegion(PAGE), PAGE)
    assert "secret" not in str(refusal.value)


def test_a_missing_client_is_refused_with_the_command_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    (url,) = parse_tiers(["s3://bucket"])
    with pytest.raises(ConfigError, match=r"pip install 'kvserver\[s3\]'"):
        make_tier(url, HostRegion(PAGE), PAGE)


def test_a_bucket_that_does_not_exist_makes_the_tier_unavailable(server: S3Server, make_daemon_of: MakeDaemon) -> None:
    daemon = make_daemon_of(server.url_of("a").replace("s3://bucket/", "s3://no-such-bucket/"), opens=False)
    daemon.ends.until("unavailable")
    assert daemon.tier.failure == "the bucket does not exist"


@pytest.mark.parametrize("conditions", ["refused", "ignored"])
def test_a_store_without_conditional_puts_has_one_id_for_all_after_a_while(
    prefix: str, make_daemon_of: MakeDaemon, server: S3Server, conditions: Literal["refused", "ignored"]
) -> None:
    """Two daemons that start at once may each write an id: both have one when their cached ids have expired twice."""
    plain = S3Server(conditions)
    try:
        _, connect = store_of(*parse_tiers([plain.url_of(prefix)]))
        client = connect(LaneBuffer())
        assert client.create_id(f"{prefix}/id", b"ours") == b"ours"
        assert client.create_id(f"{prefix}/id", b"theirs") == b"theirs", "the last one"
        assert client.read_ids([f"{prefix}/id"]) == [b"theirs"]
        client.close()
        daemon, neighbour = (make_daemon_of(plain.url_of(prefix)) for _ in range(2))
        tickets = [each.tier.put(name(1), each.l1.object(PAGE), b"", within(20)) for each in (daemon, neighbour)]
        for each, ticket in zip((daemon, neighbour), tickets, strict=True):
            assert each.ends.of(ticket).outcome in (TierOutcome.DONE, TierOutcome.CANCELLED)
        for _ in range(2):  # one daemon replaces an id that was replaced, then the other one has to see that
            time.sleep(IDS_SECONDS)
            for each in (daemon, neighbour):
                each.get(name(3), each.l1.object(PAGE))
        memory, read = daemon.l1.object(PAGE), neighbour.l1.object(PAGE)
        assert daemon.put(name(2), memory) is TierOutcome.DONE
        assert neighbour.get(name(2), read) is TierOutcome.DONE
        assert neighbour.l1.read(read) == daemon.l1.read(memory)
        assert daemon.clear() is TierOutcome.DONE
        assert daemon.get(name(2), read) is TierOutcome.MISSING
    finally:
        plain.close()


def test_tiers_with_other_prefixes_share_nothing(server: S3Server, prefix: str, make_daemon_of: MakeDaemon) -> None:
    ours, theirs = make_daemon_of(server.url_of(f"{prefix}/ours")), make_daemon_of(server.url_of(f"{prefix}/theirs"))
    assert ours.put(name(1), ours.l1.object(PAGE)) is TierOutcome.DONE
    assert theirs.probe([1]) == 0
    assert theirs.get(name(1), theirs.l1.object(PAGE)) is TierOutcome.MISSING


def test_the_secret_is_in_no_error(
    server: S3Server, make_daemon_of: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-mine")
    daemon = make_daemon_of(server.url_of("a").replace(str(server.port), "1"), opens=False)
    daemon.ends.until("unavailable")
    assert daemon.tier.failure
    assert "a-secret-of-mine" not in daemon.tier.failure + repr(daemon.tier.status())
