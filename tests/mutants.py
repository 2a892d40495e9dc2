"""Runs the deliberate faults of `mutants_of/`, each with the tests that must notice it. By hand, not in CI: README.md.

    .venv/bin/python tests/mutants.py [--check] [--venv .venv|.venv-vllm|.venv-sglang] [--only WORD …]

An anchor is a symbol and a text that must be in it exactly once: `--check`, which CI runs, lists those that no longer fit.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from mutants_of import MUTANTS
from support.mutation import Mutant, run_tests


def problems() -> list[str]:
    """What in the tables no longer fits the code."""
    found = [problem for mutant in MUTANTS if (problem := mutant.problem()) is not None]
    return found + [f"{name}: named twice" for name, count in Counter(m.name for m in MUTANTS).items() if count > 1]


def run(venv: str, mutants: list[Mutant]) -> Counter[str]:
    """The number of mutants by outcome; prints a line for each. SystemExit if their tests fail without any mutation."""
    every = sorted({test for mutant in mutants for test in mutant.tests.split()})
    sound = run_tests(venv, every, None, seconds=3600)
    if sound.outcome != "SURVIVED":
        raise SystemExit(f"without any mutation: {sound.output}")
    print(f"{venv}: all these tests pass without any mutation, in {sound.seconds:.0f} s", flush=True)
    counts: Counter[str] = Counter()
    for mutant in mutants:
        result = run_tests(venv, mutant.tests.split(), mutant)
        counts[result.outcome] += 1
        what = f"{mutant.file} {mutant.symbol}: {mutant.name}"
        print(f"{result.outcome:10} {result.seconds:5.1f} s  {what}  <- {result.by}", flush=True)
        if result.outcome in ("BROKEN", "timeout"):
            print(result.output)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="look only whether every anchor fits the code")
    parser.add_argument(
        "--venv", choices=(".venv", ".venv-vllm", ".venv-sglang"), help="only those whose tests run there"
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="only those with this in name or file")
    options = parser.parse_args()
    if found := problems():
        print("\n".join(found))
        return 1
    chosen = [m for m in MUTANTS if any(word in f"{m.file} {m.symbol} {m.name}" for word in options.only)]
    if options.check:
        print(f"{len(chosen)} mutants, every anchor fits")
        return 0
    counts: Counter[str] = Counter()
    for venv in [options.venv] if options.venv else sorted({m.venv for m in chosen}):
        if mine := [m for m in chosen if m.venv == venv]:
            counts += run(venv, mine)
    print(f"{sum(counts.values())} mutants: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["SURVIVED"] + counts["BROKEN"] else 0


if __name__ == "__main__":
    sys.exit(main())
