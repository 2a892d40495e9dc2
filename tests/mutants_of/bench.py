"""Mutants of `kvserver/bench`."""

from __future__ import annotations

from support.mutation import Mutant

MUTANTS = (
    # ---- storage.py ---------------------------------------------------------------------------------
    Mutant(
        "what a bench wrote to a shared store stays",
        "kvserver/bench/storage.py", "TierMover.close", "self._tier.shared", "False",
        ("daemon/test_operator_bench.py",),
    ),
    Mutant(
        "a bench locks the folder of a running daemon",
        "kvserver/bench/storage.py", "opened", 'path=f"{folder}/tier", ', "", ("daemon/test_operator_bench.py",),
    ),
    # ---- verdicts.py --------------------------------------------------------------------------------
    Mutant(
        "a slow copy is normal",
        "kvserver/bench/verdicts.py", "at_least", "ratio >= least", "True", ("unit/bench/test_verdicts.py",),
    ),
    Mutant(
        "what this process used counts as other work",
        "kvserver/bench/verdicts.py", "MachineWatch.reasons", " - (own - before[3])", " + 1e9",
        ("unit/bench/test_verdicts.py",),
    ),
)  # fmt: skip
