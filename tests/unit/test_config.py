"""Settings: where they come from, which one wins, and what a wrong one is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvserver import config
from kvserver.config import GiB, KiB, MiB, Settings, parse_size
from kvserver.errors import ConfigError

NAMES = [field.name for field in msgspec.structs.fields(Settings)]


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
    config.add_arguments(parser)
    return vars(parser.parse_args(words))


def test_without_anything_the_defaults_hold() -> None:
    settings = config.load(parsed(), {})
    assert settings.chunk_tokens == 256
    assert settings.http_host == "127.0.0.1"
    assert settings.http_port == 8080
    assert settings.l1_size == "auto"


def test_the_file_beats_defaults_the_environment_the_file_and_flags_all(toml: Any) -> None:
    path = toml("chunk-tokens = 1\nhttp-port = 1\nlease-seconds = 1\n")
    environ = {"KVSERVER_HTTP_PORT": "2", "KVSERVER_LEASE_SECONDS": "2"}
    settings = config.load(parsed("--config", path, "--lease-seconds", "3"), environ)
    assert (settings.chunk_tokens, settings.http_port, settings.lease_seconds) == (1, 2, 3.0)
    assert settings.copy_threads == 2


def test_a_flag_that_repeats_the_default_still_beats_the_environment() -> None:
    assert config.load(parsed("--chunk-tokens", "256"), {"KVSERVER_CHUNK_TOKENS": "16"}).chunk_tokens == 256


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_a_flag_an_environment_variable_and_a_key(name: str, toml: Any) -> None:
    value = {
        "l1_size": "1GiB",
        "log_level": "error",
        "log_format": "json",
        "eviction_policy": "lru",
        "copy_threads": "3",
    }.get(name, "8192")
    flag = "--" + name.replace("_", "-")
    by_flag = config.load(parsed(flag, value), {})
    by_environ = config.load({}, {"KVSERVER_" + name.upper(): value})
    by_file = config.load(parsed("--config", toml(f'{flag[2:]} = "{value}"')), {})
    assert getattr(by_flag, name) == getattr(by_environ, name) == getattr(by_file, name)
    assert str(getattr(by_flag, name)).removesuffix(".0") == value


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_described(name: str) -> None:
    text = config.descriptions()[name]
    assert text.endswith(".")
    assert len(text) > 10


def test_the_help_shows_every_setting_but_those_for_tests() -> None:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    text = parser.format_help()
    for name in NAMES:
        assert (f"--{name.replace('_', '-')}" in text.replace("\n", " ").split("options:")[1]) or name[:5] == "test_"


BAD = {
    "http_port": ["x", "-1", "65536", "1.5", ""],
    "chunk_tokens": ["0", "many", "100000"],
    "copy_threads": ["0", "-2"],
    "lease_seconds": ["0", "soon"],
    "l1_size": ["lots", "-1GiB", "GiB", "5 GiG", "0", "0GiB"],
    "eviction_policy": ["random"],
    "log_level": ["loud"],
    "log_format": ["xml"],
    "max_message_bytes": ["1"],
    "test_copy_delay_us": ["-1"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_told_with_its_flag(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    for arguments, environ in (({name: value}, {}), ({}, {"KVSERVER_" + name.upper(): value})):
        with pytest.raises(ConfigError) as caught:
            config.load(arguments, environ)
        assert flag in str(caught.value)
        assert value[:20] in str(caught.value)


def test_a_file_with_unknown_keys_names_them_and_the_known_ones(toml: Any) -> None:
    with pytest.raises(ConfigError, match="l1-syze") as caught:
        config.load(parsed("--config", toml('l1-syze = "1GiB"')), {})
    assert "l1-size" in str(caught.value)


def test_a_file_that_is_missing_or_broken_is_named(toml: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        config.load(parsed("--config", str(tmp_path / "nowhere.toml")), {})
    with pytest.raises(ConfigError, match=r"settings\.toml"):
        config.load(parsed("--config", toml("chunk-tokens = = 1")), {})


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        config.load(parsed("--config", str(path)), {})


def test_foreign_environment_variables_are_none_of_ours() -> None:
    assert config.load({}, {"KVSERVER_SOMETHING": "1", "PATH": "/bin"}) == config.load({}, {})


def test_the_default_endpoint_follows_the_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert config.load({}, {}).endpoint == "ipc:///run/user/7/kvserver/kvserver.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert config.load({}, {}).endpoint.startswith("ipc:///tmp/kvserver-")


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
def test_what_is_no_size_is_told_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="for example 20GiB"):
        parse_size(text)
