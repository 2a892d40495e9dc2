"""`POST /status` was answered "no page /status", and the list of pages beside it had none of the deletions."""

from __future__ import annotations

import pytest
from support.daemon import Daemon, fetch


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/status", "HEAD, GET, OPTIONS"),
        ("GET", "/config/serving?value=off", "POST, OPTIONS"),
        ("HEAD", "/audit", "POST, OPTIONS"),
        ("DELETE", "/cache/pins", "HEAD, GET, POST, OPTIONS"),
        ("GET", "/sessions/agent-7", "DELETE, OPTIONS"),
    ],
)
def test_a_page_that_has_other_methods_is_405_and_names_them(
    daemon: Daemon, method: str, path: str, allowed: str
) -> None:
    code, body = daemon.http(path, method)
    assert code == 405
    assert method == "HEAD" or body == f"{path.partition('?')[0]} has no {method}; it has {allowed}\n"


def test_a_page_that_does_not_exist_is_404_and_names_deletions_too(daemon: Daemon) -> None:
    code, body = fetch(f"http://127.0.0.1:{daemon.http_port}/nowhere", "DELETE")
    assert code == 404
    assert "GET /status" in body
    assert "DELETE /cache/pins/ID" in body
