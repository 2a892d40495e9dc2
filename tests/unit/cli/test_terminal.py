"""Tables for people: plain and whole on a pipe, in colours and within its width on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from kvserver.cli.terminal import columns, plain

PROGRAM = """
from kvserver.cli.terminal import columns, show
show("\\n".join(["kvserver 1  NOT READY", *columns([("name", "model", "tokens"), ("a" * 60, "[red]m[/red]", "1/2 WAITING")])]))
"""


def on_a_terminal(width: int) -> str:
    """What PROGRAM writes there."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=terminal, check=True, timeout=60, env=environ | {"TERM": "xterm"}
    )
    os.close(terminal)
    written = os.read(reader, 1 << 16).decode()
    os.close(reader)
    return written


def test_a_pipe_gets_plain_whole_rows() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    head, names, row = done.stdout.splitlines()
    assert head == "kvserver 1  NOT READY"
    assert names.split() == ["name", "model", "tokens"]
    assert row.split() == ["a" * 60, "[red]m[/red]", "1/2", "WAITING"]


def test_a_terminal_gets_colours_and_rows_within_its_width() -> None:
    written = on_a_terminal(60)
    assert re.search("\x1b\\[1;31m(NOT READY)\x1b\\[0m", written)
    assert re.search("\x1b\\[1;31m(WAITING)\x1b\\[0m", written)
    lines = re.sub("\x1b\\[[0-9;]*m", "", written).splitlines()
    assert max(map(len, lines)) <= 60
    assert "".join(re.findall("a{4,}", "".join(lines))) == "a" * 60, "all of the name is there"


def test_words_are_aligned_left_and_numbers_right() -> None:
    assert columns([("name", "n"), ("a", "100"), ("long", "2")], left=1) == ["name    n", "a     100", "long    2"]


def test_what_clients_chose_moves_no_cursor_and_changes_no_colour() -> None:
    assert plain("a\x1b\u202e\n") == "a\\x1b\\u202e\\x0a"
    assert columns([("name",), ("a\x1b[2J",)], 1)[1] == "a\\x1b[2J"
    done = subprocess.run(
        [sys.executable, "-c", "from kvserver.cli.terminal import show; show('a\\x1b[2Jb\\nc')"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "a\\x1b[2Jb\nc\n"
