"""`kvserver bench`: how fast this machine is for the cache, and whether that is normal.

Owns: the arguments, the text and the exit code. Refuses to know: how anything is measured (`bench.run`, which is loaded when it
runs).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from kvserver import __version__
from kvserver.bench.verdicts import MachineWatch, Measurement
from kvserver.cli.terminal import plain
from kvserver.config import MiB, add_flags, parse_size, parse_tiers, read_configuration
from kvserver.protocol import ConfigError

PARTS = ("memcpy", "copies", "lookup", "storage")
EXAMPLES = """examples:
  kvserver bench                                      in half a minute, with the machine to itself
  kvserver bench --l2 'file:///var/lib/kvserver?size=200GiB' --only storage
  kvserver bench --json | jq '.measurements[] | select(.normal == false)'

Tiers are those of --l2, KVSERVER_L2 and --config, as `kvserver serve` reads them. What is written to one is deleted again, and the
folder of a running daemon is left alone. A running daemon is neither asked nor needed.

exit codes: 0 all is normal, 1 something is not or could not be measured, 2 bad arguments, or too little memory
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON at the end")
    parser.add_argument(
        "--only", action="append", choices=PARTS, default=[], help="measure this part; may be given again"
    )
    parser.add_argument(
        "--memory",
        default="256MiB",
        metavar="SIZE",
        help="bytes of one copy (256MiB): more than the caches have; five times as much is used",
    )
    add_flags(parser)  # of the daemon: --l2, --copy-threads


def main(arguments: argparse.Namespace) -> int:
    """ConfigError if an argument is wrong, or the memory does not fit. However it ends, its daemon and its files end with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return _measure(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _end_children()


def _end_children() -> None:
    """End children whose start a signal interrupted: no part knows of them."""
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
            os.waitpid(int(pid), 0)


def _measure(arguments: argparse.Namespace) -> int:
    from kvserver.bench.run import check_memory, measurements

    settings = read_configuration(vars(arguments)).settings
    size = _size(arguments.memory)
    check_memory(size)
    began, watch, found = time.monotonic(), MachineWatch(), []
    for one in measurements(size, settings.copy_threads, parse_tiers(settings.l2), frozenset(arguments.only)):
        found.append(one)
        if not arguments.json:
            print(plain(line(one)), flush=True)
    slow = [one for one in found if one.normal is False]
    reasons = watch.reasons() if any(not one.failure for one in slow) else []
    if arguments.json:
        report = {
            "version": __version__,
            "normal": not slow,
            "reasons": reasons,
            "seconds": round(time.monotonic() - began, 1),
            "measurements": msgspec.to_builtins(found),
        }
        print(json.dumps(report, indent=2))
    else:
        judged = [one for one in found if one.normal is not None]
        verdict = f"NOT normal: {len(slow)} of {len(judged)}" if slow else f"normal: all {len(judged)} ratios"
        print("\n".join([f"{verdict}; {time.monotonic() - began:.0f} s", *(f"  -> {reason}" for reason in reasons)]))
    return 1 if slow else 0


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--memory {text!r}: {error}") from None
    if size < 8 * MiB:
        raise ConfigError(f"--memory {text!r}: it is at least 8MiB")
    return size


def line(one: Measurement) -> str:
    """Line of text: "copies load, per layer, pieces of 64 KiB 8.1 GB/s 1.02 of memcpy by 2 threads normal (at least 0.5)"."""
    if one.failure:
        return f"{one.part:<8} {one.what}: NOT MEASURED: {one.failure}"
    if not one.unit:
        return f"{one.part:<8} {one.what}"
    value = f"{one.part:<8} {one.what:<52} {one.value:8.3g} {one.unit}"
    if one.ratio is None:
        return value
    verdict = "normal" if one.normal else "NOT NORMAL"
    return f"{value:<75} {one.ratio:5.2f} of {one.ceiling}: {verdict} ({one.bound})"
