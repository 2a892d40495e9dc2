"""Text and tables for people on stdout: on a terminal in colours and within its width, else plain, a row a line.

Owns: columns and colours. Refuses to know: the commands. What needs no table or terminal does not load rich.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

_UNBOUNDED = 1 << 16  # width of what is no terminal: rows are whole
_STYLES = {
    r"(?m)\b(NOT READY|STALE|AUDIT|LOST|PRIVATE|WAITING)\b|^problem\b": "bold red",
    r"(?m)^warning\b": "yellow",
    r"(?m)^ok\b": "green",
}


def show(text: str) -> None:
    text = "\n".join(map(plain, text.split("\n")))
    if not sys.stdout.isatty():
        print(text, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    shown = Text(text)
    for words, style in _STYLES.items():
        shown.highlight_regex(words, style)
    Console().print(shown, soft_wrap=True)


def columns(rows: Sequence[Sequence[str]], left: int = 2) -> list[str]:
    """Lines of aligned columns under the heads in the first row; the first `left` columns are words, the others numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for number, head in enumerate(rows[0]):
        table.add_column(Text(head), justify="left" if number < left else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else _UNBOUNDED, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def plain(text: str) -> str:
    """The text without what a terminal would carry out: names of engines and models are what clients chose."""
    return "".join(
        one if one.isprintable() else f"\\x{ord(one):02x}" if ord(one) < 256 else f"\\u{ord(one):04x}" for one in text
    )
