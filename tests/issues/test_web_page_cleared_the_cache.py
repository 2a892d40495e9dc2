"""A web page in the browser of a user of the machine could clear the cache, and by DNS rebinding read prompts: every Origin
and Host was answered."""

from __future__ import annotations

import http.client
import json
import re

import pytest
from support.commands import run
from support.daemon import Daemon
from support.worker import Worker, make_keys

PAGES = ("/", "/status", "/instances", "/config", "/kv/snapshot", "/explain", "/nothing")
OPEN = ("/metrics", "/livez", "/readyz")


def ask(daemon: Daemon, method: str, path: str, *headers: tuple[str, str], body: bytes = b"") -> tuple[int, str]:
    """(code, body), with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=5)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers:
        connection.putheader(name, value)
    if method == "POST":
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def refused(daemon: Daemon, reason: str) -> int:
    found: int = daemon.status()["http"]["refused"].get(reason, 0)
    return found


def is_refused(found: tuple[int, str], reason: str) -> None:
    code, body = found
    answer = json.loads(body)
    assert (code, answer["error"]) == (403, reason), body
    assert answer["message"]


FOREIGN_HOSTS = [
    "rebound.example",
    "rebound.example:8080",
    "localhost.rebound.example",
    "127.0.0.1.rebound.example",
    "rebound.example@127.0.0.1",
    "127.0.0.1:8080:rebound.example",
    "[::1].rebound.example",
    "",
    ":8080",
    "xlocalhost",
]


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_foreign_host_name_gets_nothing_but_probes(daemon: Daemon, worker: Worker, host: str) -> None:
    worker.store(make_keys(1), worker.blocks_for(1))
    before = refused(daemon, "foreign_host")
    is_refused(ask(daemon, "POST", "/cache/clear", ("Host", host)), "foreign_host")
    is_refused(ask(daemon, "POST", "/kv/match", ("Host", host), body=b'{"block_hashes": []}'), "foreign_host")
    for path in PAGES:
        is_refused(ask(daemon, "GET", path, ("Host", host)), "foreign_host")
    for path in OPEN:
        assert ask(daemon, "GET", path, ("Host", host))[0] == 200
    assert refused(daemon, "foreign_host") == before + 2 + len(PAGES)
    assert daemon.status()["l1"]["chunks"] == 1


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8080",
        "localhost.",
        "kv.localhost:1",
        "127.0.0.1",
        "127.0.0.1:18080",
        "[::1]:8080",
        "192.0.2.7:80",
    ],
)
def test_addresses_and_localhost_are_served_whatever_port_is_forwarded(daemon: Daemon, host: str) -> None:
    assert ask(daemon, "GET", "/status", ("Host", host))[0] == 200
    assert ask(daemon, "POST", "/cache/clear", ("Host", host))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("Origin", "http://page.example")],
        [("Origin", "null")],
        [("Origin", "")],
        [("Origin", "http://localhost:3000")],
        [("Origin", "http://localhost")],
        [("Origin", "http://localhost:8080.page.example")],
        [("Origin", "file://localhost:8080")],
        [("Origin", "http://localhost:8080"), ("Origin", "http://page.example")],
        [("Sec-Fetch-Site", "cross-site")],
        [("Sec-Fetch-Site", "same-site")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "iframe")],
    ],
    ids=str,
)
def test_a_page_of_another_origin_is_refused(daemon: Daemon, worker: Worker, headers: list[tuple[str, str]]) -> None:
    worker.store(make_keys(1), worker.blocks_for(1))
    before = refused(daemon, "foreign_origin")
    ours = ("Host", "localhost:8080")
    is_refused(ask(daemon, "POST", "/cache/clear", ours, *headers), "foreign_origin")
    is_refused(ask(daemon, "GET", "/status", ours, *headers), "foreign_origin")
    assert refused(daemon, "foreign_origin") == before + 2
    assert daemon.status()["l1"]["chunks"] == 1


@pytest.mark.parametrize(
    "headers",
    [
        [("Origin", "http://localhost:8080")],
        [("Origin", "HTTP://LOCALHOST:8080")],
        [("Sec-Fetch-Site", "same-origin")],
        [("Sec-Fetch-Site", "none"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")],
    ],
    ids=str,
)
def test_page_of_the_daemons_own_origin_may_clear_the_cache(daemon: Daemon, headers: list[tuple[str, str]]) -> None:
    assert ask(daemon, "POST", "/cache/clear", ("Host", "localhost:8080"), *headers)[0] == 200


def test_a_link_to_the_status_page_may_be_followed_and_no_form_sent(daemon: Daemon) -> None:
    link = [
        ("Host", "localhost"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Mode", "navigate"),
        ("Sec-Fetch-Dest", "document"),
    ]
    assert ask(daemon, "GET", "/", *link)[0] == 200
    is_refused(ask(daemon, "POST", "/cache/clear", *link), "foreign_origin")


def test_no_page_of_another_origin_is_given_leave_to_read(daemon: Daemon) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=5)
    connection.request(
        "OPTIONS", "/cache/clear", headers={"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    )
    answer = connection.getresponse()
    assert answer.status >= 400
    assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
    connection.close()


def test_a_request_with_two_hosts_is_refused(daemon: Daemon) -> None:
    assert ask(daemon, "POST", "/cache/clear", ("Host", "localhost"), ("Host", "rebound.example"))[0] == 400


def test_configured_host_name_is_served_and_another_is_refused(make_daemon) -> None:  # type: ignore[no-untyped-def]
    daemon = make_daemon(http_host="localhost")
    assert ask(daemon, "POST", "/cache/clear", ("Host", "localhost"))[0] == 200
    is_refused(ask(daemon, "POST", "/cache/clear", ("Host", "rebound.example")), "foreign_host")


def test_refused_requests_are_counted_by_reason_in_the_metrics(daemon: Daemon) -> None:
    is_refused(ask(daemon, "POST", "/cache/clear", ("Host", "rebound.example")), "foreign_host")
    found = re.search(
        r'^kvserver_http_refused_total\{reason="foreign_host"\} (\S+)$', daemon.http("/metrics")[1], re.MULTILINE
    )
    assert found is not None
    assert float(found[1]) == refused(daemon, "foreign_host") >= 1


def test_status_command_works_by_address_and_by_localhost(daemon: Daemon) -> None:
    for host in ("127.0.0.1", "localhost"):
        shown = run("status", "--http-host", host, "--http-port", str(daemon.http_port))
        assert (shown.returncode, shown.stderr) == (0, "")
