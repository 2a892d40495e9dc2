"""`kvserver top`: what the cache does now, on a terminal, until q is pressed.

Owns: the refreshing, and what is printed where there is no terminal. Refuses to know: the server; it reads only the HTTP pages. A
thread reads them, so that keys and a new size of the window are followed while a daemon hangs.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import msgspec

from kvserver.cli import http_client
from kvserver.cli.screen import Line, Screen, is_terminal, painted
from kvserver.cli.status import duration
from kvserver.cli.terminal import plain
from kvserver.cli.top_frame import frame
from kvserver.cli.top_view import Beside, TopView, make_view, median_ages
from kvserver.protocol import ConfigError
from kvserver.protocol.status import DaemonStatus

EXAMPLES = """examples:
  kvserver top                             q quits; arrows, j and k move; --interval 5 reads less often
  kvserver top --once                      one screen as text
  kvserver top --once --json | jq .recent_hit_rate

exit codes: 0 ended by q, Ctrl-C or its reader, 1 no daemon answers (--once), 2 bad arguments
"""
_WINDOW_SECONDS = 10.0  # that rates are of, at most
_ONCE_SECONDS = 1.0  # between the two statuses of --once
_BESIDE_SECONDS = 10.0  # ages and the worst requests are read so often
_WORST_REQUESTS = 3
_HISTORY = 60
_TITLE_ROWS = 2


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
        elif arguments.json or not is_terminal():
            _print_on(arguments, readings)
        else:
            _draw_on(arguments, readings)
    except KeyboardInterrupt:
        pass
    return 0


# ---- reading ------------------------------------------------------------------------------------


@dataclass
class Readings:
    """The statuses of the last seconds, and what is read less often. REQUIRES: one thread uses it."""

    arguments: argparse.Namespace
    _statuses: deque[tuple[float, DaemonStatus]] = field(default_factory=deque)
    _beside: Beside = field(default_factory=Beside)
    _beside_at: float = float("-inf")
    _boot_id: str = ""

    def read(self) -> TopView:
        """NoAnswer if no daemon answers."""
        status = http_client.get(self.arguments, "/status", DaemonStatus)
        now = time.monotonic()
        if status.boot_id != self._boot_id or now - self._beside_at >= _BESIDE_SECONDS:
            self._boot_id, self._beside_at = status.boot_id, now
            self._beside = self._read_beside()
        while self._statuses and (
            now - self._statuses[0][0] > _WINDOW_SECONDS or self._statuses[0][1].boot_id != status.boot_id
        ):
            self._statuses.popleft()
        before = self._statuses[0][1] if self._statuses else None
        self._statuses.append((now, status))
        return make_view(status, before, self._beside)

    def _read_beside(self) -> Beside:
        """What cannot be read is left out: it is the smaller part of the screen."""
        ages: dict[str, float | None] = {}
        worst: list[str] = []
        try:
            ages = median_ages(http_client.text(self.arguments, "/metrics"))
            query = urlencode({"minutes": 5, "limit": _WORST_REQUESTS})
            found = http_client.get(self.arguments, f"/explain?{query}", dict[str, Any])["requests"]
            worst = [f"{one['request_id']}: {one['verdict']}" for one in found if one["tokens"]["avoidable"]]
        except (http_client.NoAnswer, KeyError, TypeError):
            return Beside(ages, worst)
        return Beside(ages, worst)


# ---- without a terminal -------------------------------------------------------------------------


def _print(arguments: argparse.Namespace, view: TopView) -> None:
    if arguments.json:
        print(msgspec.json.encode(view).decode(), flush=True)
    else:
        print("\n".join(painted(line).rstrip() for line in frame(view)), flush=True)


def _print_on(arguments: argparse.Namespace, readings: Readings) -> None:
    """Until its reader has ended (BrokenPipeError) or Ctrl-C."""
    while True:
        try:
            _print(arguments, readings.read())
        except http_client.NoAnswer as error:
            line = msgspec.json.encode({"error": str(error)}).decode() if arguments.json else plain(str(error))
            print(line, flush=True)
        if not arguments.json:
            print(flush=True)
        time.sleep(arguments.interval)


# ---- on a terminal ------------------------------------------------------------------------------


@dataclass
class _Shown:
    """What the reading thread leaves for the drawing one. A field is replaced, never changed."""

    view: TopView | None = None
    read_at: float = 0.0
    trouble: str = ""
    ended: BaseException | None = None
    tokens: tuple[float, ...] = ()
    hit_rates: tuple[float, ...] = ()

    def add(self, view: TopView) -> None:
        self.view, self.read_at, self.trouble = view, time.monotonic(), ""
        if view.prompt_tokens_per_second is not None:
            self.tokens = (*self.tokens, view.prompt_tokens_per_second)[-_HISTORY:]
        if view.recent_hit_rate is not None:
            self.hit_rates = (*self.hit_rates, view.recent_hit_rate)[-_HISTORY:]

    def lines(self) -> list[Line]:
        if self.view is None:
            return [
                [("kvserver top", "bold")],
                [(self.trouble or "reading the first status", "warn" if self.trouble else "")],
            ]
        lines = frame(self.view, {"tokens": self.tokens, "hit_rate": self.hit_rates})
        if self.trouble:
            age = duration(time.monotonic() - self.read_at)
            lines[1:1] = [[("NO ANSWER  ", "bad"), (f"below is what was read {age} ago; {plain(self.trouble)}", "")]]
        return [*lines, [], [("q quits, arrows move", "dim")]]


def _read_on(
    readings: Readings, shown: _Shown, stop: threading.Event, wake: Callable[[], None], interval: float
) -> None:
    while not stop.is_set():
        try:
            shown.add(readings.read())
        except http_client.NoAnswer as error:
            shown.trouble = str(error)
        except ConfigError as error:  # the token file
            shown.ended = error
            wake()
            return
        wake()
        stop.wait(interval)


def _draw_on(arguments: argparse.Namespace, readings: Readings) -> None:
    shown, stop, screen, first = _Shown(), threading.Event(), Screen(), 0
    reader = threading.Thread(
        target=_read_on, args=(readings, shown, stop, screen.wake, arguments.interval), name="top", daemon=True
    )
    with screen.opened():
        reader.start()
        try:
            while shown.ended is None:
                first = screen.draw(shown.lines(), first)
                key = screen.wait(1.0)  # so that the age of what is shown goes on
                if key == "quit":
                    return
                page = max(1, screen.size[1] - _TITLE_ROWS)
                first += {"down": 1, "up": -1, "page": page, "back": -page}.get(key, 0)
        finally:
            stop.set()
    raise shown.ended
