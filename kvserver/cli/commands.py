"""The commands `top`, `clear` and `bench`: their flags, and the function that runs each.

Owns: their rows. Modules that only one of them needs are loaded when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from kvserver.cli import bench, clear, top


class Command(NamedTuple):
    name: str
    help: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


COMMANDS = (
    Command("top", "what the cache does now, in a terminal", top.EXAMPLES, top.add_arguments, top.main),
    Command("clear", "forget cached KV: all, or that of one engine or model", clear.EXAMPLES, clear.add_arguments, clear.main),
    Command("bench", "whether this machine's copies, lookups and storage are as fast as they should be", bench.EXAMPLES, bench.add_arguments, bench.main),
)  # fmt: skip


def add_commands(commands: Any) -> None:
    """Add a parser for each to argparse's subparsers; `run` of what it returns runs the command."""
    for command in COMMANDS:
        parser = commands.add_parser(
            command.name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog=command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(parser)
        parser.set_defaults(run=command.main)
