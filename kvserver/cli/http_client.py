"""Reads the daemon's pages for a command: the flags for their address, the request, the answer or the error.

Owns: the request, its token, and the error texts. Refuses to know: any page.
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import TypeVar

import msgspec

from kvserver.config import bearer, read_token

T = TypeVar("T")
_ANSWER_SECONDS = 5


class NoAnswer(Exception):
    """The line to print."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--http-host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, default=os.environ.get("KVSERVER_HTTP_PORT") or 8080)
    parser.add_argument(
        "--http-token-file",
        default=os.environ.get("KVSERVER_HTTP_TOKEN_FILE", ""),
        metavar="FILE",
        help="the token file of the daemon, if it has one (or KVSERVER_HTTP_TOKEN_FILE)",
    )


def get(arguments: argparse.Namespace, path: str, form: type[T]) -> T:
    """The JSON of a page. NoAnswer if there is none, ConfigError if the token file cannot be read."""
    url = f"http://{arguments.http_host}:{arguments.http_port}{path}"
    request = urllib.request.Request(url, headers=bearer(read_token(arguments.http_token_file)))
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            return msgspec.json.decode(answer.read(), type=form)
    except urllib.error.HTTPError as error:
        with error:
            raise NoAnswer(f"kvserver: {url} answers {error.code}: {_reason(error)}") from None
    except (urllib.error.URLError, OSError, ValueError, msgspec.MsgspecError) as error:
        raise NoAnswer(f"kvserver: no daemon answers at {url}: {error}; see --http-host and --http-port") from None


def _reason(error: urllib.error.HTTPError) -> str:
    """The message in the daemon's answer; without one, the reason of HTTP."""
    try:
        return str(json.loads(error.read(4096))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)
