"""Records that the scheduler half and the worker half exchange, through the engine, once per step.

Refuses to know: how they are made or acted on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvserver.adapters.common.specs import LoadSpec, StoreSpec

NULL_BLOCK = 0  # in place of a block that a window has passed
ASLEEP = -1


@dataclass
class StepPlan:
    """Plan of one step, from scheduler to worker."""

    loads: list[LoadSpec] = field(default_factory=list)
    stores: list[StoreSpec] = field(default_factory=list)
    abort_loads: list[int] = field(default_factory=list)  # their requests have ended
    abort_stores: list[int] = field(default_factory=list)
    idle: bool = False  # nothing is computed in this step
    step: int = 0  # its number, which the worker's report returns


@dataclass
class StepReport:
    """Report of one step, from worker to scheduler. After aggregate() its lists hold one entry per rank."""

    ended_stores: list[int] = field(default_factory=list)
    incomplete_stores: list[int] = field(default_factory=list)  # of those: an object of theirs is not in the daemon
    copied: list[tuple[int, int]] = field(default_factory=list)  # (store id, objects): they were not there before
    failed_loads: list[str] = field(default_factory=list)  # request ids
    # Loads that failed while the server may still write: their blocks must not be reused yet.
    quarantined: list[tuple[int, list[int]]] = field(default_factory=list)  # (load id, block ids)
    released: list[int] = field(default_factory=list)  # load ids: quarantine is over
    step: int = 0  # the plan's: an engine may take a step back, so steps are named, never counted
    wakes: int = 0  # how often the engine has slept and was woken; ASLEEP while it sleeps

    def aggregate(self, other: StepReport) -> StepReport:
        return StepReport(
            self.ended_stores + other.ended_stores,
            self.incomplete_stores + other.incomplete_stores,
            self.copied + other.copied,
            self.failed_loads + other.failed_loads,
            self.quarantined + other.quarantined,
            self.released + other.released,
            max(self.step, other.step),
            min(self.wakes, other.wakes),
        )

    def __bool__(self) -> bool:
        return bool(self.step or self.ended_stores or self.failed_loads or self.quarantined or self.released)
