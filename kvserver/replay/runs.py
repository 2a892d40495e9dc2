"""A trace through caches of several sizes and policies.

Owns: the sizes that are tried if none is named, and what a run counts. Refuses to know: the cache (`bare_l1`), text for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvserver.replay.bare_l1 import BareL1
from kvserver.replay.trace import Trace

UNLIMITED = 0
_SHARES = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)  # of the distinct blocks


class SizeResult(msgspec.Struct, frozen=True):
    """Result of one size. `blocks`: the capacity; 0: unlimited.

    `hit_rate`: the share of all prompt blocks found as an unbroken prefix, and of tokens.
    """

    policy: str
    blocks: int
    hit_rate: float
    token_hit_rate: float = 0.0


def default_sizes(trace: Trace) -> list[int]:
    """Shares of the trace's distinct blocks, and unlimited."""
    return [*sorted({max(1, round(trace.distinct_blocks * share)) for share in _SHARES}), UNLIMITED]


def capacity(blocks: int, trace: Trace) -> int:
    """Blocks of a cache of this size. None needs more than all blocks of the trace: nothing is evicted then."""
    most = max(1, trace.distinct_blocks, trace.most_blocks)
    return most if blocks == UNLIMITED else min(blocks, most)


def replay_sizes(
    trace: Trace,
    sizes: Sequence[int],
    policies: Sequence[str],
    progress: Callable[[str, int, int, int], None] = lambda policy, blocks, requests, of: None,
    warm_up: float = 0.0,
) -> Iterator[SizeResult]:
    """Results by size and policy, each as soon as it is known. `progress` is called after each request.

    `warm_up`: the share of the requests, from the first one on, that fill the cache and are not counted.
    """
    first = int(warm_up * len(trace.requests))
    counted = trace.requests[first:]
    all_blocks = max(1, sum(request.blocks for request in counted))
    all_tokens = max(1, sum(request.tokens for request in counted))
    for policy in policies:
        for blocks in sizes:
            l1 = BareL1(capacity(blocks, trace), policy)
            hits = hit_tokens = 0
            for number, request in enumerate(trace.requests):
                found = l1.serve(request.keys, request.seconds, session_id=request.session_id).l1
                if request.ends_session:
                    l1.delete(request.session_id)
                if number >= first:
                    hits += found
                    hit_tokens += min(found * trace.block_tokens, request.tokens)
                progress(policy, blocks, number + 1, len(trace.requests))
            yield SizeResult(policy, blocks, hits / all_blocks, hit_tokens / all_tokens)
