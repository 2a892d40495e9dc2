"""What a bundle leaves out: secrets by value and by form, users' parts of paths, token ids; and what it keeps."""

from __future__ import annotations

import json
import time

import pytest

from kvserver.cli.redaction import Redactor, secrets_of
from kvserver.config import passwords_in

REDACTOR = Redactor(["topsecret", "pa%2Fss"], ["/srv/people/eve"], ["eve"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a topsecret b", "a (secret) b"),
        ("pa/ss and pa%2Fss", "(secret) and (secret)"),
        ("valkeys://me:pw@host:1/0", "valkeys://host:1/0"),
        ("s3://b/p?endpoint=http://h&secret_access_key=abc&region=r", "s3://b/p?endpoint=http://h&secret_access_key=(secret)&region=r"),
        ("Authorization: Bearer abcdef0123456789", 'Authorization: "(secret)" (secret)'),
        ("sent Bearer abcdef0123456789 to it", "sent Bearer (secret) to it"),
        ("password = hunter2, next", 'password = "(secret)", next'),
        ("{'hf_token': 'x y'}", "{'hf_token': \"(secret)\"}"),
        ("model hf_abcdefghijklmnop123", "model (secret)"),
        ("--api-key abc --l1-size 1GiB", "--api-key (secret) --l1-size 1GiB"),
        ("/home/adam/models/m", "/home/(user)/models/m"),
        ("/srv/people/eve/x and /data/eve/y", "~/x and /data/(user)/y"),
        ("/run/user/1000/kvserver/kvserver.sock", "/run/user/(user)/kvserver/kvserver.sock"),
        ("/tmp/kvserver-1000/kvserver.sock", "/tmp/kvserver-(user)/kvserver.sock"),
        ("prompt_token_ids=[1, 2, 3]", 'prompt_token_ids="(numbers)"'),
    ],
)  # fmt: skip
def test_secrets_names_of_users_and_token_ids_are_left_out(text: str, shown: str) -> None:
    assert REDACTOR.text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        'kvserver_lookup_hit_tokens_total{model_name="m"} 12',
        "prompt_tokens: 1000, counts [1, 2, 3, 4, 5]",
        "/data/evelyn/m and /var/lib/kvserver",
        "http_token_file /etc/kvserver/token",
        "namespace 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ],
)
def test_harmless_text_is_kept_unchanged(text: str) -> None:
    assert REDACTOR.text(text) == text


def test_logs_show_no_lists_of_numbers_and_no_bytes() -> None:
    assert REDACTOR.text("at [1, 22, 333, 4] and (1, 2, 3, 4,)", log=True) == "at [(numbers)] and ((numbers))"
    assert REDACTOR.text("cut off (1, 2, 3, 4, 5", log=True) == "cut off ((numbers)"
    assert REDACTOR.text(r"got b'\x01\x02 and \'more\'' here", log=True) == "got b'(bytes)' here"
    assert REDACTOR.text("2 of [1, 2, 3] ranks", log=True) == "2 of [1, 2, 3] ranks"


def test_json_stays_json_and_its_counts_stay() -> None:
    value = {
        "a": [1, 2, 3, 4, 5],
        "description": 'write token: x, or "topsecret"',
        "token": "abc",
        "token_ids": [1],
        "n": {"password": None},
    }
    shown = REDACTOR.json(value)
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["a"], shown["token"], shown["token_ids"], shown["n"]) == (
        [1, 2, 3, 4, 5],
        "(secret)",
        "(numbers)",
        {"password": None},
    )
    assert "topsecret" not in shown["description"]


def test_secrets_are_found_in_variables_that_name_them_and_in_urls() -> None:
    environ = {
        "AWS_SECRET_ACCESS_KEY": "s1", "OTEL_EXPORTER_OTLP_HEADERS": "k=s2", "KVSERVER_HTTP_TOKEN_FILE": "/etc/token",
        "KVSERVER_L2": "valkey://u:s%33@h/0,redis://h", "PATH": "/bin",
    }  # fmt: skip
    assert secrets_of(environ) == {"s1", "k=s2", "s%33"}
    assert passwords_in("http://[bad:url@x") == {"url"}


def test_a_long_hostile_line_takes_no_long_time() -> None:
    began = time.process_time()
    for piece in ("a.", "//", "b'", "[1,", "token", "?key", "/home/", "eyJ"):
        REDACTOR.text(piece * (100_000 // len(piece)), log=True)
    assert time.process_time() - began < 60, "it grows with the text, not with its square"
