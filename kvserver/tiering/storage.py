"""L2 by one face: reports and requests of the loop, lookups and copies to the storage behind L1.

Owns: the contract, and its null object: a daemon without `--l2` has NoStorage. Refuses to know: tiers (`tiered`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol

from kvserver.cache import Chunk
from kvserver.engines import Instance, Respond
from kvserver.l2 import Coverage
from kvserver.protocol import AwaitFill, Durability, Lookup
from kvserver.protocol.status import TierStatus
from kvserver.tiering.fill import Answer, Fill, GiveUp, Owner
from kvserver.tiering.presence import InL2
from kvserver.tiering.tiers import Tiers


class Storage(Protocol):
    """Storage behind L1. REQUIRES: the loop's thread uses it. Nothing waits for a tier, but drain()."""

    tiers: Tiers  # empty without `--l2`

    # ---- requests -----------------------------------------------------------------------------

    def present(self, namespace: bytes, groups: int, keys: bytes) -> tuple[bytes, ...]:
        """Keys whose objects local tiers hold, for each of so many groups; () if there are no such tiers."""

    def found(self, instance: Instance, namespace: bytes, keys: bytes, hit_chunks: int, durability: Durability) -> InL2:
        """Note that L1 has the first `hit_chunks`; returns what a fill could add. `durability`: of the variant."""

    def begin(
        self, request: AwaitFill, instance: Instance, respond: Respond, answer: Answer, promised: int = 0
    ) -> None:
        """Fill what the lookup lacks; `respond` gets what `answer` finds when that has ended, or after request.wait_ms.

        `promised`: chunks that an engine of another daemon stores.
        """

    def prefetch(
        self, lookup: Lookup, namespace: bytes, instance: Instance, due_ns: int, answer: Answer, give_up: GiveUp
    ) -> Fill | None:
        """Fill for no request what the lookup lacks, until ended(). `give_up`: requests need its room. None if L2 has nothing."""

    def loading(self, owner: Owner) -> None:
        """The request has begun to load: what was read for it may leave L1 again."""

    def stored(
        self, namespace: bytes, coverage: Coverage, durability: Durability,
        chunks: Sequence[Chunk], after: bytes, ready: Set[Chunk],
    ) -> None:  # fmt: skip
        """The objects of `ready` became READY. They are among `chunks`: neighbours in a prompt, behind the chunk `after`."""

    def loaded(
        self, namespace: bytes, coverage: Coverage, durability: Durability, chunks: Sequence[Chunk], may_write: bool
    ) -> None:
        """Note loaded objects: a tier that has them keeps them, and the other tiers that may be written to are offered them."""

    def ended(self, owner: Owner) -> int:
        """The request ended: nothing more is read for it. Returns the tokens that were read for it."""

    def instance_ended(self, instance_id: str) -> None:
        """End the instance, and with it all its requests."""

    def clear(self, base: bytes, done: Callable[[str], None]) -> None:
        """Forget the namespaces with this prefix, which L1 has just forgotten; then call `done` with what failed, or ""."""

    # ---- turns of the loop --------------------------------------------------------------------

    @property
    def completion_fds(self) -> list[int]:
        """Readable when complete() has something to do."""

    def complete(self) -> None:
        """Complete all that tiers have ended, and publish what has changed in them. Never raises."""

    def step(self) -> bool:
        """Do a slice of deferred work at the end of a turn. True while there is more to do at once."""

    def tick(self) -> None:
        """Once a second or so."""

    @property
    def next_due_ns(self) -> int | None:
        """Time at which the next fill must be answered; None without fills."""

    # ---- state --------------------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Reason why a tier that the settings require cannot be used; empty while all can."""

    @property
    def is_idle(self) -> bool:
        """True if nothing is being read or written, and no request waits for a fill."""

    def audit(self) -> None:
        """Assert the accounting of reads. REQUIRES: it is idle."""

    def status(self) -> list[TierStatus]:
        """Status of each tier, one row each."""

    # ---- the end ------------------------------------------------------------------------------

    def end_fills(self) -> None:
        """Answer all requests that wait for a fill, and begin none."""

    def drain(self, deadline: float) -> int:
        """Write what waits for an open tier, until time.monotonic() is `deadline`. Returns how many objects were not written."""

    def close(self, deadline: float) -> None:
        """End all tiers, which read and write L1 no more."""


class NoStorage:
    """Storage of a daemon without `--l2`."""

    next_due_ns = None
    failure = ""
    is_idle = True

    def __init__(self) -> None:
        self.tiers, self.completion_fds = Tiers(), list[int]()

    def present(self, namespace: bytes, groups: int, keys: bytes) -> tuple[bytes, ...]:
        return ()

    def found(self, instance: Instance, namespace: bytes, keys: bytes, hit_chunks: int, durability: Durability) -> InL2:
        return InL2(hit_chunks, hit_chunks)

    def begin(
        self, request: AwaitFill, instance: Instance, respond: Respond, answer: Answer, promised: int = 0
    ) -> None:
        respond(answer(request.lookup, 0))

    def ended(self, owner: Owner) -> int:
        return 0

    def clear(self, base: bytes, done: Callable[[str], None]) -> None:
        done("")

    def step(self) -> bool:
        return False

    def status(self) -> list[TierStatus]:
        return []

    def drain(self, deadline: float) -> int:
        return 0

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing: no object is stored."""

    prefetch = loading = stored = loaded = instance_ended = complete = tick = audit = end_fills = close = _nothing
