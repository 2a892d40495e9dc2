"""Addresses that a daemon cannot serve."""

from __future__ import annotations

import re

import pytest

from kvserver.protocol import ConfigError
from kvserver.server import Endpoint

LONG = "ipc:///tmp/" + "x" * 120
REFUSED = {
    "ipc://": "name a file",
    "ipc:///tmp": "name a file",
    "ipc://@kv": "name a file",
    "ipc://run/kv.sock": "name a file that may become a socket, as ipc:///run/kvserver/kv.sock",
    "ipc:///proc/nowhere/kv.sock": "/proc/nowhere: No such file or directory",
    LONG: "the path is too long for a Unix socket",
    "tcp://127.0.0.1": "give a port, as tcp://127.0.0.1:5557",
    "tcp://localhost:x": "give a port",
    "tcp://127.0.0.1:99999": "give a port",
    "tcp://0.0.0.0:5555": "tcp is for loopback addresses only",
    "http://x": "give ipc:///path or tcp://127.0.0.1:port",
}


@pytest.mark.parametrize(("url", "words"), REFUSED.items())
def test_an_address_that_cannot_be_is_refused_with_its_flag(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--endpoint {url!r}: ") + ".*" + re.escape(words)):
        Endpoint(url)
