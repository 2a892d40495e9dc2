"""Reads the daemon's pages for a command: the flags for their address, the request, the answer or the error.

Owns: the request, its token, and the error texts. Refuses to know: any page.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any, TypeVar

import msgspec

from kvserver.config import bearer, read_token

T = TypeVar("T")
_ANSWER_SECONDS = 5
_MOST_ERROR_BYTES = 1 << 20


class NoAnswer(Exception):
    """Request without an answer; the message is the line to print."""


class RefusedRequest(NoAnswer):
    """Request that the daemon answered with an error. `answer` is its JSON; empty if it had none."""

    def __init__(self, line: str, code: int, answer: dict[str, Any]) -> None:
        super().__init__(line)
        self.code, self.answer = code, answer


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
    url, body = _body(arguments, path, "GET", _ANSWER_SECONDS)
    try:
        return msgspec.json.decode(body, type=form)
    except (ValueError, msgspec.MsgspecError) as error:
        raise NoAnswer(f"kvserver: no daemon answers at {url}: {error}; see --http-host and --http-port") from None


def text(arguments: argparse.Namespace, path: str) -> str:
    """A page that is no JSON. As get()."""
    return _body(arguments, path, "GET", _ANSWER_SECONDS)[1].decode(errors="replace")


def post(arguments: argparse.Namespace, path: str, seconds: float = _ANSWER_SECONDS) -> dict[str, Any]:
    """The JSON that answers a command. As get()."""
    url, body = _body(arguments, path, "POST", seconds)
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (ValueError, msgspec.MsgspecError) as error:
        raise NoAnswer(f"kvserver: {url} answers what is no JSON: {error}") from None


def _body(arguments: argparse.Namespace, path: str, method: str, seconds: float) -> tuple[str, bytes]:
    url = f"http://{arguments.http_host}:{arguments.http_port}{path}"
    request = urllib.request.Request(url, headers=bearer(read_token(arguments.http_token_file)), method=method)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            body: bytes = answer.read()
            return url, body
    except urllib.error.HTTPError as error:
        with error:
            found, line = _answer_of(error)
            reason = found.get("message") or line or error.reason
            raise RefusedRequest(f"kvserver: {url} answers {error.code}: {reason}", error.code, found) from None
    except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            raise NoAnswer(f"kvserver: {url} does not answer within {seconds:g} s; see kvserver doctor") from None
        raise NoAnswer(f"kvserver: no daemon answers at {url}: {error}; see --http-host and --http-port") from None


def _answer_of(error: urllib.error.HTTPError) -> tuple[dict[str, Any], str]:
    """The JSON object in the daemon's answer, or else its first line."""
    try:
        body = error.read(_MOST_ERROR_BYTES)
    except (OSError, http.client.HTTPException):
        return {}, ""
    try:
        found = json.loads(body)
    except ValueError:
        return {}, body.decode(errors="replace").strip().partition("\n")[0]
    return (found, "") if isinstance(found, dict) else ({}, "")
