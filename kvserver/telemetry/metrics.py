"""All metric families of one status: what every exporter sends.

Works on a status that does not change, in any thread.

Owns: the rule that each name is there once and from the start. Refuses to know: where the status comes from, and how exporters
send the families.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvserver.protocol.status import DaemonStatus
from kvserver.telemetry.families import Family
from kvserver.telemetry.metrics_daemon import daemon_families
from kvserver.telemetry.metrics_instances import instance_families
from kvserver.telemetry.rpc_counts import RpcCounts


def all_families(status: DaemonStatus, rpc: RpcCounts, more: Iterable[Family] = ()) -> list[Family]:
    """All of one status, also those without points yet; each name is there once.

    `more`: families of other modules; one that is known already adds its points. Instances that disconnected lately are still
    shown.
    """
    found: dict[str, Family] = {}
    for family in (*daemon_families(status, rpc), *instance_families(status.instances, status.departed), *more):
        known = found.setdefault(family.name, family)
        if known is not family:
            assert (known.kind, known.labels, known.bounds) == (family.kind, family.labels, family.bounds), family.name
            known_labels = {labels for labels, _ in known.points}
            known.points += [point for point in family.points if point[0] not in known_labels]
    return list(found.values())
