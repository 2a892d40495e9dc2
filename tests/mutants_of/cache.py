"""Mutants of `kvserver/cache`: what a lookup finds, stores, leases, namespaces."""

from __future__ import annotations

from support.mutation import Mutant

CACHE = "kvserver/cache/cache.py"
INDEX = "kvserver/cache/index.py"
CACHE_STORES = "kvserver/cache/store_plans.py"
LEASES = "kvserver/cache/leases.py"
CHUNK = "kvserver/cache/chunk.py"
GROUPS = "kvserver/cache/groups.py"
MISSES = "kvserver/cache/misses.py"
NAMESPACE = "kvserver/cache/namespace.py"
EXPLAIN_TESTS = ("unit/telemetry/test_explain.py", "daemon/test_explain.py", "daemon/test_explain_requests.py")
CACHE_TESTS = tuple(f"unit/cache/test_{subject}.py" for subject in ("stores", "space", "leases", "clear", "audit"))
GROUP_TESTS = ("unit/cache/test_groups.py",)
MISSES_TESTS = ("issues/test_one_evicted_chunk_was_charged_with_all_behind_it.py",)
INDEX_TESTS = ("unit/cache/test_index.py",)
L1_MODELS_TESTS = ("unit/server/test_l1_models.py",)
POLICY_TESTS = ("unit/cache/test_policies.py",)
NAMESPACE_TESTS = ("unit/cache/test_namespace.py",)
FILL_TESTS = ("unit/tiering/test_fills.py",)

MUTANTS = (
    # ---- cache.py -----------------------------------------------------------------------------------
    Mutant(
        "a lookup finds a chunk that is still being filled",
        CACHE, "_lease", "if chunk.ready & full != full:", "if False:", CACHE_TESTS,
    ),
    Mutant(
        "chunks behind the hit stay leased",
        CACHE, "_lease", "for chunk in found[boundary:]:", "for chunk in found[:0]:", GROUP_TESTS,
    ),
    Mutant(
        "a load reads another group's object",
        CACHE, "Cache.plan_load", "chunk.ready >> group & 1", "chunk.ready", GROUP_TESTS,
    ),
    Mutant(
        "a lookup counts chunks behind one that is missing",
        CACHE, "_lease", "del found[number:]", "del found[number]", CACHE_TESTS,
    ),
    Mutant(
        "the first lease of a request that asks again is never ended",
        CACHE, "Cache.lookup", "self.leases.end(owner)", "pass", CACHE_TESTS,
    ),
    Mutant(
        "a load reads a chunk that is still being filled",
        CACHE, "Cache.plan_load", "if chunk is not None and chunk.ready >> group & 1]", "if chunk is not None]",
        CACHE_TESTS,
    ),
    Mutant(
        "a load is no use of its chunks",
        CACHE, "Cache.finish_load", "self.space.free_or_track(*reversed(chunks))", "self._free_or_track()", CACHE_TESTS,
    ),
    Mutant(
        "no namespace that has the missing chunk is named",
        CACHE, "Cache.lookup", "self._namespace_with(missing_key)", 'b""', EXPLAIN_TESTS,
    ),
    Mutant(
        "all missing chunks count under the reason of the first",
        CACHE, "Cache._why_missed", "if reason is MissReason.NEVER_STORED:", "if True:", MISSES_TESTS,
    ),
    Mutant(
        "chunks behind one that was never stored count as evicted",
        CACHE, "Cache._why_missed", "if reason is MissReason.NEVER_STORED:", "if False:", MISSES_TESTS,
    ),
    Mutant(
        "an evicted key that was lost was never stored",
        CACHE, "Cache._why_absent", "(namespace_id, behind) in self.space.evicted_keys", "False", MISSES_TESTS,
    ),
    # ---- chunk.py -----------------------------------------------------------------------------------
    Mutant(
        "one rank's slot moves the bounds of the others wrongly",
        CHUNK, "Chunk.set_slot", "range(number, count)", "range(number + 1, count)", INDEX_TESTS,
    ),
    Mutant(
        "a chunk that left the index is not detached",
        CHUNK, "Namespace.left", "self._left.cleared = True", "pass", INDEX_TESTS,
    ),
    Mutant(
        "an object counts as being filled because another rank has stored it",
        CHUNK, "Chunk.is_filling", " and not self.done >> number & 1", "",
        ("issues/test_a_fill_waited_for_an_object_that_no_store_completed.py",),
    ),
    # ---- groups.py ----------------------------------------------------------------------------------
    Mutant(
        "a hit ends where only full attention goes on",
        GROUPS, "Groups.boundary", "boundary = missing ", "break ", GROUP_TESTS,
    ),
    Mutant(
        "KV events of a model with one window name all blocks of its chunks",
        GROUPS, "Groups.__init__", " and self.objects[0].blocks * self.objects[0].block_tokens == chunk_tokens", "",
        ("adapters/test_kv_events_groups.py::test_what_is_stored_dropped_and_cleared_is_named_by_group",),
    ),
    # ---- index.py -----------------------------------------------------------------------------------
    Mutant(
        "the chunks of a cleared namespace still count for their model",
        INDEX, "Index._count", "namespace.model.chunks += more", "namespace.model.chunks += max(0, more)",
        L1_MODELS_TESTS,
    ),
    Mutant(
        "chunks of a cleared namespace are not detached",
        INDEX, "Index.detach_namespace", "namespace.cleared = True", "pass", INDEX_TESTS,
    ),
    Mutant(
        "an emptied namespace stays in memory",
        INDEX, "Index.detach_chunk", "del self._namespaces[namespace.id]", "pass", INDEX_TESTS,
    ),
    Mutant(
        "an emptied namespace takes whichever has its id along",
        INDEX, "Index.detach_chunk", "is namespace:", "is not None:", INDEX_TESTS,
        equivalent="remove() requires a chunk that is not detached, so its namespace is not cleared, and only clear() "
        "lets another take its id",
    ),
    Mutant(
        "cleared chunks are counted on",
        INDEX, "Index.detach_namespace", "self._count(namespace, -len(namespace.chunks))", "pass", INDEX_TESTS,
    ),
    # ---- leases.py ----------------------------------------------------------------------------------
    Mutant(
        "the end of a lease makes the end of a prefix the youngest",
        LEASES, "Leases._end", "reversed(lease.chunks)", "lease.chunks", CACHE_TESTS,
    ),
    Mutant(
        "the end of a lease does not show its chunks to eviction",
        LEASES, "Leases._end", "self._policy.use(reversed(lease.chunks))", "pass", CACHE_TESTS,
    ),
    Mutant(
        "a request that has a tail loses the lease of its chunks",
        LEASES, "Leases.add", "lease.chunks += chunks", "lease.chunks = chunks", ("unit/cache/test_tails.py",),
    ),
    Mutant(
        "leases of a disconnected engine never end",
        LEASES, "Leases.end_of_instance", "self._ownerless.append(leases)", "pass", CACHE_TESTS,
    ),
    Mutant(
        "the end of a request is no use of what it found",
        LEASES, "Leases._end", "self._policy.use(", "self._policy.track(", POLICY_TESTS,
    ),
    # ---- misses.py ----------------------------------------------------------------------------------
    Mutant(
        "what a tail covers counts as missed",
        MISSES, "LookupOutcome.missed_tokens", "found[self.missed[0][0]] -= self.tail_tokens", "pass",
        ("unit/cache/test_tails.py", "daemon/test_tails.py"),
    ),
    Mutant(
        "what is evicted from a large L1 is soon forgotten",
        MISSES, "EvictedKeys.add", "max(LEAST_REMEMBERED, chunks)", "LEAST_REMEMBERED", MISSES_TESTS,
    ),
    Mutant(
        "evicted keys overwrite each other while there is room",
        MISSES, "_Generation.add", "marks.index(0) if 0 in marks else self.room % _BUCKET", "self.room % _BUCKET",
        MISSES_TESTS,
    ),
    # ---- namespace.py -------------------------------------------------------------------------------
    Mutant(
        "a block is named among the chunks, whose keys are the same",
        NAMESPACE, "tails_of", "namespace + _TAILS", "namespace", ("unit/cache/test_tails.py",),
    ),
    Mutant(
        "chunks of another size are shared",
        NAMESPACE, "fingerprint", "        first.chunk_tokens,\n", "", NAMESPACE_TESTS,
    ),
    Mutant(
        "engines with other windows share, and their blocks of other sizes too",
        NAMESPACE, "fingerprint", "        first.object_groups,\n", "", NAMESPACE_TESTS,
    ),
    Mutant(
        "the groups of planes do not count",
        NAMESPACE, "fingerprint", "(plane.group, plane.run_bytes)", "plane.run_bytes",
        ("daemon/test_groups.py::test_models_whose_groups_differ_share_nothing",),
    ),
    Mutant(
        "only the first rank's planes count",
        NAMESPACE, "fingerprint", "for rank in ranks]", "for rank in ranks[:1]]", NAMESPACE_TESTS,
    ),
    Mutant("the layout does not count", NAMESPACE, "fingerprint", "[rank.layout, [", "[[", NAMESPACE_TESTS),
    Mutant(
        "no field of the configuration counts",
        NAMESPACE, "fingerprint", "{field.name: field.digest for field in counted(first).values()}", "{}",
        NAMESPACE_TESTS,
    ),
    Mutant(
        "a private engine shares with its next start",
        NAMESPACE, "fingerprint", "[first.instance_id, first.incarnation] if", "[] if", NAMESPACE_TESTS,
    ),
    Mutant(
        "ranks of two configurations are taken for one engine's",
        NAMESPACE, "check_agreement", "if _digest(", "if False and _digest(", NAMESPACE_TESTS,
    ),
    Mutant(
        "a LoRA's namespace is not below that of its epoch",
        NAMESPACE, "with_variant", 'variant.split("/", 1)', "[variant]", NAMESPACE_TESTS,
    ),
    Mutant(
        "ranks with different numbers of blocks are taken for one engine's",
        NAMESPACE, "check_agreement", '"num_blocks", ', "", NAMESPACE_TESTS,
    ),
    # ---- store_plans.py -----------------------------------------------------------------------------
    Mutant(
        "a slot that was freed after a failed copy still counts for its model",
        CACHE_STORES, "StorePlans.finish_store", "chunk.namespace.model.pages -= plan.pages * len(plan.slots)", "pass",
        L1_MODELS_TESTS,
    ),
    Mutant(
        "an object is dropped while it is in use",
        CACHE_STORES, "StorePlans.drop_objects", " or chunk.leases or chunk.pins", "", GROUP_TESTS,
    ),
    Mutant(
        "a fill drops the slots that a store copies to",
        CACHE_STORES, "StorePlans.drop_incomplete", " and not chunk.is_filling(group)", "",
        CACHE_TESTS,
    ),
    Mutant(
        "a tail leaves L1 after the chunk that it follows",
        CACHE_STORES, "StorePlans.finish_store", "before=self._chunk_before(plan)", "before=None",
        ("unit/cache/test_tails.py",),
    ),
    Mutant(
        "a chunk is stored twice while the first copy runs",
        CACHE_STORES, "StorePlans.extend_plan", "any(map(chunk.has_slot, plan.slots))",
        "chunk.done >> plan.slots.start & 1", CACHE_TESTS,
    ),
    Mutant(
        "a chunk that another rank stored counts as this rank's",
        CACHE_STORES, "StorePlans.extend_plan", "any(map(chunk.has_slot, plan.slots))", "not chunk.empty", CACHE_TESTS,
    ),
    Mutant(
        "making room for one rank evicts the other ranks' bytes of that chunk",
        CACHE_STORES, "StorePlans.plan_store", "self._space.index.find_chunks(namespace_id, plan.keys)", "[]",
        ("issues/test_a_prompt_larger_than_l1_was_refused_whole.py",),
    ),
    Mutant(
        "a chunk is found when its first rank was copied",
        CACHE_STORES, "StorePlans.finish_store", "if chunk.done & mask == mask:", "if True:", CACHE_TESTS,
    ),
    Mutant(
        "a failed copy is published",
        CACHE_STORES, "StorePlans.finish_store", "if copied and not chunk.detached and", "if not chunk.detached and",
        CACHE_TESTS,
    ),
    Mutant(
        "a store that ends after a clear is published",
        CACHE_STORES, "StorePlans.finish_store", "if copied and not chunk.detached and", "if copied and", CACHE_TESTS,
    ),
    Mutant(
        "a failed copy keeps its pages",
        CACHE_STORES, "StorePlans.finish_store", "self._space.pool.free_pages(chunk.slot(number))", "pass", CACHE_TESTS,
    ),
    Mutant(
        "one rank's failure takes the chunk away that another rank fills",
        CACHE_STORES, "StorePlans.finish_store", "chunk.empty", "not chunk.done", CACHE_TESTS,
    ),
    Mutant(
        "the end of a used prefix becomes the youngest",
        CACHE_STORES, "StorePlans.finish_store", "*reversed(plan.prefix)", "*plan.prefix", CACHE_TESTS,
    ),
    Mutant(
        "one rank fills L1 with what the others have no room for",
        CACHE_STORES, "StorePlans.plan_store", "(pages * groups.slots[group])", "pages",
        ("issues/test_a_prompt_larger_than_l1_was_refused_whole.py",),
    ),
    Mutant(
        "what is stored again soon after its eviction is as new as any other",
        CACHE_STORES, "StorePlans.extend_plan", "if plan.returning:", "if False:", POLICY_TESTS,
    ),
    Mutant(
        "a chunk comes back without its prefix",
        CACHE_STORES, "StorePlans.extend_plan", "plan.returning = plan.returning and ", "plan.returning = ",
        POLICY_TESTS,
    ),
    Mutant(
        "a failed copy of a whole fill is published",
        CACHE_STORES, "StorePlans.finish_store", "and place not in failed", "", FILL_TESTS,
    ),
)  # fmt: skip
