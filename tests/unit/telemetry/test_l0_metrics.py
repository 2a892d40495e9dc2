"""Block lifetimes as metrics and status: which series there are, and that they are of one moment."""

from __future__ import annotations

import threading
import time

from support.block_lifetimes import COUNTERS, GAUGES, HISTOGRAMS, Engine, allocated, evicted, exact, hold, released

from kvserver.events import InstanceDisconnected, InstanceRegistered
from kvserver.protocol import MOST_DEPARTED
from kvserver.protocol.status import L0Status
from kvserver.telemetry import BlockLifecycle, Kind
from unit.telemetry.l0_rig import Clock


def test_every_family_is_there_before_the_first_report(l0: BlockLifecycle) -> None:
    families = {family.name: family for family in l0.families()}
    assert set(families) == {
        *(f"kvserver_l0_{name}" for name in (*COUNTERS, *GAUGES, "report_gaps", "records", "unsure")),
        *(f"kvserver_l0_block_{name}_seconds" for name in HISTOGRAMS),
    }
    for name, family in families.items():
        short = name.removeprefix("kvserver_l0_")
        kind = Kind.GAUGE if short in (*GAUGES, "unsure") else Kind.COUNTER
        assert family.kind is (Kind.HISTOGRAM if name.endswith("_seconds") else kind), name
        assert bool(family.bounds) == (family.kind is Kind.HISTOGRAM)
        assert family.labels == ("instance_id", "model_name")
        assert family.points == []
        assert family.help.endswith(".")


def test_a_registered_instance_has_all_its_points(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    assert all([labels for labels, _ in family.points] == [engine.names] for family in l0.families())


def test_events_are_counted_in_both_forms(l0: BlockLifecycle) -> None:
    a, b = Engine(l0, "a"), Engine(l0, "b")
    a.did((1, allocated(1, 2) + released(1)))
    a.did((1, []), full=True)
    b.holds(1, hold("a", [5, 6]), hold("b", [7]))
    b.ended(2, "a")
    assert (a.metric("records"), b.metric("records")) == (3, 3)


def test_status_shows_how_an_instance_reports_and_its_counts(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5, 6)), (2, released(5)))
    assert l0.status("engine") == L0Status(
        records=3, allocations=2, active_blocks=1, released_blocks=1, tracked_blocks=2
    )
    assert l0.status("absent") == L0Status()


def test_closing_changes_no_metric(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    l0.close()
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_metrics_read_while_reports_are_applied_are_of_one_moment() -> None:
    l0 = BlockLifecycle(1.0)
    engine = Engine(l0, num_blocks=2000)
    everything = range(1, 2000)
    batch = exact((1, allocated(*everything)), (2, released(*everything)), (3, evicted(*everything)))
    stop, wrong, reads = threading.Event(), [], 0

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            found = l0.status("engine")
            if found.allocations != found.evictions or found.tracked_blocks:
                wrong.append(found)
            l0.families()
            reads += 1

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 60
    while reads < 20 and time.monotonic() < deadline:
        engine.report(batch)
    stop.set()
    for reader in readers:
        reader.join()
    assert reads >= 20
    assert not wrong
    assert engine.metric("allocations") == engine.sequence * len(everything)


def test_any_number_of_instances_has_series_within_bounds(l0: BlockLifecycle, clock: Clock) -> None:
    l0.handle(InstanceRegistered(clock.ns, "stays", "m", "x", 8))
    for number in range(3 * MOST_DEPARTED):
        clock.advance(0.001)
        l0.handle(InstanceRegistered(clock.ns, f"i{number}", f"m{number}", "x", 8))
        l0.handle(InstanceDisconnected(clock.ns, f"i{number}", f"m{number}", True))
    for family in l0.families():
        names = {labels[0] for labels, _ in family.points}
        assert len(family.points) == len(names) == MOST_DEPARTED + 1, family.name
        assert {"stays", f"i{3 * MOST_DEPARTED - 1}"} <= names
