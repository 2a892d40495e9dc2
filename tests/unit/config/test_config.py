"""Settings: where they come from, which one wins, and the error for a bad one."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvserver.config import Settings, parse_gpus, parse_shares, parse_size, sources
from kvserver.config.settings import GiB, KiB, MiB
from kvserver.protocol import ConfigError, default_endpoint

GPU = "GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b"
OTHER_GPU = "GPU-00000000-0000-0000-0000-000000000001"
NAMES = [field.name for field in msgspec.structs.fields(Settings)]


def load(arguments: dict[str, Any], environ: dict[str, str]) -> Settings:
    return sources.read_configuration(arguments, environ).settings


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return str(path)

    return write


def parsed(*words: str) -> dict[str, Any]:
    """The command line as `kvserver serve` reads it."""
    parser = argparse.ArgumentParser()
    sources.add_flags(parser)
    return vars(parser.parse_args(words))


def test_without_anything_the_defaults_hold() -> None:
    settings = load(parsed(), {})
    assert settings.chunk_tokens == 256
    assert settings.http_host == "127.0.0.1"
    assert settings.http_port == 8080
    assert settings.l1_size == "auto"


def test_the_file_beats_defaults_the_environment_the_file_and_flags_all(toml: Any) -> None:
    path = toml("chunk-tokens = 1\nhttp-port = 1\nlease-seconds = 1\n")
    environ = {"KVSERVER_HTTP_PORT": "2", "KVSERVER_LEASE_SECONDS": "2"}
    settings = load(parsed("--config", path, "--lease-seconds", "3"), environ)
    assert (settings.chunk_tokens, settings.http_port, settings.lease_seconds) == (1, 2, 3.0)
    assert settings.copy_threads == 2


def test_a_flag_that_repeats_the_default_still_beats_the_environment() -> None:
    assert load(parsed("--chunk-tokens", "256"), {"KVSERVER_CHUNK_TOKENS": "16"}).chunk_tokens == 256


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_a_flag_an_environment_variable_and_a_key(name: str, toml: Any) -> None:
    value = {
        "l1_size": "1GiB",
        "l2": "file:///a?size=1GiB",
        "share": "llama=0.5",
        "tails": "off",
        "serving": "off",
        "kv_events": "on",
        "kv_events_endpoint": "tcp://*:5557",
        "kv_events_replay_endpoint": "ipc:///run/replay-{model}",
        "kv_events_format": "array",
        "kv_events_buffer": "1MiB",
        "kv_events_memory": "2MiB",
        "kv_index_size": "3MiB",
        "engine_kv_events": "off",
        "log_level": "error",
        "log_format": "json",
        "eviction_policy": "lru",
        "copy_threads": "3",
        "l1_huge_pages": "2MiB",
        "l1_numa": "bind:1",
        "gpus": "none",
        "pin": "off",
        "pin_share": "0.5",
        "metrics_sample_rate": "0.5",
        "otlp_endpoint": "grpc://localhost:4317",
    }.get(name, "8192")
    flag, others = "--" + name.replace("_", "-"), {}
    if name == "kv_events_replay_endpoint":
        others = {"KVSERVER_KV_EVENTS_ENDPOINT": "tcp://127.0.0.1:5557"}
    by_flag = load(parsed(flag, value), others)
    by_environ = load({}, {"KVSERVER_" + name.upper(): value, **others})
    by_file = load(parsed("--config", toml(f'{flag[2:]} = "{value}"')), others)
    assert getattr(by_flag, name) == getattr(by_environ, name) == getattr(by_file, name)
    shown = getattr(by_flag, name)
    assert str(*shown if isinstance(shown, tuple) else [shown]).removesuffix(".0") == value


def test_a_setting_with_several_values_is_a_repeated_flag_words_in_the_environment_and_a_list_in_a_file(
    toml: Any,
) -> None:
    urls = ["file:///a?size=1GiB", "file:///b?size=2GiB"]
    assert load(parsed("--l2", urls[0], "--l2", urls[1]), {}).l2 == tuple(urls)
    assert load({}, {"KVSERVER_L2": " ".join(urls)}).l2 == tuple(urls)
    assert load(parsed("--config", toml(f"l2 = {urls}")), {}).l2 == tuple(urls)


def test_shares_are_by_model_and_at_most_all_of_l1() -> None:
    ten = [f"m{number}=0.1" for number in range(10)]
    assert load({"share": ten}, {}).share == tuple(ten)
    assert parse_shares(["a/b=c=0.25", ".d=.75"]) == {"a/b=c": 0.25, ".d": 0.75}
    assert parse_shares(["tenant:a=0.25", "a=0.5"]) == {"tenant:a": 0.25, "a": 0.5}
    for shares, why in (
        (["a=0.5", "b=0.51"], r"--share .*the shares are 1\.01 of L1 together"),
        (["a=0.5", "a=0.1"], "'a' has two shares"),
        ([f"m{number}=0.01" for number in range(65)], "65 models and tenants have shares; at most 64 can"),
        *(([f"tenant:{name}=0.1"], "names no tenant") for name in ("", "a b", "a:b", "a=b", "\u00e4", "a\n", "t" * 65)),
        (["tenant:a=0.1", "tenant:a=0.2"], "'tenant:a' has two shares"),
        (["tenant:a=0"], "the share of 'tenant:a' is 0;"),
        (["tenant:a"], "'tenant:a' is no share"),
    ):
        with pytest.raises(ConfigError, match=why):
            load({"share": shares}, {})


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_described(name: str) -> None:
    text = sources.descriptions()[name]
    assert text.endswith(".")
    assert len(text) > 10


def test_the_help_shows_every_setting() -> None:
    parser = argparse.ArgumentParser()
    sources.add_flags(parser)
    text = parser.format_help()
    for name in NAMES:
        assert f"--{name.replace('_', '-')}" in text.replace("\n", " ").split("options:")[1]


BAD = {
    "http_port": ["x", "-1", "65536", "1.5", ""],
    "chunk_tokens": ["0", "many", "100000"],
    "copy_threads": ["0", "-2"],
    "lease_seconds": ["0", "soon"],
    "l1_size": ["lots", "-1GiB", "GiB", "5 GiG", "0", "0GiB", "4095"],
    "l1_huge_pages": ["4KiB", "yes", "2mib", ""],
    "l1_numa": ["bind", "bind:", "bind:x", "bind:0-1", "bind:-1", "all", ""],
    "eviction_policy": ["random", "LRU", ""],
    "share": [
        "llama",
        "=0.5",
        "llama=",
        "llama=half",
        "llama=-0.1",
        "llama=0",
        "llama=1.01",
        "llama=nan",
        "llama=1e-1",
        "llama=50%",
        "(other)=0.5",
        f"{'m' * 513}=0.5",
    ],
    "log_level": ["loud"],
    "log_format": ["xml"],
    "gpus": ["all", "0", "0,1", "GPU-", "AUTO", "", f"{GPU},", f"{GPU},auto", f"{GPU},{GPU}", GPU.upper(), f"{GPU}0"],
    "pin": ["on", "yes", ""],
    "metrics_sample_rate": ["0", "-0.1", "1.1", "all", "nan"],
    "pin_share": ["-0.1", "1.1", "all", "nan"],
    "kv_events_endpoint": ["5557", "tcp://*", "tcp://:1", "tcp://h:65536", "ipc://", "ipc://@a", "ipc:///{instance}"],
    "kv_events_replay_endpoint": ["udp://h:1", "ipc:///folder/"],
    "kv_events_topic": ["kv@{pod}@{model}", "{}"],
    "otlp_endpoint": [
        "localhost:4317",
        "http://",
        "ftp://h:1",
        "grpc://h",
        "grpc://h:1/x",
        "http://h:port",
        "http://h?x=1",
    ],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_reported_with_its_flag(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    for arguments, environ in (({name: value}, {}), ({}, {"KVSERVER_" + name.upper(): value})):
        with pytest.raises(ConfigError) as caught:
            load(arguments, environ)
        assert flag in str(caught.value)
        assert value[:20] in str(caught.value)


def test_the_error_for_a_bad_collector_shows_a_good_one() -> None:
    with pytest.raises(ConfigError, match=r"--otlp-endpoint 'localhost:4318': write http://host:port"):
        load(parsed("--otlp-endpoint", "localhost:4318"), {})


def test_replay_endpoint_without_an_events_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-events-replay-endpoint 'tcp://\*:1': .*--kv-events-endpoint"):
        load(parsed("--kv-events-replay-endpoint", "tcp://*:1"), {})


def test_a_file_with_unknown_keys_names_them_and_the_known_ones(toml: Any) -> None:
    with pytest.raises(ConfigError, match="l1-syze") as caught:
        load(parsed("--config", toml('l1-syze = "1GiB"')), {})
    assert "l1-size" in str(caught.value)


def test_a_file_that_is_missing_or_broken_is_named(toml: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(parsed("--config", str(tmp_path / "nowhere.toml")), {})
    with pytest.raises(ConfigError, match=r"settings\.toml"):
        load(parsed("--config", toml("chunk-tokens = = 1")), {})
    with pytest.raises(ConfigError, match=f"--config {tmp_path}: "):
        load(parsed("--config", str(tmp_path)), {})


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        load(parsed("--config", str(path)), {})


@pytest.mark.parametrize("name", sources.REMOVED)
def test_a_removed_setting_is_refused_with_what_applies_instead(name: str, toml: Any) -> None:
    key, variable = name.replace("_", "-"), "KVSERVER_" + name.upper()
    path = toml(f"{key} = 1")
    for words, environ, given in (
        (("--" + key, "1"), {}, f"flag --{key}"),
        ((), {variable: "1"}, f"environment {variable}"),
        (("--config", path), {}, f"file {path}: {key}"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(parsed(*words), environ)
        assert str(caught.value) == f"{given} is no setting any more: {sources.REMOVED[name]}"


def test_foreign_environment_variables_are_none_of_ours() -> None:
    assert load({}, {"KVSERVER_SOMETHING": "1", "PATH": "/bin"}) == load({}, {})


def test_the_default_endpoint_follows_the_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert load({}, {}).endpoint == "ipc:///run/user/7/kvserver/kvserver.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert load({}, {}).endpoint.startswith("ipc:///tmp/kvserver-")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0", 0),
        ("1KiB", KiB),
        ("512 MiB", 512 * MiB),
        ("20GiB", 20 * GiB),
        ("1.5GiB", 3 * GiB // 2),
        ("1gb", 10**9),
        ("2tib", 2 << 40),
        (" 7 kb ", 7000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 furlong", "-1", "1e9", "1.GiB", "0x10", "1 2", "auto", "inf", "1GiB2"])
def test_the_error_for_a_bad_size_shows_a_good_one(text: str) -> None:
    with pytest.raises(ValueError, match="for example 20GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "uuids"),
    [
        ("auto", ()),
        ("none", ()),
        (GPU, (GPU,)),
        (f"{GPU},{OTHER_GPU}", (GPU, OTHER_GPU)),
        (f" {GPU} , {OTHER_GPU}", (GPU, OTHER_GPU)),
    ],
)
def test_gpus_are_named_by_their_uuids(text: str, uuids: tuple[str, ...]) -> None:
    assert parse_gpus(load({"gpus": text}, {}).gpus) == uuids


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,1", "'0' is no UUID of a GPU; write auto, none or what `nvidia-smi -L` shows"),
        (f"{GPU},{GPU}", f"{GPU} is listed twice"),
    ],
)
def test_the_error_for_a_bad_gpu_states_what_names_one(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, {"KVSERVER_GPUS": text})
    assert str(caught.value).startswith(f"bad setting: --gpus {text!r} (from the environment KVSERVER_GPUS): {words}")


# ---- where a value came from --------------------------------------------------------------------


def test_every_value_knows_where_it_came_from(toml: Any) -> None:
    path = toml('chunk-tokens = 1\nhttp-port = 1\nlog-level = "error"\n')
    environ = {"KVSERVER_HTTP_PORT": "2", "KVSERVER_LEASE_SECONDS": "2"}
    table = sources.read_configuration(parsed("--config", path, "--lease-seconds", "3"), environ).table()
    found = {name: (row["value"], row["source"], row["source_name"]) for name, row in table.items()}
    assert found["chunk_tokens"] == (1, "file", f"{path}: chunk-tokens")
    assert found["http_port"] == (2, "environment", "KVSERVER_HTTP_PORT")
    assert found["lease_seconds"] == (3.0, "flag", "--lease-seconds")
    assert found["copy_threads"] == (Settings().copy_threads, "default", "")
    assert list(found) == NAMES


def test_the_table_shows_defaults_and_descriptions_beside_the_values() -> None:
    row = sources.read_configuration(parsed("--l1-size", "1GiB"), {}).table()["l1_size"]
    assert (row["value"], row["default"], row["flag"]) == ("1GiB", "auto", "--l1-size")
    assert row["description"] == sources.descriptions()["l1_size"]


def test_an_endpoint_that_is_not_set_is_a_default() -> None:
    for environ in ({}, {"KVSERVER_ENDPOINT": ""}):
        row = sources.read_configuration({}, environ).table()["endpoint"]
        assert row["value"] == row["default"] == default_endpoint()
        assert row["source"] == "default"


@pytest.mark.parametrize(("name", "value"), [(name, values[0]) for name, values in BAD.items()])
def test_a_bad_value_is_reported_with_the_place_to_change_it(name: str, value: str, toml: Any) -> None:
    key = name.replace("_", "-")
    path = toml(f'{key} = "{value}"')
    with pytest.raises(ConfigError, match=rf"--config file {path}: {key}\)"):
        load(parsed("--config", path), {})
    with pytest.raises(ConfigError, match=rf"from the environment KVSERVER_{name.upper()}\)"):
        load({}, {"KVSERVER_" + name.upper(): value})
    with pytest.raises(ConfigError) as caught:
        load({name: value}, {})
    assert "from " not in str(caught.value).split(": ", 2)[1]


def test_a_bad_value_is_blamed_on_the_source_that_won(toml: Any) -> None:
    path = toml('http-port = "file"')
    with pytest.raises(ConfigError, match=r"--http-port 'environ' \(from the environment KVSERVER_HTTP_PORT\)"):
        load(parsed("--config", path), {"KVSERVER_HTTP_PORT": "environ"})


# ---- the documentation --------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]


def test_the_tables_in_the_readme_files_agree_with_the_code() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / ".ci/tables.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_readme_names_every_setting() -> None:
    text = (ROOT / "kvserver/config/README.md").read_text()
    rows = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `--")]
    assert rows == [sources.flag(name) for name in NAMES]


def test_a_readme_that_differs_from_the_code_is_noticed_and_corrected(tmp_path: Path) -> None:
    for name in (".ci/tables.py", "kvserver/config/README.md", "adapters/README.md", "adapters/vllm/settings.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    page = tmp_path / "adapters/README.md"
    right = page.read_text()
    page.write_text(right.replace("`kvserver.load_timeout_ms`", "`kvserver.load_timeout`"))

    def tables(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, tmp_path / ".ci/tables.py", *words], capture_output=True, text=True, timeout=60
        )

    stale = tables("--check")
    assert (stale.returncode, stale.stderr) == (1, "adapters/README.md: not what the code has; run `make docs`\n")
    assert tables().returncode == 0
    assert page.read_text() == right
    assert tables("--check").returncode == 0
