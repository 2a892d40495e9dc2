"""Plan of one store or fill: the chunks, their keys, and how far its planning is.

Owns: the plan's fields. Refuses to know: how slots are allocated (`space`), and what becomes of a plan (`store_plans`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvserver.cache.chunk import Chunk, Namespace
from kvserver.cache.groups import Groups
from kvserver.cache.sessions import SessionKey
from kvserver.protocol import Durability


@dataclass(slots=True)
class StorePlan:
    """Objects that one rank's store copies, or that a fill reads. The object of `chunks[i]` has the key number `positions[i]`.

    `prefix` is all chunks of the store in key order, skipped chunks included: they age together. `evicted` is the (namespace id,
    key) of each chunk that was evicted for this store, `evicted_tails` the same of single blocks. publish_part() and finish_store() add to `ready`.
    """

    group: int
    slots: range  # the numbers of the slots of each chunk: one rank's of a store, all ranks' of a fill
    groups: Groups
    namespace_id: bytes = b""
    model_name: str = ""  # the model of the namespace if the namespace is new
    keys: bytes = b""  # of the chunks that may fit
    pages: int = 0  # of one slot
    steps: int = 0  # keys and chunks that extend_plan() may still look at before it returns
    complete: bool = True  # every key has been looked at
    full: bool = False  # no further chunk may be evicted
    returning: bool = True  # all its new chunks so far are remembered as evicted: a prompt that is stored again
    found: list[Chunk] = field(default_factory=list)  # resident when planning began; pinned until the plan is complete
    prefix: list[Chunk] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    looked: int = 0  # of `chunks`, from the first one on: publish_part() has looked at them
    ready: list[Chunk] = field(default_factory=list)  # whose object became READY
    evicted: list[tuple[bytes, bytes]] = field(default_factory=list)
    evicted_tails: list[tuple[Namespace, bytes]] = field(default_factory=list)
    skipped: int = 0  # objects that were resident, or that another store fills
    no_space: int = 0  # objects that found no space in L1
    after: tuple[bytes, bytes] | None = None  # of a tail: (namespace id, key) of the chunk before it
    durability: Durability = Durability.PROCESS  # who can find later what is stored
    session: SessionKey | None = None  # of the new chunks; None: they are shared
    tenant: str = ""  # of the new chunks; without a share they are their model's
    shares: bool = False  # the chunks that it found are used by no session, and shared from now on

    @property
    def bits(self) -> int:
        """`slots` as a bit set."""
        return sum([1 << number for number in self.slots])
