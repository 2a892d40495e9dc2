"""Mutants of `kvserver/events`."""

from __future__ import annotations

from support.mutation import Mutant

MUTANTS = (
    Mutant(
        "a thread of events keeps the interpreter's lock until none is left",
        "kvserver/events/runner.py", "Runner._run", "time.monotonic() >= slice_ends", "False",
        ("unit/events/test_runner.py",),
    ),
)  # fmt: skip
