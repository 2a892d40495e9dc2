"""The arguments of `kvserver replay`, apart from the command, which loads the cache.

Owns: their names, defaults and help. Refuses to know: what they do.
"""

from __future__ import annotations

import argparse

from kvserver.config import Settings

_EXAMPLE = """\
example:
  kvserver replay trace.jsonl --blocks 1000,10000,0 --policy lru

A trace has a JSON object a line: {"timestamp": 0, "input_length": 1024, "output_length": 8, "hash_ids": [0, 1]}, with timestamps in
milliseconds and one id for each block of the prompt; equal ids are equal prefixes up to there. The exit code is 0, or 2 if the trace or
an argument is wrong; the error names the line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    parser.add_argument("trace", metavar="TRACE", help="the trace's file, or - for stdin")
    parser.add_argument(
        "--blocks",
        metavar="N,N,...",
        help="capacities of L1 in blocks of the trace; 0: unlimited (default: seven shares of the distinct blocks, and 0)",
    )
    default = Settings().eviction_policy
    parser.add_argument(
        "--policy",
        default=default,
        metavar="NAME,NAME,...",
        help=f"eviction policies, by the names of --eviction-policy (default: {default})",
    )
    parser.add_argument("--json", action="store_true", help="a line {policy, blocks, hit_rate} for each result")
