"""How the properties are tried: the same examples in each run, or with KVSERVER_TEST_PROPERTIES=long many more, drawn anew.

With KVSERVER_TEST_PROPERTIES=unshrunk a failure is reported as it was found. Owns: the profile of Hypothesis, walks, damage to bytes. Import it before a test is decorated.
"""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

MODE = os.environ.get("KVSERVER_TEST_PROPERTIES", "short")
assert MODE in ("short", "long", "unshrunk")

_FIRST = 0x5D0C4B1E << 32  # of the numbers of walks

settings.register_profile(
    "kvserver",
    phases=[Phase.explicit, Phase.generate, *([] if MODE == "unshrunk" else [Phase.target, Phase.shrink])],
    derandomize=MODE != "long",
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.large_base_example],
)
settings.load_profile("kvserver")


def examples(count: int, steps: int = 50) -> settings:
    """So many examples, of a state machine with so many steps each; ten times as many in a long run."""
    return settings(max_examples=count * (10 if MODE == "long" else 1), stateful_step_count=steps)


class Dice(random.Random):
    """What one step of a walk draws. A walk is a list of these, so that it shrinks to the steps that matter."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __repr__(self) -> str:
        return f"Dice({self.number})"


def walks(most: int) -> st.SearchStrategy[list[Dice]]:
    """Walks of nearly so many steps. A step of the number 0 is left out, which is how a walk shrinks.

    Hypothesis prefers numbers that occur in the source of loaded modules: the numbers drawn are so large that none does, or each change of
    any file would try other walks.
    """
    numbers = st.lists(st.integers(_FIRST, _FIRST + (1 << 32) - 1), min_size=most, max_size=most)
    return numbers.map(lambda drawn: [Dice((n - _FIRST) * most + step) for step, n in enumerate(drawn) if n > _FIRST])


def damaged(wholes: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Up to four places are overwritten, cut out, filled or cut off at."""
    edit = st.tuples(st.integers(0, 1 << 16), st.integers(0, 8), st.binary(max_size=8), st.booleans())

    def damage(whole: bytes, edits: list[tuple[int, int, bytes, bool]]) -> bytes:
        for place, length, filling, cuts_off in edits:
            at = place % (len(whole) + 1)
            whole = whole[:at] + filling + (b"" if cuts_off else whole[at + length :])
        return whole

    return st.builds(damage, wholes, st.lists(edit, min_size=1, max_size=4))
