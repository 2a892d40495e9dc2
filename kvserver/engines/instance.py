"""An engine: its ranks, its namespace while all of them agree, and its last reports.

An instance exists while one of its workers does. It has a namespace only while all ranks are registered and agree.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvserver.cache import fingerprint, private_reason, with_variant
from kvserver.engines.counts import Counts
from kvserver.engines.engine_stats import EngineStats
from kvserver.engines.report_sync import ReportSync
from kvserver.engines.worker import Worker
from kvserver.events import InstanceDescribed
from kvserver.l2 import Coverage, coverages_of
from kvserver.protocol import BLOCKS, REQUESTS, STATS, DescribeScheduler, Durability
from kvserver.telemetry import LoadWaits

_MAX_VARIANTS = 4096  # per instance, remembered digests
_MOST_SPEEDS = 256  # namespaces


class PrefillSpeeds:
    """Last speed of the engines of each namespace, for engines that have just started."""

    def __init__(self) -> None:
        self._speeds: OrderedDict[bytes, float] = OrderedDict()  # that of the longest ago first

    def note(self, namespace: bytes, tokens_per_second: float) -> None:
        self._speeds[namespace] = tokens_per_second
        self._speeds.move_to_end(namespace)
        if len(self._speeds) > _MOST_SPEEDS:
            self._speeds.popitem(last=False)

    def of(self, namespace: bytes) -> float:
        """Tokens a second; 0 if it is not known."""
        return self._speeds.get(namespace, 0.0)


@dataclass
class Instance:
    instance_id: str
    incarnation: str
    model_name: str
    world_size: int
    states_unreported: frozenset[str] = frozenset()  # as its first worker stated
    workers: dict[int, Worker] = field(default_factory=dict)
    namespace: bytes | None = None
    last_namespace: bytes | None = None  # also after a rank left
    coverages: list[Coverage | None] = field(default_factory=list)  # by object group, while there is a namespace
    counts: Counts = field(default_factory=Counts)
    reports: ReportSync = field(default_factory=ReportSync)
    speeds: PrefillSpeeds = field(default_factory=lambda: PrefillSpeeds())  # that instances share
    prefill_speed: float = 0.0  # tokens a second, as the engine reported last
    description: DescribeScheduler | None = None
    engine_stats: EngineStats = field(default_factory=EngineStats)
    died: bool = False  # one of its workers died
    departed_at: float = 0.0  # when its last worker ended
    load_waits: LoadWaits = field(default_factory=LoadWaits)
    _variants: dict[str, bytes] = field(default_factory=dict)
    _published: tuple[DescribeScheduler, bytes] | None = None

    def described(self, now_ns: int) -> InstanceDescribed | None:
        """The description to publish. None if the instance has not described itself, or that was published already."""
        prefix = self.namespace_of(self.description.variant) if self.description is not None else None
        if self.description is None or prefix is None or self._published == (self.description, prefix):
            return None
        self._published = (self.description, prefix)
        spec = self.any_worker().spec
        shape = spec.chunk_blocks, spec.block_tokens, spec.object_groups
        return InstanceDescribed(now_ns, self.description, prefix, *shape)

    @property
    def described_prefix(self) -> bytes:
        """The namespace that it described last, without a LoRA; b"" before its first description."""
        return self._published[1] if self._published is not None else b""

    def namespace_of(self, variant: str) -> bytes | None:
        """The namespace of one weights epoch and LoRA; None until all ranks are registered."""
        if self.namespace is None or not variant:
            return self.namespace
        digest = self._variants.get(variant)
        if digest is None:
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            digest = self._variants[variant] = with_variant(self.namespace, variant)
        return digest

    @property
    def private(self) -> str:
        """Reason why the instance shares KV with no other; empty if it may share."""
        since = self.description.private if self.description is not None else ""
        return private_reason(worker.spec for worker in self.workers.values()) or since

    @property
    def unreported(self) -> frozenset[str]:
        """The parts that the engine does not report, as it stated, and has not reported."""
        reported = {
            REQUESTS: self.counts.ended_requests > 0,
            BLOCKS: bool(self.reports.source),
            STATS: self.engine_stats.has_report(self.incarnation),
        }
        return frozenset(part for part in self.states_unreported if not reported.get(part))

    @property
    def ranks_text(self) -> str:
        """The number of its ranks that can copy, as a sentence: nothing is found until all can."""
        ready = sum(worker.mapped for worker in self.workers.values())
        return f"{ready} of {self.world_size} ranks of {self.instance_id!r} are registered"

    @property
    def expected_speed(self) -> float:
        """Prompt tokens a second: as the engine reported last, or another start of one with its namespace; 0: not known."""
        return self.prefill_speed or (self.speeds.of(self.namespace) if self.namespace is not None else 0.0)

    def reported_speed(self, tokens_per_second: float) -> None:
        self.prefill_speed = tokens_per_second
        if self.namespace is not None:
            self.speeds.note(self.namespace, tokens_per_second)

    def any_worker(self) -> Worker:
        return next(iter(self.workers.values()))

    def refresh_namespace(self) -> None:
        """Recompute after a worker was mapped or removed."""
        ready = len(self.workers) == self.world_size and all(worker.mapped for worker in self.workers.values())
        self.namespace, self.coverages = None, []
        self._variants.clear()
        if ready:
            ranks = [self.workers[rank] for rank in range(self.world_size)]
            self.namespace = self.last_namespace = fingerprint([rank.spec for rank in ranks])
            spec, sizes = (
                ranks[0].spec,
                zip(*([group.slot_bytes for group in rank.chunk_groups] for rank in ranks), strict=True),
            )
            self.coverages = coverages_of(ranks[0].layout, spec.object_groups, spec.chunk_tokens, list(sizes))

    def durability(self, of_variant: Durability) -> Durability:
        """The durability of one variant's KV: the least of what the engine states of the variant and of the registration."""
        if not self.coverages or self.private:
            return Durability.PROCESS
        return min(of_variant, Durability.MACHINE) if self.machine_only else of_variant

    @property
    def machine_only(self) -> str:
        """Reason why its KV stays on this machine; empty if it need not."""
        return next(filter(None, (worker.spec.machine_only for worker in self.workers.values())), "")
