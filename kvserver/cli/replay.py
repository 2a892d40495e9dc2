"""`kvserver replay TRACE`: the hit rate that a recorded stream of prompts would have had, by size and policy of the cache.

Owns: the table and the progress line. The arguments are in `replay_arguments`, which every command loads. Refuses to know: how a trace is replayed (`replay`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import msgspec

from kvserver.cache import POLICIES
from kvserver.cli import terminal
from kvserver.protocol import ConfigError
from kvserver.replay import SizeResult, Trace, default_sizes, read_trace, replay_sizes

_PROGRESS_SECONDS = 0.5


def main(arguments: argparse.Namespace) -> int:
    """ConfigError if the trace or an argument is wrong."""
    policies = _policies(arguments.policy)
    sizes = _sizes(arguments.blocks) if arguments.blocks is not None else None
    progress = _Progress()
    with _opened(arguments.trace) as lines:
        trace = read_trace(lines, arguments.trace, progress.read)
    if sizes is None:
        sizes = default_sizes(trace)
    results = []
    for result in replay_sizes(trace, sizes, policies, progress.run):
        progress.clear()
        if arguments.json:
            print(msgspec.json.encode(result).decode(), flush=True)
        results.append(result)
    if not arguments.json:
        terminal.show(_table(trace, results))
    return 0


def _table(trace: Trace, results: list[SizeResult]) -> str:
    rows = [("policy", "blocks", "hit rate")]
    for result in results:
        rows.append((result.policy, f"{result.blocks:,}" if result.blocks else "unlimited", f"{result.hit_rate:.1%}"))
    lost = f"; the recording lost {trace.lost:,} requests" if trace.lost else ""
    head = (
        f"{len(trace.requests):,} requests, {trace.blocks:,} blocks, {trace.distinct_blocks:,} of them distinct{lost}"
    )
    return "\n".join([head, *terminal.columns(rows, left=1)])


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--blocks {text!r}: write numbers of blocks joined by commas; 0 is unlimited")
    return [int(part) for part in parts]


def _policies(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError(f"--policy {text!r}: {unknown[0]!r} is no policy; write of {', '.join(POLICIES)}")
    return names


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


class _Progress:
    """How far the work is, on stderr: on a terminal one line that is rewritten, else a line for every run as it begins."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self._due = 0.0
        self._run = ("", -1)
        self._shown = ""

    def read(self, requests: int) -> None:
        self._show(f"{requests:,} requests read")

    def run(self, policy: str, blocks: int, requests: int, of: int) -> None:
        begins, self._run = (policy, blocks) != self._run, (policy, blocks)
        size = f"{blocks:,} blocks" if blocks else "unlimited"
        if self._rewrites:
            self._show(f"{policy}, {size}: {requests:,} of {of:,} requests")
        elif begins:
            print(f"{policy}, {size}: {of:,} requests", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Before a line of results."""
        if self._shown:
            print("\r" + " " * len(self._shown) + "\r", end="", file=sys.stderr, flush=True)
            self._shown = ""

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if not self._rewrites or now < self._due:
            return
        self._due = now + _PROGRESS_SECONDS
        self.clear()
        self._shown = text
        print(text, end="", file=sys.stderr, flush=True)
