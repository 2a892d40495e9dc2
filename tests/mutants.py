"""Runs the deliberate faults of `mutants_of/`, each with the tests that must notice it. By hand, not in CI: README.md.

    .venv/bin/python tests/mutants.py [--list] [--check] [--core | --adapters] [--trust] [--only WORD …]

An anchor is a symbol and a text that must be in it exactly once: `--check`, which CI runs, lists those that no longer fit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mutants_of import ROOMS, room_of
from support.mutation import Mutant, Outcome, Result, Tests, copy_package, mutated_package

MUTANTS = [mutant for mine in ROOMS.values() for mutant in mine]


def problems() -> list[str]:
    """What in the tables no longer fits the code."""
    found = [problem for mutant in MUTANTS if (problem := mutant.problem()) is not None]
    found += [
        f"{m.name}: {m.file} is not in {room}" for room, mine in ROOMS.items() for m in mine if room_of(m.file) != room
    ]
    return found + [f"{name}: named twice" for name, count in Counter(m.name for m in MUTANTS).items() if count > 1]


def run(mutants: list[Mutant], venv: str, trust: bool) -> list[tuple[Mutant, Result]]:
    """Prints a line for each. SystemExit if their tests fail without any mutation, unless we `trust` that they pass."""
    results: list[tuple[Mutant, Result]] = []
    with tempfile.TemporaryDirectory(prefix="kvs-unmutated-") as base, mutated_package(None) as unmutated:
        copy_package(Path(base))
        tests = Tests(venv, Path(base))
        try:
            every = sorted({test for mutant in mutants for test in mutant.tests})
            if not trust:
                sound = tests.run(unmutated, every, seconds=3600)
                if sound.outcome != Outcome.SURVIVED:
                    raise SystemExit(f"without any mutation: {sound.output}")
                print(f"{venv}: all these tests pass without any mutation, in {sound.seconds:.0f} s", flush=True)
            for mutant in mutants:
                with mutated_package(mutant) as folder:
                    results.append((mutant, tests.run(folder, mutant.tests)))
                result = results[-1][1]
                print(
                    f"{result.outcome.value:10} {result.seconds:5.1f} s  {mutant.file} {mutant.symbol}: {mutant.name}"
                    f"{'  <- ' + result.by if result.by else ''}",
                    flush=True,
                )
                if result.outcome in (Outcome.BROKEN, Outcome.TIMEOUT):
                    print(result.output)
        finally:
            tests.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--check", action="store_true", help="look only whether every anchor fits the code")
    parser.add_argument("--core", action="store_true", help="only those whose tests run in .venv")
    parser.add_argument("--adapters", action="store_true", help="only those whose tests run in .venv-vllm")
    parser.add_argument("--trust", action="store_true", help="the tests pass without any mutation: do not look again")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="only those with this in name or file")
    options = parser.parse_args()
    if found := problems():
        print("\n".join(found))
        return 1
    chosen = [m for m in MUTANTS if any(word in f"{m.file} {m.symbol} {m.name}" for word in options.only)]
    if options.check or options.list:
        for mutant in chosen if options.list else ():
            print(f"{mutant.venv:8}  {mutant.file} {mutant.symbol}: {mutant.name}")
        print(f"{len(chosen)} mutants, every anchor fits")
        return 0
    counts: Counter[str] = Counter()
    survivors: list[str] = []
    for mutant in chosen:
        if mutant.equivalent:
            counts[Outcome.EQUIVALENT.value] += 1
            print(f"equivalent          {mutant.file} {mutant.symbol}: {mutant.name}: {mutant.equivalent}")
    for venv in ("core", "adapters"):
        mine = [mutant for mutant in chosen if mutant.venv == venv and not mutant.equivalent]
        if not mine or (options.adapters if venv == "core" else options.core):
            continue
        for mutant, result in run(mine, venv, options.trust):
            counts[result.outcome.value] += 1
            if result.outcome in (Outcome.SURVIVED, Outcome.BROKEN):
                survivors.append(f"{result.outcome.value}: {mutant.file} {mutant.symbol}: {mutant.name}")
    print(f"{sum(counts.values())} mutants: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print("\n".join(survivors), end="\n" if survivors else "")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
