"""Of a daemon what a tier sees of it: L1 and the loop's waits. Two of them with one URL share a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from kvserver.config import parse_tiers
from kvserver.l2 import ObjectMemory, ObjectName, TierOutcome, make_tier
from support.l1_memory import NAMESPACE, PAGE, Ends, L1Memory, keys, within


class SharedStore(Protocol):
    """A server of a test; `url_of` is a tier's URL, further parameters as "name=value"."""

    port: int

    def url_of(self, prefix: str, *parameters: str) -> str: ...
    def objects(self) -> list[str]: ...
    def read(self, where: str) -> bytes: ...
    def write(self, where: str, value: bytes) -> None: ...
    def remove(self, where: str) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class TierDaemon:
    def __init__(self, url: str, pages: int = 1024) -> None:
        (self.url,) = parse_tiers([url])
        self.l1 = L1Memory(pages)
        self.tier = make_tier(self.url, self.l1.region, PAGE)
        self.ends = Ends(self.tier)

    def until_open(self) -> None:
        self.ends.until("read_only" if self.url.read_only else "ready")

    def put(self, which: ObjectName, memory: ObjectMemory, seconds: float = 10.0) -> TierOutcome:
        return self.ends.of(self.tier.put(which, memory, b"", within(seconds))).outcome

    def get(self, which: ObjectName, memory: ObjectMemory, seconds: float = 10.0) -> TierOutcome:
        return self.ends.of(self.tier.get(which, memory, within(seconds))).outcome

    def probe(self, numbers: list[int], chain: bool = True, seconds: float = 10.0) -> int:
        """What the tier holds of the keys with these numbers after a probe."""
        ticket = self.tier.probe(NAMESPACE, 0, keys(*numbers), chain, within(seconds))
        assert self.ends.of(ticket).outcome is TierOutcome.DONE
        return self.tier.holds(NAMESPACE, 0, keys(*numbers))

    def clear(self, prefix: bytes = NAMESPACE) -> TierOutcome:
        return self.ends.of(self.tier.clear(prefix)).outcome


MakeDaemon: TypeAlias = Callable[..., TierDaemon]
