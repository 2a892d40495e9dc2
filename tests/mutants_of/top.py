"""Mutants of the modules of `kvserver` that are on top of its rooms."""

from __future__ import annotations

from support.mutation import Mutant

WHAT_IF_DAEMON = ("daemon/test_what_if.py",)

MUTANTS = (
    Mutant(
        "the sketch of /status is never made",
        "kvserver/parts.py", "Observability._tick", "self.what_if.tick()", "pass", WHAT_IF_DAEMON,
    ),
)  # fmt: skip
