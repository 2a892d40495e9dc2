"""Scrapes of /metrics: the form that a client requests, exemplars, compression, and HEAD and OPTIONS of all pages."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.collector import over_http
from support.daemon import Daemon, wait_until
from support.worker import make_keys

# What Prometheus 3.5 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
TRACE = "0af7651916cd43dd8448eb211c80319c"


@contextmanager
def answer(
    daemon: Daemon, path: str, method: str = "GET", **headers: str
) -> Iterator[tuple[http.client.HTTPResponse, bytes]]:
    with closing(http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=10)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        yield response, response.read()


def series(families: Any) -> set[tuple[str, str]]:
    return {(sample.name, str(sorted(sample.labels.items()))) for family in families for sample in family.samples}


def test_openmetrics_has_the_series_of_the_text(daemon, worker):
    worker.round_trip()
    with answer(daemon, "/metrics") as (response, text):
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    with answer(daemon, "/metrics", Accept=PROMETHEUS) as (response, body):
        assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert body.endswith(b"# EOF\n")
    assert series(parse_openmetrics(body.decode())) == series(parse_text(text.decode()))


def test_a_client_that_takes_gzip_gets_a_fraction_of_the_bytes(daemon, worker):
    worker.round_trip()
    with answer(daemon, "/metrics", **{"Accept-Encoding": "gzip"}) as (response, body):
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.headers["Vary"] == "Accept, Accept-Encoding"
    assert len(gzip.decompress(body)) > 5 * len(body)
    with answer(daemon, "/metrics", **{"Accept-Encoding": "identity"}) as (response, body):
        assert "Content-Encoding" not in response.headers
        assert body.startswith(b"# HELP")


def test_a_copy_of_a_traced_request_is_an_exemplar_of_its_bucket(make_daemon, make_worker):
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url)
        worker = make_worker(daemon)
        keys = make_keys(1)
        worker.store(keys, worker.blocks_for(1))
        worker.lookup(keys, "traced", traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
        worker.load(keys, worker.blocks_for(1), request_id="traced")

        def exemplars() -> list[Any]:
            with answer(daemon, "/metrics", Accept=PROMETHEUS) as (_, body):
                found = {family.name: family for family in parse_openmetrics(body.decode())}
            samples = found["kvserver_load_duration_seconds"].samples
            return [sample for sample in samples if sample.exemplar is not None]

        seen = wait_until(exemplars)
        worker.hang_up()
        wait_until(lambda: not exemplars(), what="the exemplars of an engine end with it")
    assert {sample.labels["phase"] for sample in seen} == {"queue", "copy"}
    for sample in seen:
        assert sample.exemplar.labels["trace_id"] == TRACE
        assert sample.exemplar.value <= float(sample.labels["le"])
        assert sample.value == 1


@pytest.mark.parametrize("path", ["/", "/status", "/metrics", "/livez", "/readyz", "/config", "/history"])
def test_head_has_the_headers_of_get_and_no_body(daemon, path):
    with answer(daemon, path) as (get, body), answer(daemon, path, "HEAD") as (head, nothing):
        assert (
            (head.status, head.headers["Content-Type"])
            == (get.status, get.headers["Content-Type"])
            == (200, head.headers["Content-Type"])
        )
        assert int(head.headers["Content-Length"]) > 0
        assert body
        assert nothing == b""


def test_a_connection_goes_on_after_head(daemon):
    with socket.create_connection(("127.0.0.1", daemon.http_port), timeout=10) as connection:
        for method, end in (("HEAD", ""), ("GET", ""), ("OPTIONS", ""), ("GET", "Connection: close\r\n")):
            connection.sendall(f"{method} /livez HTTP/1.1\r\nHost: localhost\r\n{end}\r\n".encode())
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == [b"", b"alive\n", b"", b"alive\n"]


def test_head_of_a_page_that_does_not_exist_is_404(daemon):
    with answer(daemon, "/nowhere", "HEAD") as (response, body):
        assert (response.status, body) == (404, b"")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/metrics", "HEAD, GET, OPTIONS"),
        ("/cache/clear", "POST, OPTIONS"),
        ("/sessions", "HEAD, GET, OPTIONS"),
        ("/sessions/a?model=b", "DELETE, OPTIONS"),
        ("*", "HEAD, GET, POST, DELETE, OPTIONS"),
    ],
)
def test_options_name_the_methods_of_a_page(daemon, path, allowed):
    with answer(daemon, path, "OPTIONS") as (response, body):
        assert (response.status, response.headers["Allow"], body) == (200, allowed, b"")
        assert not [name for name in response.headers if name.startswith("Access-Control")]
    with answer(daemon, "/nowhere", "OPTIONS") as (response, body):
        assert response.status == 404


def test_a_preflight_of_another_site_is_refused(daemon):
    asks = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    with answer(daemon, "/cache/clear", "OPTIONS", **asks) as (response, body):
        assert (response.status, json.loads(body)["error"]) == (403, "foreign_origin")


def test_where_pages_need_a_token_head_needs_it_too(make_daemon, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    daemon = make_daemon(http_token_file=token)
    with answer(daemon, "/status", "HEAD") as (response, body):
        assert (response.status, body) == (401, b"")
    with answer(daemon, "/status", "HEAD", Authorization="Bearer 0123456789abcdef") as (response, _):
        assert response.status == 200
    with answer(daemon, "/metrics", "HEAD") as (response, _):
        assert response.status == 200
