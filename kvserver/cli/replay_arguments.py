"""The arguments of `kvserver replay`, apart from the command, which loads the cache.

Owns: their names, defaults and help. Refuses to know: what they do.
"""

from __future__ import annotations

import argparse

from kvserver.config import Settings

_EXAMPLE = """\
examples:
  kvserver replay trace.jsonl --blocks 1000,10000,0 --policy lru
  kvserver replay trace.jsonl --blocks 2000 --machines 8 --router prefix --l2-blocks 100000 --block-bytes 64MiB

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
    parser.add_argument(
        "--json",
        action="store_true",
        help="a JSON line for each result: {policy, blocks, hit_rate, token_hit_rate}, of a cluster with the table's other columns",
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the requests, from the first one on, that fill the cache and are not counted (default: 0); not with a cluster",
    )
    cluster = parser.add_argument_group(
        "a cluster", "--machines or --l2-blocks plans one: --blocks are those of each machine's L1"
    )
    cluster.add_argument("--machines", type=int, metavar="N", help="machines, each with an L1 (default: 1)")
    cluster.add_argument(
        "--router",
        choices=("round-robin", "prefix"),
        help="which machine serves a prompt: the next one (default), or one that has most of it in L1",
    )
    cluster.add_argument(
        "--l2-blocks",
        type=int,
        metavar="M",
        help="blocks of an L2 that all machines share; 0: unlimited (default: no L2)",
    )
    cluster.add_argument(
        "--block-bytes",
        default="64MiB",
        metavar="SIZE",
        help="KV of a block of the trace (default: 64MiB, 512 tokens of Llama-3.1-8B in 16 bits)",
    )
    cluster.add_argument(
        "--window", type=float, default=1.0, metavar="SECONDS", help="peaks are means over so long (default: 1)"
    )
