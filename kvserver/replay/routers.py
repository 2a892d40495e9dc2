"""Routers: the choice of a cluster's machine for a prompt.

Owns: the choice. Refuses to know: what a request does to a machine's L1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvserver.protocol import KEY_BYTES
from kvserver.replay.bare_l1 import BareL1

_MATCH = 0.5  # of the prompt, from which on it decides


class Router(Protocol):
    def choose(self, keys: bytes, machines: Sequence[BareL1], computed: Sequence[int]) -> int:
        """The number of the machine. `computed`: blocks that each machine has computed so far."""


class RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def choose(self, keys: bytes, machines: Sequence[BareL1], computed: Sequence[int]) -> int:
        chosen, self._next = self._next, (self._next + 1) % len(machines)
        return chosen


class PrefixAffinity:
    """Router to the machine with most of the prompt in L1, if it has half. Else, and among equals, to the one that has computed least.

    A shorter match decides nothing: all prompts with one system prompt would go to one machine. It knows every L1 as it is now.
    """

    def choose(self, keys: bytes, machines: Sequence[BareL1], computed: Sequence[int]) -> int:
        found = [len(machine.find(keys)) for machine in machines]
        most = max(found)
        counts = bool(most) and most >= _MATCH * (len(keys) // KEY_BYTES)
        return min(
            (number for number, blocks in enumerate(found) if blocks == most or not counts), key=computed.__getitem__
        )


ROUND_ROBIN = "round-robin"
ROUTERS: dict[str, type[Router]] = {ROUND_ROBIN: RoundRobin, "prefix": PrefixAffinity}
