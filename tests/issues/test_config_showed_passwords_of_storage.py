"""`GET /config`, which any user of the machine may ask where there is no token, and the line about a bad setting showed the password of an `--l2` URL."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from support.commands import run
from support.daemon import Daemon

URL = "valkey://user:hun@ter22@127.0.0.1:1/0?timeout=1s"


def test_pages_and_the_log_show_urls_without_user_and_password(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(l2=[URL], otlp_endpoint="http://user:hunter22@127.0.0.1:1")
    code, body = daemon.http("/config")
    assert code == 200
    shown = {name: setting["value"] for name, setting in json.loads(body).items()}
    assert (shown["l2"], shown["otlp_endpoint"]) == (["valkey://127.0.0.1:1/0?timeout=1s"], "http://127.0.0.1:1")
    assert not [page for page in (body, daemon.http("/status")[1], daemon.http("/")[1], daemon.log) if "ter22" in page]


@pytest.mark.parametrize("wrong", [f"{URL}&colour=red", f"{URL}&admit=none", URL.replace(":1/", ":port/")])
def test_a_refused_url_is_named_without_user_and_password(wrong: str) -> None:
    done = run("serve", "--l2", wrong)
    assert done.returncode == 2
    assert "--l2" in done.stderr
    assert "valkey://127.0.0.1:" in done.stderr
    assert "ter22" not in done.stderr
