"""`kvserver explain [ID]`: why a request, or the worst requests of the last minutes, computed prompt tokens.

Owns: the text for people. Refuses to know: the server; it reads only the HTTP page.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any
from urllib.parse import urlencode

from kvserver.cli import http_client
from kvserver.cli.terminal import show

NOT_REPORTED = "{}: not reported by this engine"
_INDENT = "  "
_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request_id",
        nargs="?",
        metavar="ID",
        help="the id in the engine's answer, the X-Request-Id of the request, or the beginning of one; without ID: the worst requests",
    )
    parser.add_argument("--minutes", type=int, help="minutes to search back for the worst requests (5)")
    parser.add_argument("--instance-id", help="the worst requests of one engine only")
    parser.add_argument("--limit", type=int, help="most requests to show (1 with ID, 3 without)")
    parser.add_argument("--json", action="store_true", help="print the answer of GET /explain")
    http_client.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """NoAnswer if no daemon answers or the request is not remembered."""
    by_id = arguments.request_id is not None
    query = {
        "request_id": arguments.request_id,
        "minutes": arguments.minutes,
        "instance_id": arguments.instance_id,
        "limit": arguments.limit or (None if arguments.json else 1 if by_id else 3),
    }
    path = "/explain?" + urlencode({name: value for name, value in query.items() if value is not None})
    found = http_client.get(arguments, path, dict[str, Any])
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(text(found))
    return 0


def text(found: dict[str, Any]) -> str:
    """The verdict, the facts and the advice of each request."""
    requests = [_request(request) for request in found["requests"]]
    return "\n\n".join(requests) or "no request of that time is remembered"


def _request(request: dict[str, Any]) -> str:
    lines = [_wrapped(request["verdict"] + ".", "")]
    facts = [
        ("request", f"{request['request_id']}, {request['age_seconds']:,.1f} s ago"),
        ("engine", ", ".join(filter(None, (request["instance_id"], request["model_name"], request.get("engine"))))),
        ("outcome", _outcome(request)),
        ("tokens", _tokens(request["tokens"])),
        ("", NOT_REPORTED.format("tokens in the engine (l0) and computed") * bool(request.get("ends_unreported"))),
        ("missing", _missing(request)),
        ("differs", _differs(request["differs"])),
        ("waited", _waits(request["waits"])),
        ("loads", _loads(request)),
        ("namespace", request["namespace"]),
    ]
    lines += [_wrapped(value, _INDENT + name.ljust(11)) for name, value in facts if value]
    lines += [_wrapped(advice, _INDENT + "to do".ljust(11)) for advice in request["advice"]]
    return "\n".join(lines)


def _wrapped(value: str, begin: str) -> str:
    return textwrap.fill(
        value, _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin), break_on_hyphens=False
    )


def _outcome(request: dict[str, Any]) -> str:
    why = request["failure"] or request["not_loaded"]
    return str(request["outcome"]) + (f" ({why})" if why else "")


def _tokens(tokens: dict[str, Any]) -> str:
    tiers = ", ".join(
        f"{tokens[key]:,} {where}"
        for key, where in (
            ("l0", "in the engine (l0)"),
            ("l1", "loaded from L1"),
            ("l2", "loaded from L2"),
            ("computed", "computed"),
        )
        if tokens[key] is not None and (tokens[key] or key != "l2")
    )
    return (
        f"{tokens['prompt']:,} of the prompt, {tokens['looked_up']:,} looked up, {tokens['found']:,} found; {tiers}; "
        f"{tokens['avoidable']:,} computed tokens were or had been in L1"
    )


def _missing(request: dict[str, Any]) -> str:
    missing = request["missing"]
    if missing is None:
        return ""
    reasons = ", ".join(f"{reason} {tokens:,}" for reason, tokens in request["missed_tokens"].items())
    return f"from chunk {missing['chunk']}, token {missing['token']:,} on; tokens by reason: {reasons}"


def _differs(differs: dict[str, Any] | None) -> str:
    if differs is None:
        return ""
    if not differs["known"]:
        return "the namespace that has the chunk is not remembered"
    fields = "; ".join(f"{field['name']}: {field['here']} here, {field['there']} there" for field in differs["fields"])
    more = f"; {differs['more_fields']} more" if differs["more_fields"] else ""
    engines = ", ".join(differs["instances"])
    return f"{fields}{more}" + (f" (the namespace of {engines})" if engines else "")


def _waits(waits: dict[str, Any]) -> str:
    if not waits["lookups"]:
        return ""
    parts = [f"{waits['lookups']} lookups" if waits["lookups"] > 1 else "one lookup"]
    if waits["first_lookup_to_load_seconds"] is not None:
        parts.append(f"{_ms(waits['first_lookup_to_load_seconds'])} from the first one to the load")
    if waits["load_seconds"] is not None:
        parts.append(
            f"load {_ms(waits['load_seconds'])} (queue {_ms(waits['load_queue_seconds'])}, copy {_ms(waits['load_copy_seconds'])})"
        )
    return ", ".join(parts)


def _loads(request: dict[str, Any]) -> str:
    parts = [
        f"rank {load['rank']}: {load['bytes']:,} bytes in {_ms(load['seconds'])}, {load['outcome']}"
        for load in request["loads"]
    ]
    if request["unlisted_loads"]:
        parts.append(f"{request['unlisted_loads']} loads of further ranks")
    return "; ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"
