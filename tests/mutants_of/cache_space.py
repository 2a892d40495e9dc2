"""Mutants of `kvserver/cache`: pages, which chunks leave, shares of L1."""

from __future__ import annotations

from support.mutation import Mutant

POOL = "kvserver/cache/pages.py"
SPACE = "kvserver/cache/space.py"
EVICTION = "kvserver/cache/eviction/lru.py"
CONSUMERS = ("model/test_kv_events.py",)
CACHE_TESTS = tuple(f"unit/cache/test_{subject}.py" for subject in ("stores", "space", "leases", "clear", "audit"))
L1_MODELS_TESTS = ("unit/server/test_l1_models.py",)
POOL_TESTS = ("unit/cache/test_pool.py",)
EVICTION_TESTS = ("unit/cache/test_eviction.py",)
SLRU = "kvserver/cache/eviction/slru.py"
POLICY_TESTS = ("unit/cache/test_policies.py",)
SHARES = "kvserver/cache/shares.py"
SHARES_TESTS = ("unit/cache/test_shares.py", "unit/cache/test_policies.py")

MUTANTS = (
    # ---- eviction/lru.py ----------------------------------------------------------------------------
    Mutant(
        "a chunk that was used since is evicted by its old place",
        EVICTION, "LeastRecentlyUsed.track", "if older is not NOWHERE:", "if False:", EVICTION_TESTS,
    ),
    Mutant(
        "a chunk that was freed comes back to the policy",
        EVICTION, "LeastRecentlyUsed.track", "elif chunk.detached:", "elif False:", EVICTION_TESTS,
    ),
    Mutant(
        "incomplete chunks leave as late as the others",
        EVICTION, "LeastRecentlyUsed.track", "end = self._incomplete", "end = used", EVICTION_TESTS,
    ),
    # ---- eviction/slru.py ---------------------------------------------------------------------------
    Mutant(
        "what is used again stays on probation",
        SLRU, "ProtectedSegment.use", "chunk.state |= _USED", "pass", EVICTION_TESTS,
    ),
    Mutant(
        "the protected segment grows without end",
        SLRU, "ProtectedSegment.pop_chunk", "self._demote()", "pass", EVICTION_TESTS,
    ),
    # ---- pages.py -----------------------------------------------------------------------------------
    Mutant(
        "the last page of a slot is missing",
        POOL, "PagePool.pages_for", "-(-slot_bytes // self.page_bytes)", "slot_bytes // self.page_bytes or 1",
        POOL_TESTS,
    ),
    Mutant(
        "a slot is refused although enough pages are free here and there",
        POOL, "PagePool.allocate_pages", "if count <= self.unused_pages:", "if False:", POOL_TESTS,
    ),
    Mutant(
        "a slot is refused if it needs more than a sixteenth of the free pages in several extents",
        POOL, "PagePool.allocate_pages", "if count <= self.unused_pages:", "if count <= self.unused_pages // 16:",
        ("unit/config/test_capacity.py::test_bursts_of_three_models_in_no_order_leave_no_room_stranded",),
    ),
    Mutant(
        "unpinned pages are used before all pinned ones are",
        POOL, "PagePool.allocate_pages", "if count <= self._pinned.pages:", "if False:", POOL_TESTS,
    ),
    Mutant(
        "a slot is cut from pages that are in use",
        POOL, "_FreeExtents.cut_extent", "self._insert(first + count, found - count)",
        "self._insert(first, found - count)", POOL_TESTS,
    ),
    Mutant(
        "free pages do not merge with those behind them",
        POOL, "_FreeExtents.add_extent", "if after is not None:", "if False:", POOL_TESTS,
    ),
    Mutant(
        "a freed slot that pinning reached into is all pinned",
        POOL, "PagePool._free_extent", "elif pinned >= count:", "elif pinned > 0:", POOL_TESTS,
    ),
    Mutant(
        "a large slot is gathered from shreds",
        POOL, "_gather", "least = granularity(count)", "least = 1", POOL_TESTS,
    ),
    Mutant(
        "a large L1 has more pages than there are numbers",
        POOL, "page_bytes_for", "page *= 2", "break", POOL_TESTS,
    ),
    # ---- shares.py ----------------------------------------------------------------------------------
    Mutant(
        "a share keeps nothing",
        SHARES, "Shares.spares", " or model.pages - chunk.page_count >= model.share_pages", " or True", SHARES_TESTS,
    ),
    Mutant("an incomplete chunk is spared", SHARES, "Shares.spares", "not chunk.ready or ", "", SHARES_TESTS),
    Mutant(
        "an eviction leaves a model with less than its share where a chunk has several pages",
        SHARES, "Shares.spares", "model.pages - chunk.page_count >= model.share_pages",
        "model.pages > model.share_pages", SHARES_TESTS,
    ),
    # ---- space.py -----------------------------------------------------------------------------------
    Mutant(
        "a chunk that was never whole counts as one that was never loaded",
        SPACE, "Space._evict_chunk", "bool(chunk.ready) and not chunk.loaded", "not chunk.loaded", L1_MODELS_TESTS,
    ),
    Mutant(
        "a chunk that is read when its namespace is cleared is removed twice",
        SPACE, "Space._free_one_chunk", " or namespace.chunks.get(chunk.key) is None", "", CACHE_TESTS,
    ),
    Mutant(
        "consumers believe in single blocks that were evicted",
        SPACE, "Space._evict_chunk", "plan.evicted_tails.append((chunk.namespace, chunk.key))", "pass", CONSUMERS,
    ),
    Mutant(
        "what is read may be evicted",
        SPACE, "Space.pin_chunks", "            chunk.pins += 1", "            chunk.pins += 0", CACHE_TESTS,
    ),
    Mutant(
        "the pages of a cleared chunk are freed while it is read",
        SPACE, "Space.free_or_track", "if chunk.detached and not chunk.pins:", "if chunk.detached:", CACHE_TESTS,
    ),
    Mutant(
        "a clear of one namespace clears all",
        SPACE, "Space.clear_namespaces", "if id.startswith(base) else None", "if True else None", CACHE_TESTS,
    ),
    Mutant(
        "a store evicts while pages of cleared chunks could be freed",
        SPACE, "Space._allocate_slot", "if done := self._free_one_chunk():", "if done := 0:", CACHE_TESTS,
    ),
    Mutant(
        "an eviction is not published",
        SPACE, "Space._evict_chunk", "plan.evicted.append((chunk.namespace.id, chunk.key))", "pass",
        ("daemon/test_kv_stream.py::test_all_consumers_know_what_l1_holds_through_evictions_a_clear_a_halt_a_kill_and_the_end",),
    ),
    Mutant(
        "a store has no space while leases of a disconnected engine could end",
        SPACE, "Space._allocate_slot", "if done := self.leases.end_one():", "if done := 0:",
        ("issues/test_turns_grew_with_the_cache.py::test_a_store_waits_for_the_leases_of_a_disconnected_engine",),
    ),
    Mutant(
        "a chunk that a request leases is evicted",
        SPACE, "Space._allocate_slot", "if not (chunk.leases or chunk.pins):", "if not chunk.pins:", CACHE_TESTS,
    ),
    Mutant(
        "a chunk that is copied is evicted",
        SPACE, "Space._allocate_slot", "if not (chunk.leases or chunk.pins):", "if not chunk.leases:", CACHE_TESTS,
    ),
    Mutant(
        "incomplete chunks are not evicted",
        SPACE, "Space._allocate_slot", "self.policy.pop_incomplete() or ", "", POLICY_TESTS,
    ),
    Mutant(
        "what was spared stays before what is younger",
        SPACE, "Space._allocate_slot", "self._shares.pop_released() or ", "", SHARES_TESTS,
    ),
    Mutant(
        "a model has no space in its own share",
        SPACE, "Space._allocate_slot", "self._shares.pop_own(model)", "None", SHARES_TESTS,
    ),
    Mutant(
        "to spare a chunk costs a store no step",
        SPACE, "Space._allocate_slot", "plan.steps -= 1\n                continue", "continue", SHARES_TESTS,
    ),
)  # fmt: skip
