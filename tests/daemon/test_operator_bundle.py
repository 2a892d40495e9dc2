"""`kvserver doctor --bundle` beside a real daemon: what is in it, what is not, and when none is written."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.daemon import KVSERVER, Daemon
from support.kv_chunks import Prompt
from support.ports import reserved_port

TOKEN = "f00dfeed" * 8
CLOUD_KEY = "q9Zx+cloud/key+of+the+daemon"
PASSWORD = "open:sesame/7"
HUB_KEY = "hf_" + "a1B2c3D4" * 4
TOKENS = [7_700_001 + 13 * n for n in range(64)]
USER = "alicebob"


def bundle(daemon: Daemon | None, to: Path, *words: str, port: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    known = (
        ["--endpoint", daemon.endpoint, "--http-port", str(daemon.http_port)] if daemon else ["--http-port", str(port)]
    )
    return run("doctor", "--bundle", str(to), *known, *words, env=env, timeout=90)


def parts_of(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
        }


def outcomes(ended: subprocess.CompletedProcess[str]) -> dict[str, str]:
    found: dict[str, str] = json.loads(ended.stdout)["parts"]
    return found


def test_bundle_of_a_daemon_has_every_part(make_daemon, make_worker, tmp_path):
    daemon = make_daemon()
    make_worker(daemon, instance_id="engine-a")
    path = tmp_path / "b.tar.gz"
    ended = bundle(daemon, path, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert set(outcomes(ended).values()) == {"ok"}
    parts = parts_of(path)
    assert json.loads(parts["status.json"])["boot_id"] == daemon.boot_id
    assert json.loads(parts["status.json"])["instances"][0]["instance_id"] == "engine-a"
    assert json.loads(parts["config.json"])["l1_size"]["value"] == "64MiB"
    assert "kvserver_build_info" in parts["metrics.txt"]
    assert "engine-a" in parts["log.txt"], "the file to which the daemon's stderr goes"
    assert {row["check"] for row in json.loads(parts["doctor.json"])} >= {"daemon", "L1 memory"}
    assert json.loads(parts["machine.json"])["files"]["/proc/meminfo"]
    assert "threads:" in parts["process.txt"]
    assert json.loads(parts["manifest.json"])["parts"] == outcomes(ended)
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [path], "nothing is left beside it"


def planted(make_daemon: Any, make_worker: Any, folder: Path) -> Daemon:
    """A daemon whose flags, environment, engines, KV and log have what must not be sent."""
    (folder / "token").touch(0o600)
    (folder / "token").write_text(TOKEN)
    reservation, port = reserved_port()
    reservation.close()
    url = f"valkey://{USER}:{PASSWORD.replace(':', '%3A').replace('/', '%2F')}@127.0.0.1:{port}/0"
    environ = {"AWS_SECRET_ACCESS_KEY": CLOUD_KEY, "HOME": f"/home/{USER}", "USER": USER, "KVSERVER_L2": url}
    daemon: Daemon = make_daemon(
        env=environ, http_token_file=folder / "token", log_level="debug", kv_events_endpoint=f"ipc://{folder}/events"
    )
    worker = make_worker(daemon, instance_id=f"engine-{HUB_KEY}", model_name=f"/home/{USER}/models/tiny")
    prompt = Prompt(TOKENS, worker.chunk_blocks, block=worker.geometry.block_tokens)
    worker.store(prompt.keys, worker.blocks_for(len(prompt.keys)), contents=prompt.contents())
    with open(daemon.folder / "log", "a") as log:  # as a library or a traceback may write it
        log.write(f"GET http://{USER}:{PASSWORD}@cache.example/x?api_key={CLOUD_KEY}&n=1\n")
        log.write(f"headers: {{'Authorization': 'Bearer {TOKEN}'}} secret_access_key={CLOUD_KEY}\n")
        log.write(f"KeyError: {TOKENS[:9]} in /data/{USER}/x and /home/{USER}/y, {tuple(TOKENS)!r:.60}\n")
        log.write(f"ChunkContents(tokens={struct.pack('<64I', *TOKENS)!r})\n")
    return daemon


def forms_of(secret: str) -> list[bytes]:
    return [secret.encode(), json.dumps(secret)[1:-1].encode()]


def test_no_secret_no_users_part_of_a_path_and_no_token_id_is_in_it(make_daemon, make_worker, tmp_path):
    daemon = planted(make_daemon, make_worker, tmp_path)
    path = tmp_path / "b.tar.gz"
    ended = bundle(daemon, path, "--json", "--http-token-file", str(tmp_path / "token"), HUB_TOKEN=HUB_KEY)
    assert ended.returncode == 0, ended.stderr
    assert set(outcomes(ended).values()) == {"ok"}, "all was there to be searched"
    raw = gzip.decompress(path.read_bytes())
    for secret in (TOKEN, CLOUD_KEY, PASSWORD, PASSWORD.replace(":", "%3A").replace("/", "%2F"), HUB_KEY, USER):
        assert not [form for form in forms_of(secret) if form in raw], secret
    assert not [token for token in TOKENS if str(token).encode() in raw or struct.pack("<I", token) in raw]
    assert b"\\x" not in raw, "no bytes that a traceback shows"
    assert os.uname().nodename.encode() not in raw
    log = parts_of(path)["log.txt"]
    assert "/home/(user)/y" in log or "~/y" in log, "what is no secret is left"
    assert "cache.example/x?api_key=(secret)&n=1" in log


def test_the_planted_secrets_would_be_found(make_daemon, make_worker, tmp_path):
    """The log and the pages have them: else the test above shows nothing."""
    daemon = planted(make_daemon, make_worker, tmp_path)
    everything = daemon.log + Path(f"/proc/{daemon.process.pid}/environ").read_text()
    for secret in (TOKEN, CLOUD_KEY, PASSWORD, HUB_KEY, USER, str(TOKENS[3])):
        assert secret in everything


def test_a_daemon_that_hangs_is_described_by_its_process_and_log(make_daemon, tmp_path):
    daemon = make_daemon()
    daemon.freeze()
    path = tmp_path / "b.tar.gz"
    ended = bundle(daemon, path, "--json")
    assert ended.returncode == 0, ended.stderr
    found = outcomes(ended)
    assert "does not answer within" in found["status.json"]
    assert [found[name] for name in ("doctor.json", "log.txt", "process.txt", "machine.json")] == ["ok"] * 4
    assert re.search(r"^State:\s*T", parts_of(path)["process.txt"], re.MULTILINE), "it is stopped"


def test_a_file_that_the_daemon_inherited_is_not_taken_for_its_log(make_daemon, tmp_path):
    other = tmp_path / "other"
    other.write_text("a file of the process that started the daemon")
    daemon = make_daemon(program=("bash", "-c", f'exec "$0" "$@" 10<{other}', KVSERVER))
    path = tmp_path / "b.tar.gz"
    assert "give --log FILE" in outcomes(bundle(daemon, path, "--json"))["log.txt"]
    assert "that started" not in str(parts_of(path))


def test_without_a_daemon_a_log_may_be_named(make_daemon, tmp_path):
    daemon = make_daemon()
    daemon.kill()
    log = daemon.folder / "log"
    first, second = tmp_path / "first.tar.gz", tmp_path / "second.tar.gz"
    reservation, port = reserved_port()
    with reservation:
        endpoint = ("--endpoint", daemon.endpoint)
        assert "give --log FILE" in outcomes(bundle(None, first, "--json", *endpoint, port=port))["log.txt"]
        ended = bundle(None, second, "--json", "--log", str(log), *endpoint, port=port)
    assert (ended.returncode, outcomes(ended)["log.txt"]) == (0, "ok")
    assert parts_of(second)["log.txt"] == daemon.log


# As systemd starts a service: stderr is a connection to the journal.
TO_JOURNAL = """import os, socket, sys
stderr = socket.socket(socket.AF_UNIX)
stderr.connect(sys.argv[1])
os.dup2(stderr.fileno(), 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def under_systemd(make_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Daemon]:
    with socket.socket(socket.AF_UNIX) as journal:
        path = str(tmp_path / "journal")
        journal.bind(path)
        journal.listen()
        daemon = make_daemon(program=(sys.executable, "-c", TO_JOURNAL, path, KVSERVER))
        with journal.accept()[0]:
            yield daemon


@pytest.fixture
def journalctl(tmp_path: Path) -> Callable[[str], str]:
    """A folder for PATH with nothing but a journalctl that notes its arguments in `asked` and carries out this script."""

    def journalctl(script: str) -> str:
        command = tmp_path / "bin/journalctl"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/asked\n{script}\n')
        command.chmod(0o755)
        return str(command.parent)

    return journalctl


def test_a_log_in_the_journal_is_read_by_journalctl(under_systemd, journalctl, tmp_path):
    path = tmp_path / "b.tar.gz"
    folder = journalctl(f"echo 2026-01-02T03:04:05+0000 kvserver[1]: password={CLOUD_KEY}; echo the last line")
    ended = bundle(under_systemd, path, "--json", PATH=folder)
    assert (ended.returncode, outcomes(ended)["log.txt"]) == (0, "ok")
    lines = parts_of(path)["log.txt"].splitlines()
    assert lines == ['2026-01-02T03:04:05+0000 kvserver[1]: password="(secret)"', "the last line"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {f"_PID={under_systemd.pid}", "--no-pager", "--no-hostname"} < set(asked)
    assert any(re.fullmatch(r"--lines=\d+", word) for word in asked), "not all of a journal"


@pytest.mark.parametrize(
    "script", ["echo No journal files were opened due to insufficient permissions. >&2; exit 1", None]
)
def test_a_journal_that_cannot_be_read_is_reported_and_hides_nothing_else(under_systemd, journalctl, tmp_path, script):
    path = tmp_path / "b.tar.gz"
    ended = bundle(under_systemd, path, "--json", PATH=journalctl(script) if script else str(tmp_path))
    found = outcomes(ended)
    assert ended.returncode == 0
    assert "give --log FILE" in found.pop("log.txt")
    assert set(found.values()) == {"ok"}
    assert "log.txt" not in parts_of(path)


def test_a_long_log_is_cut_at_a_line(make_daemon, tmp_path):
    daemon = make_daemon()
    with open(daemon.folder / "log", "a") as log:
        log.writelines(f"line {n} of many\n" for n in range(100_000))
    path = tmp_path / "b.tar.gz"
    assert bundle(daemon, path).returncode == 0
    lines = parts_of(path)["log.txt"].splitlines()
    assert re.fullmatch(r"line \d+ of many", lines[0])
    assert lines[-1] == "line 99999 of many"
    assert len(lines) < 100_000


def test_a_file_that_is_there_is_kept_without_overwrite(make_daemon, tmp_path):
    daemon = make_daemon()
    path = tmp_path / "b.tar.gz"
    path.write_text("mine")
    ended = bundle(daemon, path)
    assert (ended.returncode, ended.stdout, path.read_text()) == (2, "", "mine")
    assert "add --overwrite" in ended.stderr
    assert bundle(daemon, path, "--overwrite").returncode == 0
    assert "status.json" in parts_of(path)
    missing = bundle(daemon, tmp_path / "no" / "b.tar.gz")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "No such file or directory" in missing.stderr


def test_a_missing_token_hides_the_pages_only(make_daemon, tmp_path):
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN)
    daemon = make_daemon(http_token_file=tmp_path / "token")
    found = outcomes(bundle(daemon, tmp_path / "b.tar.gz", "--json"))
    assert "answers 401" in found["status.json"]
    assert [found[name] for name in ("metrics.txt", "log.txt")] == ["ok", "ok"]


@pytest.mark.parametrize("words", [("--engine", "http://127.0.0.1:1")])
def test_bundle_with_an_engine_is_refused(words, tmp_path):
    ended = bundle(None, tmp_path / "b.tar.gz", *words)
    assert (ended.returncode, list(tmp_path.iterdir())) == (2, [])


def test_help_of_doctor_has_an_example_of_a_bundle_and_the_exit_codes():
    shown = run("doctor", "--help").stdout
    assert "kvserver doctor --bundle kvserver.tar.gz" in shown
    assert "exit codes: 0 no problem" in shown
