"""A trace through several machines, each with an L1, and an L2 that they share over a network.

Blocks that L1 lacks and L2 has are read over the network. All blocks of a prompt that are in L1 afterwards and that L2 lacks are
written, as the daemon does with `admit=all`. Both are young in L2 then. L2 is an LRU. A transfer is at its request's timestamp.

Owns: what crosses the network, and what a plan counts. Refuses to know: how a machine serves (`bare_l1`), which one does
(`routers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvserver.protocol import KEY_BYTES
from kvserver.replay.bare_l1 import BareL1
from kvserver.replay.network import Traffic
from kvserver.replay.routers import ROUTERS
from kvserver.replay.runs import capacity
from kvserver.replay.trace import Trace, TracePrompt

_GB = 1e9


class Plan(msgspec.Struct, frozen=True):
    """A cluster. `l2_blocks`: 0 is unlimited, None is without L2."""

    machines: int
    router: str
    l2_blocks: int | None
    block_bytes: int
    window_seconds: float


class PlanResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a plan. Rates are shares of all prompt blocks. GB are 10^9 bytes; peaks are of one window. `blocks`: of each L1."""

    policy: str
    blocks: int
    machines: int
    router: str
    l2_blocks: int | None
    hit_rate: float
    l1_hit_rate: float
    l2_hit_rate: float
    read_gb_s: float  # from L2, by all machines, mean
    read_peak_gb_s: float
    write_gb_s: float
    write_peak_gb_s: float
    machine_peak_gb_s: float  # of the busiest direction of the busiest machine
    busiest_machine: float  # blocks of the machine with most, over an even share


class _Machine:
    def __init__(self, l1: BareL1, window_seconds: float) -> None:
        self.l1 = l1
        self.blocks = 0
        self.read, self.written = Traffic(window_seconds), Traffic(window_seconds)


class _Cluster:
    def __init__(self, plan: Plan, blocks: int, policy: str, l2: BareL1 | None) -> None:
        self._block_bytes = plan.block_bytes
        self.machines = [_Machine(BareL1(blocks, policy), plan.window_seconds) for _ in range(plan.machines)]
        self._l1s = [machine.l1 for machine in self.machines]
        self._computed = [0] * plan.machines
        self._router = ROUTERS[plan.router]()
        self._l2 = l2
        self.read, self.written = Traffic(plan.window_seconds), Traffic(plan.window_seconds)
        self.l1_hits = self.l2_hits = 0

    def serve(self, prompt: TracePrompt) -> None:
        chosen = self._router.choose(prompt.keys, self._l1s, self._computed)
        machine = self.machines[chosen]
        served = machine.l1.serve(prompt.keys, prompt.seconds, self._l2, prompt.session_id)
        if prompt.ends_session:
            for each in self._l1s:
                each.delete(prompt.session_id)
        written = self._l2.store(prompt.keys[: served.resident * KEY_BYTES])[0] if self._l2 is not None else 0
        machine.blocks += prompt.blocks
        self._computed[chosen] += prompt.blocks - served.l1 - served.l2
        self.l1_hits += served.l1
        self.l2_hits += served.l2
        for traffic, blocks in (
            (self.read, served.l2), (machine.read, served.l2), (self.written, written), (machine.written, written)
        ):  # fmt: skip
            traffic.add(prompt.seconds, blocks * self._block_bytes)


def replay_cluster(
    trace: Trace,
    sizes: Sequence[int],
    policies: Sequence[str],
    plan: Plan,
    progress: Callable[[str, int, int, int], None] = lambda policy, blocks, requests, of: None,
) -> Iterator[PlanResult]:
    """Results by size of an L1 and policy, one each. `progress` is called after each request."""
    for policy in policies:
        for blocks in sizes:
            l2 = BareL1(capacity(plan.l2_blocks, trace), "lru") if plan.l2_blocks is not None else None
            cluster = _Cluster(plan, capacity(blocks, trace), policy, l2)
            for number, prompt in enumerate(trace.requests, 1):
                cluster.serve(prompt)
                progress(policy, blocks, number, len(trace.requests))
            yield _result(trace, plan, policy, blocks, cluster)


def _result(trace: Trace, plan: Plan, policy: str, blocks: int, cluster: _Cluster) -> PlanResult:
    seconds, total = trace.requests[-1].seconds, max(1, trace.blocks)
    return PlanResult(
        policy=policy,
        blocks=blocks,
        machines=plan.machines,
        router=plan.router,
        l2_blocks=plan.l2_blocks,
        hit_rate=(cluster.l1_hits + cluster.l2_hits) / total,
        l1_hit_rate=cluster.l1_hits / total,
        l2_hit_rate=cluster.l2_hits / total,
        read_gb_s=cluster.read.mean(seconds) / _GB,
        read_peak_gb_s=cluster.read.peak / _GB,
        write_gb_s=cluster.written.mean(seconds) / _GB,
        write_peak_gb_s=cluster.written.peak / _GB,
        machine_peak_gb_s=max(max(one.read.peak, one.written.peak) for one in cluster.machines) / _GB,
        busiest_machine=max(one.blocks for one in cluster.machines) * plan.machines / total,
    )
