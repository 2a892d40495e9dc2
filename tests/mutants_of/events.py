"""Mutants of `kvserver/events`."""

from __future__ import annotations

from support.mutation import Mutant

MUTANTS = (
    # ---- runner.py ----------------------------------------------------------------------------------
    Mutant(
        "events compete with the reply to the message that caused them",
        "kvserver/events/runner.py", "Runner._run", "if entry is not None and not finishing:", "if False:",
        ("unit/events/test_runner.py::test_items_gather_before_the_first_is_handled",),
    ),
)  # fmt: skip
