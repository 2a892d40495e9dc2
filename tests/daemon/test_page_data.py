"""The page's shell without a token, and `/history`, without a browser."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker

from kvserver.protocol.status import DaemonStatus

TOKEN = "correct-horse-battery"
ASSETS = Path(__file__).parent.parent.parent / "kvserver" / "web" / "assets"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    file = tmp_path_factory.mktemp("token") / "token"
    file.touch(mode=0o600)
    file.write_text(TOKEN)
    daemon = Daemon(http_token_file=file, http_host="0.0.0.0", history_seconds=60).start()
    yield daemon
    daemon.close()


def get(daemon: Daemon, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=5)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def history(daemon: Daemon, query: str = "") -> dict[str, Any]:
    code, body = daemon.http("/history" + query)
    assert code == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def column(found: dict[str, Any], name: str) -> list[float]:
    return [row[found["names"].index(name)] for row in found["rows"]]


def test_without_the_token_there_is_the_shell_and_no_data(locked: Daemon) -> None:
    paths = ["/", "/assets/METRICS.md", *(f"/assets/{file.relative_to(ASSETS)}" for file in ASSETS.rglob("*.js"))]
    for path in paths:
        code, headers, body = get(locked, path)
        assert code == 200, path
        assert locked.boot_id not in body
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
    for path in ("/history", "/status", "/explain", "/config", "/assetsx"):
        assert get(locked, path)[0] == 401, path
    assert get(locked, "/history", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_other_sites_pages_get_no_shell_either(locked: Daemon) -> None:
    assert get(locked, "/assets/main.js", Origin="http://evil.example")[0] == 403
    assert get(locked, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors", Sec_Fetch_Dest="iframe")[0] == 403


@pytest.mark.parametrize(
    "path", ["/assets/../pages.py", "/assets/%2e%2e/pages.py", "/assets/index.html", "/assets/", "/assets/vendor/LICENSE", "/assets//etc/passwd"]
)  # fmt: skip
def test_only_the_assets_can_be_read(locked: Daemon, path: str) -> None:
    assert get(locked, path)[0] == 404


def test_an_asset_that_the_browser_has_is_not_sent_again(locked: Daemon) -> None:
    tag = get(locked, "/assets/main.js")[1]["ETag"]
    code, headers, body = get(locked, "/assets/main.js", If_None_Match=tag)
    assert (code, body, headers["ETag"]) == (304, "", tag)
    assert get(locked, "/assets/main.js", If_None_Match='"another"')[0] == 200


def test_the_page_names_nothing_outside_of_this_daemon() -> None:
    """A link may lead elsewhere, but nothing is loaded; the vendored library names its home in a comment."""
    for file in ASSETS.glob("*.*"):
        text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|//[\w-]+\.\w", text), file
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|\bstyle=|\bon\w+=\"", text
        ), file


def test_samples_add_up_to_the_status(make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]) -> None:
    daemon = make_daemon(history_seconds=60)
    worker = make_worker(daemon)
    worker.round_trip()
    worker.end_request(prompt_tokens=1000, local_tokens=250, loaded_tokens=600)
    wait_until(lambda: column(history(daemon), "prompt_tokens_computed")[-1:] == [150])
    found, status = history(daemon), daemon.status()
    shown = {name: column(found, name)[-1] for name in found["names"]}
    assert shown["prompt_tokens_l0"] == status["totals"]["prompt_tokens"]["l0"] == 250
    totals = DaemonStatus().totals.__struct_fields__
    names = [name for name in totals if name in shown]
    assert {name: shown[name] for name in names} == {name: status["totals"][name] for name in names}
    assert {"lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes", "failed_loads", "errors"} <= set(names)
    assert shown["l1_used_bytes"] == status["l1"]["used_bytes"] > 0
    assert shown["engines"] == 1
    assert column(found, "time") == sorted(column(found, "time"))
    wait_until(
        lambda: history(daemon)["ages"]["l1"]["counts"] == [1, 0, 0, 0, 0], what="the event thread counts the chunk"
    )
    worker.close()
    wait_until(lambda: column(history(daemon), "engines")[-1] == 0)
    assert column(history(daemon), "prompt_tokens_l0")[-1] == 250, "counters never fall"


def test_only_new_samples_are_sent(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(history_seconds=60)
    wait_until(lambda: len(history(daemon)["rows"]) >= 2)
    first = history(daemon)
    number = first["first"] + len(first["rows"])
    later = wait_until(lambda: (found := history(daemon, f"?since={number}"))["rows"] and found)
    assert later["first"] == number
    assert min(column(later, "time")) > max(column(first, "time"))
    assert history(daemon, "?since=999999999")["rows"] == []


@pytest.mark.parametrize(
    "query", ["?since=-1", "?since=x", "?since=", "?other=1", "?since=1&since=2", "?since=" + "9" * 40]
)
def test_a_bad_number_is_refused(locked: Daemon, query: str) -> None:
    code, _, body = get(locked, "/history" + query, Authorization=f"Bearer {TOKEN}")
    assert (code, json.loads(body)["error"]) == (400, "bad_parameter")
