"""The command line: `kvserver serve` and `kvserver status`.

Owns: arguments and exit codes. Refuses to know: how anything is done.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from kvserver import __version__, config
from kvserver.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvserver", description="A KV-cache server for LLM inference engines.")
    parser.add_argument("--version", action="version", version=f"kvserver {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the daemon")
    config.add_arguments(serve)
    status = commands.add_parser("status", help="what the daemon on this machine is doing")
    status.add_argument("--json", action="store_true", help="the whole of /status")
    status.add_argument("--http-host", default="127.0.0.1")
    status.add_argument("--http-port", type=int, default=8080)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "serve":
            from kvserver.daemon import serve as run  # the status command should start fast

            return run(config.read(vars(arguments)))
        return _status(arguments)
    except ConfigError as error:
        print(f"kvserver: {error}", file=sys.stderr)
        return 2


def _status(arguments: argparse.Namespace) -> int:
    url = f"http://{arguments.http_host}:{arguments.http_port}/status"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            status = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        print(f"kvserver: no daemon answers at {url}: {error}; see --http-host and --http-port", file=sys.stderr)
        return 1
    print(json.dumps(status, indent=2) if arguments.json else _table(status))
    return 0


def _table(status: dict[str, Any]) -> str:
    l1, totals = status["l1"], status["totals"]
    asked, found = totals["lookup_tokens"], totals["hit_tokens"]
    lines = [
        f"kvserver {status['version']}  boot {status['boot_id']}  up {status['uptime_seconds']:.0f} s  "
        f"{'ready' if status['ready'] else 'NOT READY'}",
        f"L1   {_size(l1['used_bytes'])} of {_size(l1['size_bytes'])}, {l1['chunks']} chunks, {l1['evictions']} evicted",
        f"hits {found} of {asked} tokens" + (f" ({100 * found / asked:.0f}%)" if asked else ""),
        f"moved {_size(totals['stored_bytes'])} stored, {_size(totals['loaded_bytes'])} loaded, "
        f"{totals['failed_loads']} failed loads, {totals['errors']} errors",
    ]
    for instance in status["instances"]:
        ranks = f"{len(instance['workers'])}/{instance['world_size']} ranks"
        counts = instance["requests"]
        lines.append(
            f"  {instance['instance_id']}  {instance['model_name']}  {ranks}  "
            f"{counts['lookups']} lookups, {counts['hits']} hits, {counts['loads']} loads, {counts['stores']} stores"
        )
    return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    raise AssertionError("unreachable")


if __name__ == "__main__":
    sys.exit(main())
