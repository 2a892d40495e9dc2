"""More chunks than the table lists: what it estimates of each size, beside exact caches of each that serve the same prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent.parent / "bench"))
import what_if

MOST_BYTES = 16 << 20


@pytest.mark.parametrize(
    ("workload", "policy", "part"),
    [("far, hot, 2 models", "lru", 4), ("far, hot, 2 models", "slru", 8)],
)
def test_no_size_is_more_than_two_points_from_an_exact_cache_where_old_chunks_are_sampled(
    workload: str, policy: str, part: int
) -> None:
    found = what_if.synthetic(workload, 500_000, policy, part)
    assert found.objects > 450_000
    assert found.sample_rate < 0.5, "not all chunks are listed"
    assert max(found.true) - min(found.true) > 0.3, "sizes differ"
    assert found.p90 <= 2, found
    assert found.memory_bytes <= MOST_BYTES


@pytest.mark.parametrize("policy", ["lru", "slru"])
@pytest.mark.parametrize("workload", ["chat, hybrid", "far, hybrid", "documents, all boundaries"])
def test_no_size_is_more_than_two_points_from_an_exact_cache_of_a_hybrid_model(workload: str, policy: str) -> None:
    found = what_if.synthetic(workload, 10_000, policy)
    assert max(found.true) - min(found.true) > 0.1, "sizes differ"
    assert max(map(abs, found.errors)) <= 2, found
