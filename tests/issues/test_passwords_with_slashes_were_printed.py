"""A password with / ? or # ended the user's part of a URL: what followed was printed, and left the machine in `doctor --bundle`.

Mooncake's metadata URL, which may have a password, was an argument of its client's process, which any user of the machine may read.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from support.commands import run
from support.daemon import KVSERVER, Daemon

from kvserver.cli.redaction import Redactor
from kvserver.config import parse_tiers
from kvserver.l2.remote import mooncake
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.mooncake import MooncakeUrl
from kvserver.l2.remote.store import StoreError

SECRET = "xyzzy"  # in each of them before and behind the character
PASSWORDS = [f"{SECRET}{between}{SECRET}7" for between in ("/", "?", "#", "@", "?timeout=", "?admit=", "/0?size=", "&a=", ":", "[", "]", "[]", "%", "%2", "\\", '"', "'", ",", ";", " ", "\t", "//", "\u2100", "=", "@@/", "#?/@")]  # fmt: skip
URLS = ["valkey://me:{}@127.0.0.1:1/0", "valkey://{}@127.0.0.1:1", "s3://me:{}@bucket/p", "mooncake://me:{}@127.0.0.1:1", "file://me:{}@h/x?size=1MiB", "valkeyy://me:{}@127.0.0.1:1", "valkey:/me:{}@127.0.0.1", "me:{}@127.0.0.1:1"]  # fmt: skip


def doctor(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run("doctor", *words, env={"KVSERVER_HTTP_PORT": "1"} | environ, timeout=120)


@pytest.mark.parametrize("form", URLS)
@pytest.mark.parametrize("password", PASSWORDS)
def test_an_error_about_a_url_shows_nothing_of_its_password(form: str, password: str) -> None:
    from kvserver.config import read_configuration
    from kvserver.protocol import ConfigError

    url = form.format(password)
    for arguments, environ in (({"l2": [url]}, {}), ({}, {"KVSERVER_L2": url}), ({"otlp_endpoint": url}, {})):
        try:
            configuration = read_configuration(arguments, environ)
            shown = repr(configuration.table()) + repr(parse_tiers(configuration.settings.l2))
            shown += "".join(tier.shown for tier in parse_tiers(configuration.settings.l2))
        except ConfigError as error:
            shown = str(error)
        assert SECRET not in shown
        assert "127.0.0.1" in shown or "bucket" in shown or "//h/x" in shown, "the rest of the URL is shown"


@pytest.mark.parametrize("password", PASSWORDS)
def test_a_log_line_shows_nothing_of_a_password_that_is_known(password: str) -> None:
    url = f"valkey://me:{password}@127.0.0.1:1/0"
    for line in (
        f"connect {url} failed",
        json.dumps({"message": url}),
        repr(url),
        f"auth {password} refused",
        quote(url),
    ):
        from kvserver.config import passwords_in

        assert SECRET not in Redactor(passwords_in(url)).text(line), line


@pytest.mark.parametrize("password", [one for one in PASSWORDS if not set(one) & set(" \t")])
def test_a_log_line_shows_nothing_of_the_password_of_an_unknown_url(password: str) -> None:
    assert SECRET not in Redactor().text(f"GET http://me:{password}@127.0.0.1:1/0 failed")


def test_hostile_words_of_logs_take_no_long_time() -> None:
    began = time.process_time()
    for piece in ("//", "//@", "a//b@", "file://@"):
        Redactor().text(piece * (400_000 // len(piece)), log=True)
    assert time.process_time() - began < 20, "it grows with the text, not with its square"


def test_a_bundle_has_no_password_of_a_daemon_or_of_refused_settings(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    password = f"{SECRET}@{SECRET} 7"
    daemon = make_daemon(l2=[f"valkey://me:{quote(password)}@127.0.0.1:1/0?timeout=1s"])
    (tmp_path / "log").write_text(f"library: cannot log in as me with {password}\n")
    refused = f"valkey://me:{SECRET}/0?{SECRET}#{SECRET}@127.0.0.1:1/0"
    words = ["--endpoint", daemon.endpoint, "--http-port", str(daemon.http_port), "--log", str(tmp_path / "log")]
    for number, environ in enumerate(({}, {"KVSERVER_L2": refused})):
        path = tmp_path / f"{number}.tar.gz"
        ended = doctor("--bundle", str(path), *words, **environ)
        assert ended.returncode == 0, ended.stderr
        with tarfile.open(path) as archive:
            found = {one.name: archive.extractfile(one).read().decode() for one in archive}  # type: ignore[union-attr]
        assert "(secret)" in found["kvserver-bundle/log.txt"]
        assert not [name for name, text in found.items() if SECRET in text]
    assert not [page for page in ("/config", "/status", "/") if SECRET in daemon.http(page)[1]]
    assert SECRET not in daemon.log


@pytest.mark.parametrize("password", ["{0}/{0}", "{0}?{0}", "{0}#{0}"])
def test_doctor_and_serve_print_no_password(password: str, tmp_path: Path) -> None:
    url = f"valkey://me:{password.format(SECRET)}@127.0.0.1:1/0"
    for command in ("serve", "bench"):
        ended = subprocess.run([KVSERVER, command, "--l2", url], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        assert "%2F" in ended.stderr, "how to write it"
        assert SECRET not in ended.stdout + ended.stderr
    ended = doctor("--engine", f"http://me:{password.format(SECRET)}@127.0.0.1:1")
    assert SECRET not in ended.stdout + ended.stderr
    ended = doctor("--l2", url)
    assert "%2F" in ended.stdout
    assert SECRET not in ended.stdout + ended.stderr


def test_metadata_of_mooncake_reaches_its_client_by_a_socket_only() -> None:
    (url,) = parse_tiers(
        [f"mooncake://127.0.0.1:1?timeout=20s&metadata={quote(f'http://me:{SECRET}@127.0.0.1:2', safe='')}"]
    )
    assert MooncakeUrl(url).settings["metadata"] == f"http://me:{SECRET}@127.0.0.1:2"
    started: list[list[str]] = []
    begin = subprocess.Popen

    def popen(words: list[str], **more: object) -> object:
        started.append(words)
        return begin(words, **more)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mooncake.subprocess, "Popen", popen)
        with pytest.raises(StoreError):
            mooncake.connect(MooncakeUrl(url), LaneBuffer())
    assert started
    assert not [word for words in started for word in words if SECRET in word]
