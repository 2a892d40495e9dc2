"""`kvserver status`: the daemon's `/status` as a table for people, once or repeatedly.

Owns: the table and the watch. Refuses to know: the server; it reads only the HTTP page.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict

from kvserver.cli import http_client
from kvserver.cli.terminal import columns, show
from kvserver.protocol import BLOCKS, REQUESTS, SESSIONS, STATS, TENANT_PREFIX
from kvserver.protocol.status import (
    DaemonStatus,
    GpuStatus,
    InstanceStatus,
    L1Status,
    PinsStatus,
    RefusedEngineStatus,
    TierStatus,
    WhatIfEngine,
    WhatIfStatus,
)

_HOME_AND_ERASE_BELOW = "\x1b[H\x1b[J"
_ERASE_SCREEN = "\x1b[2J"
_BAR = 20
_WIDTH = 120
EXIT_CODES = "exit codes: 0 the daemon is ready, 1 none answers, 2 a bad argument, 3 it answers and is not ready; 0 at the end of a watch"
NOT_READY = 3  # as systemctl's code for a unit that is not active
SERVING = {
    "stores-off": "lookups find chunks, no store is taken",
    "off": "no lookup finds a chunk, no store is taken; engines run without cache",
}
_UNREPORTED = {
    BLOCKS: "blocks of L0",
    REQUESTS: "prompt tokens by source",
    SESSIONS: "sessions of lookups",
    STATS: "running and waiting requests",
}
_NAMES = {"l0": "L0", "l1": "L1", "l2": "L2", "computed": "computed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print all of /status")
    http_client.add_arguments(parser)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="repeat every SECONDS (2) until Ctrl-C: in place on a terminal, else one table after the other",
    )


def main(arguments: argparse.Namespace) -> int:
    """The exit code, as in EXIT_CODES. NoAnswer if no daemon answers; a watch continues through a daemon's restart, and Ctrl-C ends it."""
    if arguments.watch is None:
        try:
            text, ready = _look(arguments)
        except http_client.RefusedRequest as error:
            if error.code != 503:  # of a loop that does not turn, and has not been asked before
                raise
            print(error, file=sys.stderr)
            return NOT_READY
        show(text)
        return 0 if ready else NOT_READY
    in_place = sys.stdout.isatty() and not arguments.json
    try:
        if in_place:
            sys.stdout.write(_ERASE_SCREEN)
        while True:
            try:
                text, _ = _look(arguments, indent=None)
            except http_client.NoAnswer as error:
                text = str(error)
            stamp = "" if arguments.json else time.strftime("%H:%M:%S") + "  "
            sys.stdout.write(_HOME_AND_ERASE_BELOW if in_place else "")
            show(stamp + text + ("" if arguments.json or in_place else "\n"))
            time.sleep(arguments.watch)
    except KeyboardInterrupt:
        return 0


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 86400:
        raise ValueError(text)
    return seconds


def _look(arguments: argparse.Namespace, indent: int | None = 2) -> tuple[str, bool]:
    """(what is shown, whether the daemon is ready)."""
    if arguments.json:  # also keys that this version does not know
        found = http_client.get(arguments, "/status", dict[str, Any])
        return json.dumps(found, indent=indent), found.get("ready") is True
    status = http_client.get(arguments, "/status", DaemonStatus)
    return table(status), status.ready


def table(status: DaemonStatus) -> str:
    """The state of the daemon, the use of L1, the instances and their benefit."""
    l1, totals = status.l1, status.totals
    lines = [
        f"kvserver {status.version}  {'ready' if status.ready else 'NOT READY'}  "
        f"up {duration(status.uptime_seconds)}  boot {status.boot_id}",
        f"L1     {bar(l1.used_bytes, l1.size_bytes)} {size(l1.used_bytes)} of {size(l1.size_bytes)}, "
        f"{l1.chunks} chunks, {l1.evictions} evicted ({l1.policy})",
        *_shares(l1),
        *_pins(status.pins),
        *what_if(status.what_if, l1.policy),
        *map(tier_line, status.l2),
        _prompts(totals.prompt_tokens),
        f"moved  {size(totals.stored_bytes)} stored, {size(totals.loaded_bytes)} loaded, "
        f"{totals.failed_stores} failed stores, {totals.failed_loads} failed loads, {totals.errors} errors",
    ]
    lines += [_gpu(gpu, l1) for gpu in status.gpus]
    if status.not_ready:
        lines.append(f"NOT READY  {status.not_ready}")
    if status.stale_seconds is not UNSET:
        lines.append(
            f"STALE  the event loop has not answered for {status.stale_seconds:.1f} s; this is its last status"
        )
    if consequence := SERVING.get(status.serving):
        lines.append(f"SERVING is {status.serving.upper()}: {consequence}")
    if unbalanced := status.books.unbalanced:
        counts = ", ".join(f"{name} {count}" for name, count in asdict(status.books).items() if name != "unbalanced")
        lines.append(
            f"AUDIT  the accounting did not balance in {unbalanced} audits, please report it with the log: {counts}"
        )
    lines.append("")
    if status.instances:
        sources = _sources(totals.prompt_tokens)
        lines += columns(
            [
                (
                    *("instance", "model", "engine", "ranks", "running", "waiting", "prompt tokens"),
                    *(_NAMES[source] for source in sources),
                    *("stored", "loaded", "failed", "seen"),
                ),
                *(_row(instance, sources) for instance in status.instances),
            ],
            left=3,
        )
        lines += [
            f"PRIVATE  {instance.instance_id} shares KV with no other engine: {instance.private}"
            for instance in status.instances
            if instance.private
        ]
        lines += not_reported(status.instances)
        if any(tier.kind != "file" for tier in status.l2):
            lines += [
                f"LOCAL  {instance.instance_id} uses L2 in files only: {instance.machine_only}"
                for instance in status.instances
                if instance.machine_only and not instance.private
            ]
    else:
        lines.append("no engine is connected")
    return "\n".join(lines)


def what_if(curve: WhatIfStatus, policy: str) -> list[str]:
    """The share of tokens that lookups would have found in L1 alone, of each size, and the advice, which weighs L2."""
    if not curve.looked_up_tokens:
        return []
    other = "" if policy == curve.policy else f"; L1 evicts by {policy}"
    alone = (
        f"{_what_if_shares(curve)} of tokens looked up would be hits in L1 alone (estimated, by {curve.policy}{other})"
    )
    kinds = [
        f"  of {kind.engine or 'unnamed engines'}  {_what_if_shares(kind)}"
        for kind in curve.engines
        if len(curve.engines) > 1
    ]
    return [
        f"if L1 were  {alone}",
        *kinds,
        *textwrap.wrap(curve.advice, _WIDTH, initial_indent="  ", subsequent_indent="  "),
    ]


def _what_if_shares(of: WhatIfStatus | WhatIfEngine) -> str:
    names = [one.size if one.size_bytes is None else f"{one.size}x" for one in of.sizes]
    shares = [rate(one.would_hit_tokens, of.looked_up_tokens) for one in of.sizes]
    return ", ".join(f"{name} {share}" for name, share in zip(names, shares, strict=True))


def _shares(l1: L1Status) -> list[str]:
    """The models and tenants for which a part of L1 is kept."""
    return [
        f"share  {name}: {size(use.used_bytes)} used, {size(use.share_bytes)} kept, {use.evictions} evicted"
        for name, use in (l1.models | {TENANT_PREFIX + name: use for name, use in l1.tenants.items()}).items()
        if use.share_bytes
    ]


def tier_line(tier: TierStatus) -> str:
    """Use, benefit and the queue of what is to be written."""
    if tier.state not in ("ready", "read_only"):
        return f"L2     {tier.name} is {tier.state.upper()}" + (f": {tier.failure}" if tier.failure else "")
    used = f"{bar(tier.used_bytes, tier.size_bytes)} {size(tier.used_bytes)} of {size(tier.size_bytes)}, "
    return (
        f"L2     {used if tier.size_bytes else ''}{tier.name}{', read only' * (tier.state == 'read_only')}: {tier.objects} objects, "
        f"{size(tier.written_bytes)} written, {size(tier.read_bytes)} read, {tier.hits} hits, {tier.misses} misses, "
        f"{tier.corrupt} corrupt, {tier.timeouts + tier.errors} failed, {sum(tier.dropped.values())} dropped, "
        f"{size(tier.queue_bytes)} queued"
    )


def _pins(pins: PinsStatus) -> list[str]:
    """The pins of prompts, unless --pin-share is 0."""
    if not pins.most_bytes:
        return []
    asked = ", ".join(f"{count} {outcome}" for outcome, count in pins.requests.items() if count) or "none requested"
    return [f"pins   {pins.pins}: {size(pins.bytes)} protected, at most {size(pins.most_bytes)}; {asked}"]


def _gpu(gpu: GpuStatus, l1: L1Status) -> str:
    """Mapped memory, bytes by way of copying, and the pinned share of L1."""
    if gpu.lost:
        return f"GPU    {gpu.device} is LOST: {gpu.lost}"
    ways = [
        f"{done} {size(copied.dma_bytes)} by DMA, {size(copied.staged_bytes)} staged"
        for done, copied in (("stored", gpu.store), ("loaded", gpu.load))
    ]
    pinned = rate(l1.pinned_bytes, l1.size_bytes)
    return f"GPU    {gpu.device}: {size(gpu.mapped_bytes)} mapped; {'; '.join(ways)}; L1 {pinned} pinned"


def _sources(tokens: dict[str, int]) -> list[str]:
    """The sources of prompt tokens; L2 only if it supplied any."""
    return [source for source in _NAMES if source != "l2" or tokens.get("l2")]


def _prompts(tokens: dict[str, int]) -> str:
    """The sources of prompt tokens. Tokens from L0 are no benefit of the daemon: the engines had them."""
    total = sum(tokens.values())
    shares = ", ".join(f"{rate(tokens.get(source, 0), total)} {_NAMES[source]}" for source in _sources(tokens))
    return f"prompts {total} tokens: {shares}" if total else "prompts none reported yet"


def _row(instance: InstanceStatus, sources: Sequence[str]) -> tuple[str, ...]:
    """A row with shares of prompt tokens. WAITING: not all ranks are registered and agree, so the instance has no cache."""
    counts, workers = instance.requests, instance.workers
    load = None if instance.load is None or instance.load.stale else instance.load
    tokens = counts.prompt_tokens or {}
    total = sum(tokens.values())
    seen = max((worker.last_seen_seconds for worker in workers), default=0.0)
    ranks = f"{len(workers)}/{instance.world_size}"
    return (
        instance.instance_id,
        instance.model_name,
        kind(instance),
        ranks if instance.namespace else f"{ranks} WAITING",
        str(load.running) if load is not None else "-",
        str(load.waiting) if load is not None else "-",
        str(total) if counts.prompt_tokens is not None else "-",
        *(rate(tokens.get(source, 0), total) for source in sources),
        size(counts.stored_bytes),
        size(counts.loaded_bytes),
        str(counts.failed_stores + counts.failed_loads),
        f"{duration(seen)} ago",
    )


def not_reported(instances: Sequence[InstanceStatus]) -> list[str]:
    """A line for each engine that does not report everything."""
    return [
        f"{one.instance_id}: {', '.join(_UNREPORTED.get(what, what) for what in one.unreported)}: not reported by this engine"
        for one in instances
        if one.unreported
    ]


def kind(instance: InstanceStatus | RefusedEngineStatus) -> str:
    """The engine and its version; "-" if its adapter does not report them."""
    return " ".join(filter(None, (instance.engine, instance.engine_version))) or "-"


def bar(part: float, whole: float) -> str:
    filled = round(_BAR * part / whole) if whole else 0
    return "[" + "#" * filled + "." * (_BAR - filled) + "]"


def rate(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def duration(seconds: float) -> str:
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days:.0f} d {hours % 24:.0f} h"
    if hours:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    raise AssertionError("unreachable")
