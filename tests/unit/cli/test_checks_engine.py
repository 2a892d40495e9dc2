"""`kvserver doctor --engine` against pages that vLLM, or anything else, might serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from support.http_pages import Page, page_servers, text_page

from kvserver import __main__
from kvserver.cli import checks_engine
from kvserver.cli.checks import Level


@pytest.fixture
def serve() -> Iterator[Callable[[Page], str]]:
    with page_servers() as start:
        yield start


def redirect(target: str, to: Page | None = None) -> Page:
    def page(handler: BaseHTTPRequestHandler) -> None:
        if to is not None and handler.path != "/metrics":
            return to(handler)
        handler.send_response(307)
        handler.send_header("location", target)
        handler.end_headers()

    return page


def metrics(engine: str = "0", reason: str = "", detail: str = "", **values: float) -> str:
    """Of an engine; its cache is on if there is no reason."""
    labels = f'engine="{engine}",model_name="m"'
    lines = [
        "vllm:num_requests_running{" + labels + "} 0",
        "vllm:kvserver_connected{" + labels + f"}} {int(not reason)}",
        "vllm:kvserver_without_cache_info{" + labels + ',reason="starting",detail="x"} 0',
    ]
    if reason:
        lines.append("vllm:kvserver_without_cache_info{" + labels + f',reason="{reason}",detail="{detail}"}} 1')
    lines += [f"vllm:kvserver_{name}{{{labels}}} {value}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def findings(url: str) -> list[tuple[str, Level, str, str]]:
    return [(name, f.level, f.text, f.fix) for name, f in checks_engine.engine_findings(url)]


def only(url: str) -> tuple[Level, str, str]:
    ((_, level, text, fix),) = findings(url)
    return level, text, fix


def test_engine_whose_cache_is_on_is_well_and_its_counts_are_shown(serve: Callable[[Page], str]) -> None:
    url = serve(text_page(metrics(lookups_total=30, lookup_hits_total=4, load_seconds_count=3)))
    level, text, _ = only(url)
    assert (level, text) == (Level.OK, "the cache is on: 30 lookups, 4 with a hit, 3 loads, 0 failed")
    for other in (url + "/", url + "/metrics", url + "/v1", url.removeprefix("http://")):
        assert only(other) == only(url), other


@pytest.mark.parametrize("reason", [*checks_engine.HELP, "refused_bad_planes", "of a later version"])
def test_an_engine_whose_cache_is_off_is_reported_with_the_reason_and_a_fix(
    serve: Callable[[Page], str], reason: str
) -> None:
    level, text, fix = only(serve(text_page(metrics(reason=reason, detail="rank 0: so it is"))))
    assert level == Level.PROBLEM
    assert text == f"the cache is off ({reason}): rank 0: so it is"
    assert fix


def test_each_engine_of_a_server_is_reported(serve: Callable[[Page], str]) -> None:
    url = serve(text_page(metrics("0") + metrics("1", reason="no_daemon") + metrics("2")))
    name = f"engine {url.removeprefix('http://')}"
    assert [(name, level) for name, level, *_ in findings(url)] == [
        (f"{name} 0", Level.OK), (f"{name} 1", Level.PROBLEM), (f"{name} 2", Level.OK),
    ]  # fmt: skip


def test_the_engines_of_two_servers_have_different_names(
    serve: Callable[[Page], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both call their engine 0."""
    info = 'vllm:kvserver_engine_info{engine="0",model_name="m",instance_id="ID"} 1\n'
    urls = [
        serve(text_page(metrics() + info.replace("ID", "llama-a"))),
        serve(text_page(metrics(reason="no_daemon") + info.replace("ID", "llama-b"))),
        "http://127.0.0.1:1",
    ]
    arguments = [word for url in urls for word in ("--engine", url)]
    assert __main__.main(["doctor", *arguments]) == 1
    first, second, third = (url.removeprefix("http://") for url in urls)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"ok       engine {first} 0 (llama-a) the cache is on")
    assert shown[1].startswith(f"problem  engine {second} 0 (llama-b) the cache is off")
    assert shown[2].startswith(f"problem  engine {third} http://127.0.0.1:1 cannot be read")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lookups_total": 100}, "nothing was stored either"),
        ({"lookups_total": 100, "store_bytes_total": 1e9}, "it stores but finds nothing"),
        (
            {"lookups_total": 100, "lookup_hits_total": 50, "load_seconds_count": 2, "load_failures_total": 48},
            "most loads",
        ),
    ],
)
def test_a_cache_that_is_on_and_of_no_use_is_warned_of(
    serve: Callable[[Page], str], values: dict[str, float], words: str
) -> None:
    level, text, fix = only(serve(text_page(metrics(**values))))
    assert (level, words in text) == (Level.WARNING, True), text
    assert fix


def test_faults_and_blocks_out_of_use_are_warned_of(serve: Callable[[Page], str]) -> None:
    found = findings(serve(text_page(metrics(faults_total=2, quarantined_blocks=16))))
    assert [level for _, level, *_ in found] == [Level.OK, Level.WARNING, Level.WARNING]
    assert "2 faults" in found[1][2]
    assert "16 blocks" in found[2][2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('vllm:num_requests_running{engine="0"} 0\n', "the connector is not configured"),
        ('vllm:kvserver_lookups_total{engine="0"} 0\n', "an older connector"),
        ("python_info 1\n", "no metrics of vLLM"),
        ("", "no metrics of vLLM"),
        ("<html>hello</html>\n", "has no metrics"),
        ("vllm:kvserver_connected{ 1\n", "has no metrics"),
        ("\0\1\2 \ufffd" * 100, "has no metrics"),
    ],
)
def test_a_page_that_mentions_no_cache_is_a_finding(serve: Callable[[Page], str], text: str, words: str) -> None:
    level, found, fix = only(serve(text_page(text)))
    assert (level, words in found) == (Level.PROBLEM, True), found
    assert fix


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1", "file:///etc/passwd", "http://", "http://127.0.0.1:x", "127.0.0.1:1", "?"]
)
def test_address_that_is_malformed_or_silent_is_a_problem(url: str) -> None:
    level, text, _ = only(url)
    assert level == Level.PROBLEM
    assert "cannot be read" in text


def test_a_page_that_is_not_there_is_a_finding(serve: Callable[[Page], str]) -> None:
    assert "404" in only(serve(text_page("", "/elsewhere")))[1]


def test_redirects_stay_on_the_host(serve: Callable[[Page], str]) -> None:
    assert only(serve(redirect("/metrics/", text_page(metrics(), "/metrics/"))))[0] == Level.OK
    other = serve(text_page(metrics()))
    assert "redirects to another host" in only(serve(redirect(other + "/metrics")))[1]
    assert only(serve(redirect("/metrics")))[0] == Level.PROBLEM, "for ever in a circle"


def test_a_server_that_takes_its_time_or_never_ends_is_a_finding(
    serve: Callable[[Page], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
        while not ended.wait(0.02):
            handler.wfile.write(b"a")

    monkeypatch.setattr(checks_engine, "_SECONDS", 0.5)
    assert "no complete answer" in only(serve(slow))[1]
    ended.set()
    monkeypatch.setattr(checks_engine, "_SECONDS", 10.0)
    monkeypatch.setattr(checks_engine, "_MOST_BYTES", 1 << 20)
    assert "more than 1 MiB" in only(serve(text_page("x" * (1 << 21))))[1]
    assert "cannot be read" in only(serve(lambda handler: None))[1], "no HTTP at all"


@pytest.mark.parametrize(("reason", "code"), [("", 0), ("no_daemon", 1)])
def test_exit_code_is_one_if_an_engine_has_no_cache(
    serve: Callable[[Page], str], capsys: pytest.CaptureFixture[str], reason: str, code: int
) -> None:
    url = serve(text_page(metrics(reason=reason)))
    assert __main__.main(["doctor", "--engine", url]) == code
    assert capsys.readouterr().out.count("\n") == 2, "the engine and the summary, and no other checks"
    assert __main__.main(["doctor", "--engine", url, "--engine", serve(text_page(""))]) == 1
