"""`kvserver top`: what the cache does now, on a terminal, until q is pressed.

Owns: the refreshing, and what is printed where there is no terminal. Refuses to know: the server; it reads only the HTTP pages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace

from kvserver.cli import http_client
from kvserver.cli.terminal import plain
from kvserver.cli.top_scroll import Scroll
from kvserver.cli.top_view import Reading, median_ages, rates
from kvserver.protocol.status import DaemonStatus

EXAMPLES = """examples:
  kvserver top                             q or Ctrl-C quits; --interval 5 reads less often
  kvserver top --once                      one screen as text, longer than the terminal if need be
  kvserver top --once --json | jq .rates.hit_rate

exit codes: 0 ended by q, Ctrl-C or its reader, 1 no daemon answers (--once), 2 bad arguments
"""
_WINDOW_SECONDS = 10.0  # that rates are of, at most
_ONCE_SECONDS = 1.0  # between the two statuses of --once
_BESIDE_SECONDS = 10.0  # ages and the worst requests are read so often
_WORST_REQUESTS = 3
_HISTORY = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="SECONDS", help="between two readings (2)")
    parser.add_argument("--once", action="store_true", help="print one screen as text; takes a second, for the rates")
    parser.add_argument("--json", action="store_true", help="a JSON object for each reading, one a line")
    http_client.add_arguments(parser)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise ValueError(text)
    return seconds


def main(arguments: argparse.Namespace) -> int:
    """NoAnswer if no daemon answers --once; else it waits for one."""
    readings = Readings(arguments)
    try:
        if arguments.once:
            readings.read()
            time.sleep(min(arguments.interval, _ONCE_SECONDS))
            _print(arguments, readings.read())
        elif arguments.json or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            _print_on(arguments, readings)
        else:
            _draw_on(arguments, readings)
    except KeyboardInterrupt:
        pass
    return 0


@dataclass
class Readings:
    """Statuses of the last seconds, and pages that are read less often."""

    arguments: argparse.Namespace
    _statuses: deque[tuple[float, DaemonStatus]] = field(default_factory=deque)
    _last: Reading = field(default_factory=lambda: Reading(status=DaemonStatus()))
    _beside_at: float = float("-inf")

    def read(self) -> Reading:
        """NoAnswer if no daemon answers."""
        status = http_client.get(self.arguments, "/status", DaemonStatus)
        now = time.monotonic()
        if status.boot_id != self._last.status.boot_id or now - self._beside_at >= _BESIDE_SECONDS:
            self._beside_at, self._last = now, self._read_beside(Reading(status=status))
        while (
            len(self._statuses) > 1 and now - self._statuses[0][0] > _WINDOW_SECONDS
        ):  # one is left for a long --interval
            self._statuses.popleft()
        known = [found for _, before in self._statuses if (found := rates(status, before)) is not None]
        self._statuses.append((now, status))
        self._last = replace(self._last, status=status, rates=known[0] if known else None)
        return self._last

    def _read_beside(self, reading: Reading) -> Reading:
        """Add the other pages to the reading. A page that cannot be read is left out: it is the smaller part of the screen."""
        with contextlib.suppress(http_client.NoAnswer, KeyError, TypeError):
            reading = replace(reading, median_age_seconds=median_ages(http_client.text(self.arguments, "/metrics")))
            query = urlencode({"minutes": 5, "limit": _WORST_REQUESTS})
            found = http_client.get(self.arguments, f"/explain?{query}", dict[str, Any])["requests"]
            worst = [f"{one['request_id']}: {one['verdict']}" for one in found if one["tokens"]["avoidable"]]
            reading = replace(reading, worst=worst)
        return reading


# ---- without a terminal -------------------------------------------------------------------------


def _print(arguments: argparse.Namespace, reading: Reading) -> None:
    if arguments.json:
        print(msgspec.json.encode(reading).decode(), flush=True)
        return
    from rich.console import Console, Group

    from kvserver.cli.top_frame import frame

    # Rows are whole where there is no terminal.
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)
    with console.capture() as captured:
        console.print(Group(*frame(reading)))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def _print_on(arguments: argparse.Namespace, readings: Readings) -> None:
    """Print readings until the reader of stdout has ended (BrokenPipeError) or Ctrl-C."""
    while True:
        try:
            _print(arguments, readings.read())
        except http_client.NoAnswer as error:
            print(
                msgspec.json.encode({"error": str(error)}).decode() if arguments.json else plain(str(error)), flush=True
            )
        time.sleep(arguments.interval)


# ---- on a terminal ------------------------------------------------------------------------------


def _draw_on(arguments: argparse.Namespace, readings: Readings) -> None:
    """Draw readings until q. While a daemon hangs, q is read when the request's time is over, Ctrl-C at once."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from kvserver.cli.top_frame import frame

    tokens, hits = deque[float](maxlen=_HISTORY), deque[float](maxlen=_HISTORY)
    last = [Text("kvserver top: no status was read yet")]
    with _raw_keys() as keys, Live(screen=True, auto_refresh=False, console=Console(highlight=False)) as live:
        scroll = Scroll(has_keys=bool(keys))
        while True:
            try:
                reading = readings.read()
                if (found := reading.rates) is not None:
                    tokens.append(sum(found.prompt_tokens.values()))
                    hits.extend([found.hit_rate] if found.hit_rate is not None else [])
                lines = last = frame(reading, tokens, hits, "q quits  ")
            except http_client.NoAnswer as error:
                text = f"NO ANSWER  q quits; below is what was read last; {plain(str(error))}"
                lines = [Text(text, "bold red", no_wrap=True), *last]
            until = time.monotonic() + arguments.interval
            while (left := until - time.monotonic()) > 0:
                shown, where = scroll.shown(lines, live.console.height)
                footer = [Text(where, "reverse", no_wrap=True, overflow="crop")] if where else []
                live.update(Group(*shown, *footer), refresh=True)
                if select.select(keys, [], [], left)[0] and not scroll.press(os.read(keys[0], 64)):
                    return


@contextlib.contextmanager
def _raw_keys() -> Iterator[list[int]]:
    """The descriptor of the keyboard, if there is one: keys arrive at once and are not shown. The terminal is as before at the end."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the screen is left
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a stopped one would leave the shell this screen
    if not sys.stdin.isatty():
        yield []
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield [sys.stdin.fileno()]
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
