"""What `/status` states of L1."""

from __future__ import annotations

from kvserver.cache import POLICIES, Cache, PagePool
from kvserver.config import Placement, Settings
from kvserver.server.status import l1_status


def test_pinned_bytes_grow_with_what_is_pinned_whatever_is_used() -> None:
    pool = PagePool(10 * 4096, 4096)
    cache = Cache(pool, POLICIES[Settings().eviction_policy]())
    assert l1_status(cache, Placement()).pinned_bytes == 0
    pool.allocate_pages(8)
    pool.mark_pinned(3)
    shown = l1_status(cache, Placement())
    assert (shown.pinned_bytes, shown.used_bytes, shown.size_bytes) == (3 * 4096, 8 * 4096, 10 * 4096)
    pool.mark_pinned(10)
    assert l1_status(cache, Placement()).pinned_bytes == 10 * 4096
