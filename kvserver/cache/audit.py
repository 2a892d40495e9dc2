"""Audit of L1's accounting: the running counts against counts of what is there."""

from __future__ import annotations

from collections import Counter

from kvserver.cache.chunk import ModelUse
from kvserver.cache.space import Space


def audit(space: Space) -> None:
    """Count chunks, pages, leases and pins, and compare with the counters. AssertionError names the wrong one.

    REQUIRES: no deferred work is left. Costs a walk over all chunks: for tests and idle moments.
    """
    assert not space.has_garbage, "free the cleared chunks first"
    leases = pins = 0
    chunks: Counter[ModelUse] = Counter()
    tails: Counter[ModelUse] = Counter()
    pages: Counter[ModelUse] = Counter()
    for chunk in space.index:
        (tails if chunk.namespace.groups.tails else chunks)[chunk.namespace.owner] += 1
        pages[chunk.namespace.owner] += chunk.page_count
        leases += chunk.leases
        pins += chunk.pins
        masks = chunk.namespace.groups.masks
        ready = sum(1 << group for group, mask in enumerate(masks) if chunk.done & mask == mask)
        assert chunk.ready == ready, "READY without every rank's bytes, or the reverse"
        assert chunk.leases or chunk.pins or space.policy.tracks(chunk), "an idle chunk that eviction cannot find"
    count = chunks.total()
    assert count == space.index.chunk_count, f"{count} chunks, the index counts {space.index.chunk_count}"
    owners = [*space.index.models.values(), *space.index.tenants.values()]
    assert tails.total() == space.index.tail_blocks, (
        f"{tails.total()} blocks of tails, {space.index.tail_blocks} counted"
    )
    assert all(tails[each] == each.tail_blocks for each in owners), "an owner's tails are counted wrongly"
    assert all(chunks[each] == each.chunks for each in owners), "chunks of an owner are counted wrongly"
    evicted = sum(each.evicted_chunks for each in owners)
    assert evicted == space.evicted_chunks, f"owners count {evicted} evictions of {space.evicted_chunks}"
    used = sum(each.pages for each in owners)
    assert used == space.pool.used_pages, f"owners count {used} pages, {space.pool.used_pages} are used"
    all_leases = list(space.leases)
    assert len(all_leases) == space.leases.count, f"{len(all_leases)} leases, {space.leases.count} counted"
    in_leases = sum(not chunk.detached for lease in all_leases for chunk in lease.chunks) + space.protections.audit()
    assert leases == in_leases, f"chunks count {leases} leases, leases hold {in_leases} chunks"
    assert pins <= space.pins, f"chunks count {pins} pins, open plans {space.pins}"
    space.sessions.audit(space.index, all_chunks=space.pins == 0)
    if space.pins == 0:
        assert all(pages[each] == each.pages for each in owners), "pages of an owner are counted wrongly"
        assert pages.total() == used, f"chunks have {pages.total()} pages, {used} are used"
