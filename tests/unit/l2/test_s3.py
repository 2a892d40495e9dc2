"""What is S3's own: its URLs, credentials, buckets and lifecycle rules."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import obstore
import pytest
from support.l1_memory import PAGE, name, within
from support.s3 import BUCKET, S3Server, one_server
from support.shared_tiers import MakeDaemon
from support.tls import Authority, TlsProxy

from kvserver._native import HostRegion
from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome, make_tier
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.generations import IDS_SECONDS
from kvserver.l2.remote.make import store_of
from kvserver.l2.remote.s3 import S3Url
from kvserver.l2.remote.store import StoreClient
from kvserver.protocol import ConfigError


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    yield from one_server()


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
    with pytest.raises(ConfigError, match="pip install obstore"):
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


def test_a_probe_of_a_chain_that_s3_lacks_is_one_request(
    server: S3Server, prefix: str, make_daemon_of: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon_of(server.url_of(prefix))
    head, requests = obstore.head_async, []

    def count(store: Any, where: str) -> Any:
        requests.append(where)
        return head(store, where)

    monkeypatch.setattr(obstore, "head_async", count)
    assert daemon.probe(list(range(100)), seconds=60) == 0
    assert len(requests) == 1


def test_the_secret_is_in_no_error(
    server: S3Server, make_daemon_of: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-mine")
    daemon = make_daemon_of(server.url_of("a").replace(str(server.port), "1"), opens=False)
    daemon.ends.until("unavailable")
    assert daemon.tier.failure
    assert "a-secret-of-mine" not in daemon.tier.failure + repr(daemon.tier.status())


# ---- TLS and names of buckets ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def behind_tls(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TlsProxy, Authority]]:
    authority = Authority(tmp_path_factory.mktemp("tls"))
    proxy = TlsProxy(server.port, authority)
    yield proxy, authority
    proxy.close()


def test_a_server_with_a_certificate_of_the_named_authority_is_used(
    behind_tls: tuple[TlsProxy, Authority], prefix: str, make_daemon_of: MakeDaemon
) -> None:
    proxy, authority = behind_tls
    url = f"s3://{BUCKET}/{prefix}?endpoint=https://127.0.0.1:{proxy.port}&region=us-east-1"
    daemon = make_daemon_of(f"{url}&ca={authority.path}")
    memory, read = daemon.l1.object(PAGE), daemon.l1.object(PAGE)
    assert daemon.put(name(1), memory) is TierOutcome.DONE
    assert daemon.get(name(1), read) is TierOutcome.DONE
    assert daemon.l1.read(read) == daemon.l1.read(memory)
    stranger = make_daemon_of(url, opens=False)
    stranger.ends.until("unavailable")
    assert stranger.tier.failure == "the server's certificate is refused: UnknownIssuer"


def test_a_file_without_authorities_is_refused(tmp_path: Path) -> None:
    (url,) = parse_tiers([f"s3://bucket?ca={tmp_path}/ca.pem"])
    with pytest.raises(ConfigError, match=r"ca\.pem: No such file"):
        S3Url(url)


def test_a_virtual_hosted_bucket_is_part_of_the_endpoints_name(
    server: S3Server, prefix: str, make_daemon_of: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the bucket's host is resolved by a proxy, which the server is, too."""
    monkeypatch.setenv("http_proxy", server.endpoint)
    monkeypatch.delenv("no_proxy", raising=False)
    url = f"s3://{BUCKET}/{prefix}?endpoint=http://s3.us-east-1.amazonaws.com/&region=us-east-1&virtual_hosted=true"
    daemon = make_daemon_of(url)
    assert daemon.put(name(1), daemon.l1.object(PAGE)) is TierOutcome.DONE
    assert len([where for where in server.objects() if where.startswith(prefix)]) == 1
    with pytest.raises(ConfigError, match="virtual_hosted=yes: write true or false"):
        S3Url(*parse_tiers(["s3://bucket?virtual_hosted=yes"]))


# ---- ids and lifecycle rules ----------------------------------------------------------------------


def ids_client(server: S3Server, prefix: str, *parameters: str) -> StoreClient:
    _, connect = store_of(*parse_tiers([server.url_of(prefix, *parameters)]))
    return connect(LaneBuffer())


@pytest.mark.parametrize(
    ("hours", "parameters", "renewed"), [(0, (), True), (12, (), False), (0, ("read_only=true",), False)]
)
def test_an_old_id_that_is_read_is_written_anew_before_a_rule_removes_it(
    server: S3Server,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    hours: int,
    parameters: tuple[str, ...],
    renewed: bool,
) -> None:
    monkeypatch.setattr("kvserver.l2.remote.s3._RENEWAL", timedelta(hours=hours))
    server.write(f"{prefix}/id", b"five")
    before = server.modified(f"{prefix}/id")
    time.sleep(1.1)  # times of the store have whole seconds
    client = ids_client(server, prefix, *parameters)
    assert client.read_ids([f"{prefix}/id", f"{prefix}/none"]) == [b"five", None]
    client.close()
    assert (server.modified(f"{prefix}/id") > before, server.read(f"{prefix}/id")) == (renewed, b"five")


def test_a_renewal_never_replaces_the_id_of_a_clear(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvserver.l2.remote.s3._RENEWAL", timedelta())
    server.write(f"{prefix}/id", b"five")
    put = obstore.put_async
    renewals = []

    async def clear_then_put(*arguments: Any, **options: Any) -> Any:
        server.write(f"{prefix}/id", b"six")  # by another daemon, between the read and the renewal
        renewals.append(arguments[1])
        return await put(*arguments, **options)

    monkeypatch.setattr(obstore, "put_async", clear_then_put)
    client = ids_client(server, prefix)
    assert client.read_ids([f"{prefix}/id"]) == [b"five"]
    client.close()
    assert (renewals, server.read(f"{prefix}/id")) == ([f"{prefix}/id"], b"six")
