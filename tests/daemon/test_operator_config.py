"""`/config` of a running daemon, and what it reports when it cannot start as it is configured."""

from __future__ import annotations

import json
import os
import resource
import tempfile

import pytest
from support.commands import run


def test_config_shows_every_setting_with_its_value_and_where_it_came_from(make_daemon, tmp_path):
    file = tmp_path / "kv.toml"
    file.write_text("lease-seconds = 5\n")
    daemon = make_daemon(env={"KVSERVER_COPY_THREADS": "3"}, config=file, l1_size="16MiB")
    code, body = daemon.http("/config")
    assert code == 200
    table = json.loads(body)
    assert {name: (row["value"], row["source"]) for name, row in table.items()} == {
        "endpoint": (daemon.endpoint, "flag"),
        "l1_size": ("16MiB", "flag"),
        "l1_huge_pages": ("transparent", "flag"),
        "http_port": (0, "flag"),
        "chunk_tokens": (64, "flag"),
        "log_level": ("info", "flag"),
        "copy_threads": (3, "environment"),
        "lease_seconds": (5.0, "file"),
    } | {name: (row["default"], "default") for name, row in table.items() if row["source"] == "default"}
    assert table["lease_seconds"]["source_name"] == f"{file}: lease-seconds"
    assert table["l1_size"]["default"] == "auto"
    assert all(row["description"] for row in table.values())
    assert "/config" in daemon.http("/nowhere")[1]


def test_a_daemon_that_is_refused_names_the_place_of_the_bad_value(make_daemon, tmp_path):
    file = tmp_path / "kv.toml"
    file.write_text('chunk-tokens = "many"\n')
    for words, environ, place in (
        (["--config", str(file)], {}, f"--config file {file}: chunk-tokens"),
        ([], {"KVSERVER_CHUNK_TOKENS": "many"}, "the environment KVSERVER_CHUNK_TOKENS"),
    ):
        ended = run("serve", *words, env=environ)
        assert ended.returncode == 2
        assert ended.stderr == (
            f"kvserver: bad setting: --chunk-tokens 'many' (from {place}): write a whole number from 1 to 65536\n"
        )


REFUSED = {
    "an endpoint that cannot be": (["--endpoint", "ipc://"], "--endpoint 'ipc://': name a file"),
    "a size that is none": (["--l1-size", "much"], "'much' is no size; write for example 20GiB"),
    "more than the machine has": (["--l1-size", "900TiB"], "--l1-size 900TiB is 989560464998400 bytes, but only"),
    "a host that is unknown": (["--http-host", "nowhere.invalid"], "give an address of this machine"),
    "an address of another machine": (["--http-host", "203.0.113.7"], "--http-host 203.0.113.7 --http-port 0: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line_that_names_its_flag(name, short_folder):
    words, told = REFUSED[name]
    ended = serve(short_folder, *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.startswith("kvserver: ")
    assert told in ended.stderr


def test_a_bad_variable_of_opentelemetry_is_refused_with_its_name(short_folder):
    bad = {"OTEL_METRIC_EXPORT_INTERVAL": "often"}
    ended = serve(short_folder, "--otlp-endpoint", "http://127.0.0.1:1", env=os.environ | bad)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "kvserver: OTEL_METRIC_EXPORT_INTERVAL 'often': write 100 to 3600000 milliseconds\n"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_endpoint_in_a_folder_of_others_is_refused_with_its_flag(short_folder):
    os.chmod(short_folder, 0o500)
    ended = serve(short_folder)
    assert (ended.returncode, "--endpoint 'ipc://" in ended.stderr) == (2, True)


def test_a_machine_without_enough_memory_is_reported_with_the_flags_to_lower(short_folder):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    ended = serve(short_folder, "--l1-size", "2GiB", preexec_fn=limit)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--l1-size 2GiB --copy-threads 2: " in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.fixture
def short_folder():
    with tempfile.TemporaryDirectory(prefix="kvc-") as folder:
        yield folder


def serve(folder, *words, **options):
    """`kvserver serve` that is to be refused."""
    usual = ["--endpoint", f"ipc://{folder}/kv.sock", "--http-port", "0", "--l1-size", "64MiB"]
    return run("serve", *usual, *words, cwd=folder, **options)
