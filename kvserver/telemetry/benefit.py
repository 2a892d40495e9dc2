"""Benefit of the cache for an instance's requests, and its cost: prompt tokens by source, net time, duration of copies.

A prompt's tokens come from L0 (the engine's own prefix cache), L1, L2, or were computed. The four add up to the prompts.

Owns: these counts and their sums. Refuses to know: messages, tickets, clocks.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from kvserver.protocol import WAIT_SECONDS, Histogram

SOURCES = ("l0", "l1", "l2", "computed")
OUTCOMES = ("done", "failed")
DIRECTIONS = ("store", "load")
PHASES = ("queue", "copy")
RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
COPY_BUCKETS = WAIT_SECONDS
_MOST_WAITS = 1024
MOST = 1 << 62  # of a total that engines report: OTLP has 64 bits for it


class Benefit:
    """Benefit and cost of one instance."""

    def __init__(self) -> None:
        self.prompt_tokens = dict.fromkeys(SOURCES, 0)
        self.request_loads = dict.fromkeys(OUTCOMES, 0)
        self.gained_seconds = 0.0
        self.lost_seconds = 0.0
        self.hit_ratio = Histogram(RATIO_BUCKETS)
        self.durations = {(d, phase): Histogram(COPY_BUCKETS) for d in DIRECTIONS for phase in PHASES}

    def __add__(self, other: Benefit) -> Benefit:
        both = Benefit()
        for one in (self, other):
            for sums, more in ((both.prompt_tokens, one.prompt_tokens), (both.request_loads, one.request_loads)):
                _grow(sums, more)
            both.gained_seconds += one.gained_seconds
            both.lost_seconds += one.lost_seconds
            both.hit_ratio.add_counts(one.hit_ratio)
            for name, histogram in one.durations.items():
                both.durations[name].add_counts(histogram)
        return both

    def request_ended(self, prompt: int, local: int, loaded: int, loads: int, failed: int, filled: int = 0) -> None:
        """`filled`: of the loaded tokens those that came from L2. REQUIRES: filled <= loaded, local + loaded <= prompt, failed <= loads. A prompt of 0 is one that is not known."""
        computed = prompt - local - loaded
        _grow(self.prompt_tokens, {"l0": local, "l1": loaded - filled, "l2": filled, "computed": computed})
        _grow(self.request_loads, {"done": loads - failed, "failed": failed})
        if prompt:
            self.hit_ratio.observe((local + loaded) / prompt)

    def load_ended(self, tokens: int, waited_seconds: float, prefill_speed: float) -> None:
        """Count a load that ended on all ranks.

        `tokens`: those whose KV it brought; 0 if it failed. Without a speed only failed loads count.
        """
        if tokens and not prefill_speed:
            return
        gained = (tokens / prefill_speed if tokens else 0.0) - waited_seconds
        if gained > 0:
            self.gained_seconds += gained
        else:
            self.lost_seconds -= gained

    def copied(self, direction: str, waited_seconds: float, device_seconds: float) -> None:
        """Count one rank's copy that is done. `waited_seconds`: from its request's arrival to its end."""
        self.durations[direction, "copy"].observe(device_seconds)
        self.durations[direction, "queue"].observe(max(0.0, waited_seconds - device_seconds))


Part: TypeAlias = tuple[int, int]  # rank, object group


class LoadWaits:
    """Loads of an instance of which a part has not ended. A load has a part for each rank and object group; a request waits for the slowest.

    A part that never begins leaves a load behind, until the same request loads again or _MOST_WAITS other loads began.
    """

    def __init__(self) -> None:
        self._loads: OrderedDict[str, dict[Part, tuple[int, int, int]]] = OrderedDict()  # by request, then by part

    def ended(
        self, request_id: str, part: Part, parts: int, arrived_ns: int, ended_ns: int, tokens: int
    ) -> tuple[int, float] | None:
        """Note the end of one of `parts` parts; for the last one return the load's (tokens, seconds). `tokens` is 0 if the part failed."""
        if parts == 1 or not request_id:  # older engines do not name their requests: rank 0's is taken for all
            return None if parts > 1 and any(part) else (tokens, (ended_ns - arrived_ns) * 1e-9)
        ended = self._loads.setdefault(request_id, {})
        if part in ended:  # of a former load of the request, of which not all parts began
            ended.clear()
        ended[part] = arrived_ns, ended_ns, tokens
        if len(ended) < parts:
            if len(self._loads) > _MOST_WAITS:
                self._loads.popitem(last=False)
            return None
        del self._loads[request_id]
        arrivals, ends, all_tokens = zip(*ended.values(), strict=True)
        return min(all_tokens), (max(ends) - min(arrivals)) * 1e-9


def _grow(sums: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        sums[name] = min(sums[name] + count, MOST)
