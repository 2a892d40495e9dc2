"""`/config` of a running daemon, and what it says when it cannot start as it is configured."""

from __future__ import annotations

import json
import os
import subprocess

from support.daemon import KVSERVER


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
        ended = subprocess.run(
            [KVSERVER, "serve", *words], capture_output=True, text=True, timeout=20, env=os.environ | environ
        )
        assert ended.returncode == 2
        assert ended.stderr == (
            f"kvserver: bad setting: --chunk-tokens 'many' (from {place}): Expected `int`, got `str`\n"
        )
