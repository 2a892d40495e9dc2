"""A wrong value was refused with "Invalid enum value 'INFO'" or "Expected `int` <= 65535", and a misspelt variable had no effect unseen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta
from support.daemon import wait_until

from kvserver.__main__ import main
from kvserver.adapters.common.settings import CommonSettings, read_settings
from kvserver.config import misspelt_variables
from kvserver.config.sources import field_types, read_configuration
from kvserver.protocol import ConfigError, allowed_values

PYTHONS = re.compile(r"`(int|str|float|array|object|bool)`|enum|regex|Errno|\bstr\b|codec|True|False|\['")
WRONG: list[object] = ["", "abc", "INFO", "-1", "1.5", "99999999999", "nan", "x://y", 3, True, [1], {"a": 1}]


def refusal(arguments: dict[str, object]) -> str:
    """Why these settings are refused; "" if they are not."""
    try:
        read_configuration(arguments, {})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", field_types())
def test_no_wrong_value_is_refused_in_words_of_python(name: str) -> None:
    refused = [why for value in WRONG if (why := refusal({name: value}))]
    assert refused
    assert [why for why in refused if PYTHONS.search(why)] == []


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("log_level", "INFO", "one of debug, info, warning, error"),
        ("http_port", "65536", "a whole number from 0 to 65535"),
        ("metrics_sample_rate", "2", "a number above 0 and at most 1"),
        ("lease_seconds", "0", "a number above 0"),
        ("l1_numa", "bind", "one of auto, off, bind:N"),
        ("kv_events_topic", "x" * 257, "text of at most 256 characters"),
        ("endpoint", 3, "text in quotes"),
        ("l2", 3, "a list of texts in quotes"),
    ],
)
def test_a_refusal_names_what_is_allowed(name: str, value: object, hint: str) -> None:
    assert refusal({name: value}).endswith(f": write {hint}")


def test_a_key_of_an_engine_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=re.escape("kvserver.load_timeout_ms 0: write a number above 0")):
        read_settings(CommonSettings, {"kvserver.load_timeout_ms": 0})


def test_allowed_values_of_booleans_and_of_lower_bounds_are_in_words() -> None:
    class Some(msgspec.Struct):
        truth: bool = False
        least: Annotated[int, Meta(ge=2)] = 2

    assert (allowed_values(Some, "truth"), allowed_values(Some, "least")) == (
        "true or false",
        "a whole number of at least 2",
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"log-leve = 'info'\n", "log-leve is no setting; do you mean log-level?"),
        (b"colour = 1\n", "colour is no setting; known are boundary-interval, chunk-tokens, "),
        (b"\xff", "the file is not UTF-8 text"),
        (None, "No such file or directory"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_the_reason(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "kv.toml"
    if content is not None:
        file.write_bytes(content)
    assert refusal({"config": str(file)}).startswith(f"--config {file}: {why}")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--l1-sise", "1GiB"], "--l1-sise is no setting; do you mean --l1-size?"),
        (["--colour=user:password"], "--colour is no setting; kvserver serve --help lists all"),
        (["password"], "a value without a flag is on the command line"),
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_misspelt_flag_is_refused_with_the_nearest_one_in_the_form_of_the_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], why: str, form: str
) -> None:
    monkeypatch.setattr("kvserver.__main__.log_refused_start", lambda *words: print(*words))
    assert main(["serve", "--log-format", form, *words]) == 2
    assert capsys.readouterr().out == f"{why} {form}\n"


def test_a_misspelt_variable_is_named_with_the_nearest_setting() -> None:
    assert misspelt_variables(
        {
            "KVSERVER_L1SIZE": "1GiB",
            "kvserver_l1_size": "1GiB",
            "KVSERVER_LOG_LEVLE": "debug",
            "KVSERVER_COLOUR": "red",
            "KVSERVER_HTP_PORT": "9",
            "KVSERVER_L1_SIZE": "1GiB",
            "L1_SIZE": "1GiB",
        }
    ) == {
        "KVSERVER_L1SIZE": "KVSERVER_L1_SIZE",
        "kvserver_l1_size": "KVSERVER_L1_SIZE",
        "KVSERVER_LOG_LEVLE": "KVSERVER_LOG_LEVEL",
        "KVSERVER_HTP_PORT": "KVSERVER_HTTP_PORT",
    }


def test_variables_of_a_service_of_kubernetes_are_no_misspelt_settings() -> None:
    names = [
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT",
        "PORT_8080_TCP",
        "PORT_8080_TCP_ADDR",
        "HTTP_SERVICE_PORT",
    ]
    assert misspelt_variables({f"KVSERVER_{name}": "10.0.0.1" for name in names}) == {}


def test_a_daemon_names_a_misspelt_variable_at_its_start(make_daemon) -> None:
    daemon = make_daemon(log_format="json", env={"KVSERVER_LOG_LEVLE": "debug"})

    def named() -> list[str]:
        found = [json.loads(line)["message"] for line in daemon.log.splitlines()]
        return [text for text in found if "KVSERVER_LOG_LEVLE" in text]

    assert wait_until(named) == ["KVSERVER_LOG_LEVLE is no setting and has no effect; do you mean KVSERVER_LOG_LEVEL?"]
