"""`kvserver clear`: forget cached KV, all of it or that of one engine or model.

The command first requests what it would clear (`dry_run`), and shows it. It clears KV that other engines or machines use as well
only if a person agrees, or with --shared.

Owns: the question, the text and the exit code. Refuses to know: what is cleared; the daemon decides and reports it.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any
from urllib.parse import urlencode

from kvserver.cli import http_client
from kvserver.cli.terminal import plain

NOT_CLEARED = 3  # not confirmed, or others use it
UNKNOWN = 4  # no such instance or model
_CLEAR_SECONDS = 15.0  # more than the daemon waits for its tiers
EXAMPLES = """examples:
  kvserver clear --dry-run                       what there is
  kvserver clear --model meta-llama/Llama-3.1-8B-Instruct
  kvserver clear --instance llama-1 --yes --json in a script; add --shared if other engines may lose the same KV

exit codes: 0 cleared (also if there was nothing), 1 no daemon answers or storage failed, 2 bad arguments,
3 not cleared: not confirmed, or others use it, 4 no such instance or model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--instance", default="", metavar="ID", help="only what this engine may find")
    which.add_argument("--model", default="", metavar="NAME", help="only what engines of this model may find")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--shared", action="store_true", help="with --yes: also if other engines or machines use the same KV"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be cleared, clear nothing")
    parser.add_argument("--json", action="store_true", help="print the daemon's report as JSON")
    http_client.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """NoAnswer if no daemon answers."""
    try:
        report = _post(arguments, dry_run="true")
    except http_client.RefusedRequest as refused:
        return _refused(arguments, refused)
    if arguments.dry_run:
        return _print(arguments, report, "would clear")
    if (why := _not_agreed(arguments, report)) is not None:
        if arguments.json:
            print(json.dumps({"error": "not_confirmed", "message": why, "report": report}, indent=2))
        else:
            print(f"kvserver: nothing was cleared: {why}", file=sys.stderr)
        return NOT_CLEARED
    try:
        report = _post(arguments, **({"shared": "true"} if _others(report) else {}))
    except http_client.RefusedRequest as refused:
        return _refused(arguments, refused)
    return _print(arguments, report, "cleared")


def _post(arguments: argparse.Namespace, **more: str) -> dict[str, Any]:
    named = {"instance_id": arguments.instance, "model_name": arguments.model}
    query = urlencode({name: value for name, value in (named | more).items() if value})
    return http_client.post(arguments, f"/cache/clear?{query}", _CLEAR_SECONDS)


def _not_agreed(arguments: argparse.Namespace, report: dict[str, Any]) -> str | None:
    """Reason why nothing may be cleared; None if it may."""
    others = _others(report)
    if arguments.yes:
        return f"{others}; add --shared to clear it for all of them" if others and not arguments.shared else None
    if not sys.stdin.isatty():
        return "there is no terminal on which to ask; add --yes"
    print("\n".join(text(report, "this clears")), file=sys.stderr)
    print("Clear it? [y/N] ", end="", file=sys.stderr, flush=True)
    return None if sys.stdin.readline().strip().lower() in ("y", "yes") else "not confirmed"


def _others(report: dict[str, Any]) -> str:
    """Engines and machines beside the named engines that use what is cleared; "" if there are none."""
    users = [f"the engines {', '.join(report['shared_with'])}"] if report["shared_with"] else []
    if tiers := [tier["name"] for tier in report["l2"] if tier["shared"]]:
        users.append(f"other machines, through {', '.join(tiers)}")
    return f"the same KV may be used by {' and by '.join(users)}" if users else ""


def text(report: dict[str, Any], done: str) -> list[str]:
    """Format the clear report: objects per tier, engines affected, other engines that share them."""
    blocks = f" and {report['tail_blocks']:,} single blocks" if report["tail_blocks"] else ""
    parts = [f"{report['chunks']:,} chunks{blocks} in L1"]
    for tier in report["l2"]:
        objects = (
            "all objects (their number is not known)" if tier["objects"] is None else f"{tier['objects']:,} objects"
        )
        parts.append(f"{objects} in L2 {tier['name']}")
    lines = [f"{done}: {'; '.join(parts)}"]
    lines += [f"  of engines: {', '.join(report['instances'])}"] if report["instances"] else []
    lines += [f"  of models: {', '.join(report['models'])}"] if report["models"] else []
    lines += [f"  {others}"] if (others := _others(report)) else []
    if tiers := ", ".join(report.get("unnamed_l2", [])):
        lines.append(
            f"  not included: what L2 {tiers} may have of engines that are not known here; to clear it, start them, or clear all"
        )
    return [plain(line) for line in lines]


def _print(arguments: argparse.Namespace, report: dict[str, Any], done: str) -> int:
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(text(report, done)))
    return 0


def _refused(arguments: argparse.Namespace, refused: http_client.RefusedRequest) -> int:
    """NoAnswer again, where the daemon has no answer to the question itself."""
    if refused.code not in (404, 409) or "error" not in refused.answer:
        raise refused
    if arguments.json:
        print(json.dumps(refused.answer, indent=2))
    else:
        print(f"kvserver: nothing was cleared: {plain(str(refused.answer['message']))}", file=sys.stderr)
    return UNKNOWN if refused.code == 404 else NOT_CLEARED
