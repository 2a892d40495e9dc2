"""Mutants of the modules of `kvserver` that are on top of its rooms."""

from __future__ import annotations

from support.mutation import Mutant

WHAT_IF_DAEMON = ("daemon/test_what_if.py",)

MUTANTS = (
    Mutant(
        "the curve is LRU's whatever L1's policy",
        "kvserver/observability.py", "Observability.__init__", "page_bytes, settings.eviction_policy,", 'page_bytes, "lru",',
        WHAT_IF_DAEMON,
    ),
    Mutant(
        "the curve knows of no boundaries at the interval",
        "kvserver/observability.py", "Observability.__init__", "settings.boundary_interval", "0",
        ("unit/telemetry/test_what_if.py",),
    ),
    Mutant(
        "/status never has the curve's numbers of the table",
        "kvserver/observability.py", "Observability._tick", "self.what_if.tick()", "pass", WHAT_IF_DAEMON,
    ),
)  # fmt: skip
