"""On an address that is not loopback, which containers need for scraping, every peer that reached the port could clear the cache
and read the tokens of prompts."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemon import KVSERVER, Daemon
from support.worker import Worker, make_keys

TOKEN = "correct-horse-battery"
OPEN = ("/metrics", "/livez", "/readyz")
SHUT = (
    "/",
    "/status",
    "/instances",
    "/config",
    "/kv/snapshot",
    "/explain",
    "/nothing",
    "/metrics/",
    "/livez/../status",
)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture(scope="module")
def network_daemon() -> Iterator[Daemon]:
    """One on all addresses, as the container has it."""
    daemon = Daemon(http_host="0.0.0.0").start()
    yield daemon
    daemon.close()


def ask(daemon: Daemon, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{daemon.http_port}{path}"
    request = urllib.request.Request(
        url, body, {name.replace("_", "-"): value for name, value in headers.items()}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KVSERVER, *words], capture_output=True, text=True, timeout=20, env={**os.environ, **environ})


# ---- without a token ------------------------------------------------------------------------------


def test_off_loopback_only_probes_and_scrapers_are_answered_even_from_the_machine_itself(
    network_daemon: Daemon, make_worker: Callable[..., Worker]
) -> None:
    worker = make_worker(network_daemon)
    worker.store(make_keys(1), worker.blocks_for(1))
    for path in OPEN:
        assert ask(network_daemon, path)[0] == 200
        assert ask(network_daemon, path + "?x=1", Host="kvserver:8080")[0] == 200
        assert TOKEN not in ask(network_daemon, path)[1]
    asked = [(path, "GET") for path in SHUT] + [
        ("/cache/clear", "POST"),
        ("/audit", "POST"),
        ("/metrics", "POST"),
        ("/kv/match", "POST"),
    ]
    for path, method in asked:
        for headers in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer None"},
            {"X_Forwarded_For": "127.0.0.1"},
        ):
            code, body = ask(network_daemon, path, method, **headers)
            assert (code, json.loads(body)["error"]) == (403, "token_required"), path
            assert "--http-token-file" in json.loads(body)["message"]
    assert "kvserver_l1_chunks 1.0" in ask(network_daemon, "/metrics")[1]
    assert "only /metrics, /livez and /readyz answer" in network_daemon.log


def test_status_command_without_a_token_states_why_it_is_refused(network_daemon: Daemon) -> None:
    shown = run("status", "--http-port", str(network_daemon.http_port))
    assert shown.returncode == 1
    assert "answers 403: " in shown.stderr
    assert "--http-token-file" in shown.stderr


# ---- with one -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_with_a_token_file_the_token_is_needed_and_enough(
    make_daemon: Callable[..., Daemon], token_file: Path, host: str
) -> None:
    daemon = make_daemon(http_host=host, http_token_file=token_file)
    for path in OPEN:
        assert ask(daemon, path)[0] == 200
    wrong = [
        "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, f"Bearer{TOKEN}", "Bearer ü", f"Bearer {TOKEN} x",
        f"Bearer {TOKEN.upper()}",
    ]  # fmt: skip
    for path, method in (("/status", "GET"), ("/kv/snapshot", "GET"), ("/cache/clear", "POST")):
        code, body = ask(daemon, path, method)
        assert (code, json.loads(body)["error"]) == (401, "token_required")
        for shown in wrong:
            code, body = ask(daemon, path, method, Authorization=shown)
            assert (code, json.loads(body)["error"]) == (401, "bad_token"), shown
            assert TOKEN not in body
    for name in ("kvserver:8080", "cache.example"):  # a token proves more than a name
        assert ask(daemon, "/status", Host=name, Authorization=f"bearer  {TOKEN}")[0] == 200
    assert ask(daemon, "/cache/clear", "POST", Authorization=f"Bearer {TOKEN}")[0] == 200
    found = ask(
        daemon,
        "/kv/match",
        "POST",
        b'{"block_hashes": []}',
        Authorization=f"Bearer {TOKEN}",
        Content_Type="application/json",
    )
    assert found[0] == 200
    refused = json.loads(ask(daemon, "/status", Authorization=f"Bearer {TOKEN}")[1])["http"]["refused"]
    assert refused == {"token_required": 3, "bad_token": 3 * len(wrong)}


def test_a_page_of_another_origin_is_refused_with_a_token_too(
    make_daemon: Callable[..., Daemon], token_file: Path
) -> None:
    daemon = make_daemon(http_token_file=token_file)
    code, body = ask(daemon, "/cache/clear", "POST", Origin="http://page.example", Authorization=f"Bearer {TOKEN}")
    assert (code, json.loads(body)["error"]) == (403, "foreign_origin")


def test_token_is_in_neither_config_nor_log_nor_ready_line(
    make_daemon: Callable[..., Daemon], token_file: Path
) -> None:
    daemon = make_daemon(http_host="0.0.0.0", http_token_file=token_file, log_level="debug")
    assert ask(daemon, "/status")[0] == 401
    code, shown = ask(daemon, "/config", Authorization=f"Bearer {TOKEN}")
    assert code == 200
    assert json.loads(shown)["http_token_file"]["value"] == str(token_file)
    assert TOKEN not in shown + daemon.log + daemon.ready_line


def test_the_command_line_shows_the_token_that_it_is_given(
    make_daemon: Callable[..., Daemon], token_file: Path, tmp_path: Path
) -> None:
    daemon = make_daemon(http_token_file=token_file)
    port = str(daemon.http_port)
    for shown in (
        run("status", "--http-port", port, "--http-token-file", str(token_file)),
        run("status", "--http-port", port, KVSERVER_HTTP_TOKEN_FILE=str(token_file)),
    ):
        assert (shown.returncode, shown.stderr) == (0, "")
        assert daemon.boot_id in shown.stdout
    without = run("status", "--http-port", port)
    assert (without.returncode, "--http-token-file" in without.stderr) == (1, True)
    missing = run("status", "--http-port", port, "--http-token-file", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "--http-token-file" in missing.stderr


def test_the_doctor_knows_a_daemon_that_wants_a_token(make_daemon: Callable[..., Daemon], token_file: Path) -> None:
    daemon = make_daemon(http_token_file=token_file)
    words = ["doctor", "--json", "--endpoint", daemon.endpoint, "--http-port", str(daemon.http_port)]
    for more, told in (([], "answers 401"), (["--http-token-file", str(token_file)], f"boot {daemon.boot_id}")):
        rows = json.loads(run(*words, *more).stdout)
        (found,) = [row for row in rows if row["check"] == "HTTP port"]
        assert found["level"] == "ok"
        assert told in found["text"]
    token_file.chmod(0o644)
    rows = json.loads(run(*words, "--http-token-file", str(token_file)).stdout)
    (found,) = [row for row in rows if row["check"] == "HTTP port"]
    assert (found["level"], "--http-token-file" in found["text"]) == ("problem", True)


# ---- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (TOKEN, 0o604, "may be read or written by others"),
        (TOKEN, 0o644, "chmod 600"),
        (TOKEN, 0o620, "may be read or written by others"),
        ("short", 0o600, "holds a token of 5 characters"),
        ("", 0o600, "holds a token of 0 characters"),
        ("x" * 5000, 0o600, "write 16 to 4096"),
        ("two words of a token", 0o600, "holds no token"),
        ("line-one-is-a-token\nline-two", 0o600, "holds no token"),
        ("kein-gültiges-token", 0o600, "holds no token"),
        ("\0" * 20, 0o600, "holds no token"),
    ],
)
def test_a_token_file_that_protects_nothing_is_refused_at_the_start(
    make_daemon: Callable[..., Daemon], tmp_path: Path, content: str, mode: int, reason: str
) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    daemon = make_daemon(start=False, http_token_file=path)
    ended = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert "--http-token-file" in ended.stderr
    assert reason in ended.stderr
    assert not content or content not in ended.stderr


def test_missing_token_file_or_folder_or_pipe_is_refused_at_the_start(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, reason in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "is no file"),
        (tmp_path / "pipe", "is no file"),
    ):
        daemon = make_daemon(start=False, http_token_file=path)
        ended = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=20)
        assert (ended.returncode, reason in ended.stderr) == (2, True), ended.stderr


def test_a_file_that_a_group_may_read_is_taken(make_daemon: Callable[..., Daemon], token_file: Path) -> None:
    """So does Kubernetes hand a secret to a user other than root."""
    token_file.chmod(0o440)
    assert ask(make_daemon(http_token_file=token_file), "/status", Authorization=f"Bearer {TOKEN}")[0] == 200
