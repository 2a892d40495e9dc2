"""`kvserver replay TRACE`: the hit rate that a recorded stream of prompts would have had, by size and policy of the cache.

Owns: the table and the progress line. The arguments are in `replay_arguments`, which every command loads. Refuses to know: how a
trace is replayed (`replay`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, TypeVar

import msgspec

from kvserver.cache import POLICIES
from kvserver.cli import terminal
from kvserver.config import parse_size
from kvserver.protocol import ConfigError
from kvserver.replay import (
    ROUND_ROBIN,
    Plan,
    PlanResult,
    SizeResult,
    default_sizes,
    read_trace,
    replay_cluster,
    replay_sizes,
)

_PROGRESS_SECONDS = 0.5
_MOST_MACHINES = 10_000
Result = TypeVar("Result", SizeResult, PlanResult)


def main(arguments: argparse.Namespace) -> int:
    """ConfigError if the trace or an argument is wrong."""
    policies, sizes, plan = _policies(arguments.policy), _sizes(arguments.blocks), _plan(arguments)
    progress = _Progress()
    with _opened(arguments.trace) as lines:
        trace = read_trace(lines, arguments.trace, progress.read)
    sizes = sizes or default_sizes(trace)
    if plan is None:
        results = replay_sizes(trace, sizes, policies, progress.run, arguments.warm_up)
        found = _shown(results, progress, arguments.json)
        table = _table(found)
    else:
        planned = _shown(replay_cluster(trace, sizes, policies, plan, progress.run), progress, arguments.json)
        table = _plan_table(plan, planned)
    if not arguments.json:
        lost = f"; the recording lost {trace.lost:,} requests" if trace.lost else ""
        head = f"{len(trace.requests):,} requests, {trace.blocks:,} blocks, {trace.distinct_blocks:,} of them distinct"
        terminal.show("\n".join([head + lost, *table]))
    return 0


def _shown(results: Iterator[Result], progress: _Progress, as_json: bool) -> list[Result]:
    """All results; as JSON each is printed as soon as it is known."""
    found = []
    for result in results:
        progress.clear()
        if as_json:
            print(msgspec.json.encode(result).decode(), flush=True)
        found.append(result)
    return found


def _blocks(blocks: int) -> str:
    return f"{blocks:,}" if blocks else "unlimited"


def _table(results: list[SizeResult]) -> list[str]:
    rows = [("policy", "blocks", "hit rate", "of tokens")]
    rows += [(one.policy, _blocks(one.blocks), f"{one.hit_rate:.1%}", f"{one.token_hit_rate:.1%}") for one in results]
    return terminal.columns(rows, left=1)


def _plan_table(plan: Plan, results: list[PlanResult]) -> list[str]:
    l2 = f"an L2 of {_blocks(plan.l2_blocks)} blocks" if plan.l2_blocks is not None else "no L2"
    head = (
        f"machines: {plan.machines}, router: {plan.router}, {l2}, {plan.block_bytes:,} bytes a block; GB/s over the network, mean / "
        f"peak of {plan.window_seconds:g} s"
    )
    rows = [("policy", "L1 blocks", "hit rate", "of L1", "of L2", "read", "written", "a machine's peak", "busiest")]
    for one in results:
        rows.append(
            (
                one.policy,
                _blocks(one.blocks),
                f"{one.hit_rate:.1%}",
                f"{one.l1_hit_rate:.1%}",
                f"{one.l2_hit_rate:.1%}",
                f"{one.read_gb_s:.2f} / {one.read_peak_gb_s:.1f}",
                f"{one.write_gb_s:.2f} / {one.write_peak_gb_s:.1f}",
                f"{one.machine_peak_gb_s:.1f}",
                f"{one.busiest_machine:.2f}",
            )
        )
    return [head, *terminal.columns(rows, left=1)]


def _plan(arguments: argparse.Namespace) -> Plan | None:
    """The cluster of the arguments; None if they name none."""
    if not 0 <= arguments.warm_up < 1:
        raise ConfigError(f"--warm-up {arguments.warm_up:g}: write a share from 0 to less than 1")
    if arguments.machines is None and arguments.l2_blocks is None:
        if arguments.router is not None:
            raise ConfigError("--router: there is nothing to choose without --machines")
        return None
    if arguments.warm_up:
        raise ConfigError("--warm-up: what crosses the network is counted from the first request on")
    machines = arguments.machines if arguments.machines is not None else 1
    if not 1 <= machines <= _MOST_MACHINES:
        raise ConfigError(f"--machines {machines}: write 1 to {_MOST_MACHINES:,}")
    if arguments.l2_blocks is not None and arguments.l2_blocks < 0:
        raise ConfigError(f"--l2-blocks {arguments.l2_blocks}: write a number of blocks; 0 is unlimited")
    if not 0 < arguments.window < float("inf"):
        raise ConfigError(f"--window {arguments.window:g}: write a number of seconds above 0")
    try:
        block_bytes = parse_size(arguments.block_bytes)
    except ValueError as error:
        raise ConfigError(f"--block-bytes: {error}") from None
    return Plan(machines, arguments.router or ROUND_ROBIN, arguments.l2_blocks, block_bytes, arguments.window)


def _sizes(text: str | None) -> list[int]:
    if text is None:
        return []
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
    """Progress of the work on stderr: on a terminal one line that is rewritten, else a line for every run as it begins."""

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
