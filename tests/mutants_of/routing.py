"""Mutants of `kvserver/routing`."""

from __future__ import annotations

from support.mutation import Mutant

MUTANTS = (
    Mutant(
        "chunks are forgotten when their last reader disconnects",
        "kvserver/routing/prefix_index.py", "KVIndex._forget_if_empty",
        "if not read and not any(map(self._size_of, self._owners.get(namespace_prefix, {}).values())):", "if not read:",
        ("unit/routing/test_kv_index.py::test_random_events_agree_with_a_plain_model",),
    ),
    Mutant(
        "an eviction of a chunk removes its last block from those that are stored one by one",
        "kvserver/routing/prefix_index.py", "KVIndex.observe", "group >= 0 if event.group is None",
        "True if event.group is None", ("unit/routing/test_kv_index.py",),
    ),
    Mutant(
        "single blocks are found behind a fill that ends early",
        "kvserver/routing/prefix_index.py", "KVIndex._with_tail",
        "behind(whole) if match.l1_l2 == whole else match.l1_l2", "behind(match.l1_l2)",
        ("unit/routing/test_kv_index.py",),
    ),
    Mutant(
        "a match of a hybrid model does not join L1 and L2",
        "kvserver/routing/prefix_index.py", "KVIndex._boundaries", "first | second for", "max(first, second) for",
        ("unit/routing/test_boundaries.py",),
    ),
)  # fmt: skip
