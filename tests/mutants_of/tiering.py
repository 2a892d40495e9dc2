"""Mutants of `kvserver/tiering`."""

from __future__ import annotations

from support.mutation import Mutant

L2_EVENTS = "kvserver/tiering/events.py"
CONSUMERS = ("model/test_kv_events.py",)
WHAT_IF_DAEMON = ("daemon/test_what_if.py",)
FILLS = "kvserver/tiering/fills.py"
TURN_TESTS = ("issues/test_a_fill_was_the_work_of_one_turn.py",)
ROOM_TESTS = ("issues/test_a_fill_without_room_held_up_all_that_had_room.py",)
INCOMPLETE_TESTS = ("issues/test_a_fill_waited_for_an_object_that_no_store_completed.py",)
SPILL = "kvserver/tiering/spill.py"
PRESENCE = "kvserver/tiering/presence.py"
PROBES = "kvserver/tiering/probes.py"
PROBE_TESTS = (
    "unit/tiering/test_probes.py",
    "issues/test_a_slow_shared_store_cost_each_cold_prompt_its_latency.py",
)
READ_RATES = "kvserver/tiering/rates.py"
FILL_TESTS = (
    "unit/tiering/test_fills.py",
    *(f"unit/tiering/test_fill_{subject}.py" for subject in ("ends", "space", "speed", "tiers", "counts")),
)
SPILL_TESTS = ("unit/tiering/test_spill.py",)
RATE_TESTS = ("unit/tiering/test_rates.py",)

MUTANTS = (
    # ---- ages.py ------------------------------------------------------------------------------------
    Mutant(
        "the beginning of a long prompt is older than its end",
        "kvserver/tiering/ages.py", "Ages.step", "first = max(0, prompt.chunks - left)", "first = 0", SPILL_TESTS,
    ),
    # ---- fills.py -----------------------------------------------------------------------------------
    Mutant(
        "what was read from L2 is not used in the curve",
        FILLS, "Fills._count_ready", "fill.worker.layout.objects[group], pages,",
        "fill.worker.layout.objects[group], 0,", WHAT_IF_DAEMON,
    ),
    Mutant(
        "an object whose read failed becomes READY",
        FILLS, "Fills._batch_ended", "failed=batch.failed", "failed=()", FILL_TESTS,
    ),
    Mutant(
        "a fill that waits for room holds up those that have begun",
        FILLS, "Fills._next", "may_overtake = may_overtake and now_ns < fill.overtaken_until_ns", "return None",
        ("issues/test_a_fill_that_waits_for_room_held_up_others.py",),
    ),
    Mutant(
        "a fill without room holds up those behind it that have room",
        FILLS, "Fills._next", "may_overtake and now_ns < fill.overtaken_until_ns", "False", ROOM_TESTS,
    ),
    Mutant(
        "a fill without room is overtaken until it is due",
        FILLS, "Fills._next", "may_overtake and now_ns < fill.overtaken_until_ns", "may_overtake", ROOM_TESTS,
    ),
    Mutant(
        "a fill keeps one rank's bytes of an object that no store completes",
        FILLS, "Fills._reserve_batch", "self._cache.drop_incomplete(fill.namespace, missing.group, keys)", "pass",
        INCOMPLETE_TESTS,
    ),
    Mutant(
        "a fill that is a little too large is halved",
        PRESENCE, "most_within", "return place", "return place // 2", ROOM_TESTS,
    ),
    Mutant(
        "a fill is planned and reserves in one turn",
        FILLS, "Fills.step", "self._plan(fill)", "self._plan(fill) or self.step()", TURN_TESTS,
    ),
    Mutant(
        "a fill reserves all its batches in one turn",
        FILLS, "Fills.step", "self._reserve_batch(fill,", "while fill.todo: self._reserve_batch(fill,", TURN_TESTS,
    ),
    Mutant(
        "a fill begins all its reads in one turn",
        FILLS, "Fills.step", "self._begin_batch(fill,", "while fill.reserved: self._begin_batch(fill,", TURN_TESTS,
    ),
    Mutant(
        "fills use more of L1 than their bound",
        FILLS, "Fills._fits_beside_others", "return not used or used + fill.bytes <= self._bound", "return True",
        FILL_TESTS,
    ),
    Mutant(
        "a fill is answered only when its reads have ended",
        FILLS, "Fills.step", "if fill.due_ns <= now_ns:", "if False:", FILL_TESTS,
    ),
    Mutant("the end of its request lets a fill go on", FILLS, "Fills.end", "self._finish(fill)", "pass", FILL_TESTS),
    Mutant(
        "an engine that waits for a slow tier all the same reads from it",
        FILLS, "Fills._plan", "if self._presence.is_slow(", "if False and self._presence.is_slow(", FILL_TESTS,
    ),
    Mutant(
        "a failed read counts as bytes",
        FILLS, "Fills._read", "batch.coverage.bytes if done else 0", "batch.coverage.bytes", FILL_TESTS,
    ),
    Mutant(
        "what a fill has read still counts as queued",
        FILLS, "Fills._read", "self._rates.queue(tier, -less)", "pass", FILL_TESTS,
    ),
    Mutant(
        "what an ended fill had queued counts on",
        FILLS, "Fills._finish", "self._unqueue(fill)", "pass", FILL_TESTS,
    ),
    Mutant(
        "slow fills are not counted",
        FILLS, "Fills._finish", "fill.instance.counts.fills_slower += 1", "pass", FILL_TESTS,
    ),
    Mutant(
        "a fill reads before it has slots for all",
        FILLS, "Fills._next", "elif fill.todo:", "elif fill.todo and not fill.reserved:", FILL_TESTS,
    ),
    Mutant(
        "a model with windows reads what finds no space for its chunks",
        FILLS, "Fills._cut", "        self._release(fill)\n", "", FILL_TESTS,
    ),
    Mutant(
        "the slots of an ended fill stay reserved",
        FILLS, "Fills._finish", "self._release(fill)", "pass", FILL_TESTS,
    ),
    Mutant(
        "a fill that finds a tier busy gives up",
        FILLS, "Fills._has_room", "return known == free", "return True", FILL_TESTS,
    ),
    Mutant(
        "the second fill of a prompt reads it again",
        FILLS, "Fills._reserve_batch", "if id(chunk) not in own", "if False", FILL_TESTS,
    ),
    Mutant(
        "a clear lets fills go on",
        FILLS, "Fills.clear", "self._finish(fill)", "pass", FILL_TESTS,
        equivalent="tiers cancel what is under way, and cleared chunks are not read: the fill only ends later",
    ),
    Mutant("a load does not end what its fill occupies", FILLS, "Fills.loaded", "filled.bytes = 0", "pass", FILL_TESTS),
    Mutant(
        "the death of an engine leaves its fills",
        FILLS, "Fills.end_of_instance", "self.end(owner)", "pass", FILL_TESTS,
    ),
    Mutant(
        "a read that failed is not tried in the next tier",
        FILLS, "Fills._read", "self._read(fill, batch, place, tier)", "batch.failed.add(place)", FILL_TESTS,
    ),
    Mutant(
        "what was read for a request may be evicted before its answer",
        FILLS, "Fills._batch_ended", "self._pin(fill, ready)", "pass", FILL_TESTS,
    ),
    # ---- events.py ----------------------------------------------------------------------------------
    Mutant(
        "an object that two tiers hold is removed with the first of them",
        L2_EVENTS, "L2Events._changed", "elif not elsewhere:", "else:", ("unit/tiering/test_events.py",),
    ),
    Mutant(
        "a resync of L2 names again what has changed meanwhile",
        L2_EVENTS, "L2Events._unnamed", " and ObjectName(namespace, group, key) not in self._published", "",
        ("unit/tiering/test_events.py",),
    ),
    Mutant(
        "a resync of L2 names what two tiers hold twice",
        L2_EVENTS, "L2Events._unnamed", "named = self._holds(walked, namespace, group, keys)", "named = 0",
        ("unit/tiering/test_events.py",),
    ),
    Mutant(
        "a tier that cannot be read any more stays announced",
        L2_EVENTS, "L2Events.step", "self._bus.needs_resync.add(L2Resynced)", "pass", CONSUMERS,
    ),
    # ---- presence.py --------------------------------------------------------------------------------
    Mutant(
        "tiers are searched for what ends with its process",
        PRESENCE, "Presence.attainable", " or durability is Durability.PROCESS", "", FILL_TESTS,
        equivalent="no tier admits objects of that durability: it only saves the search",
    ),
    Mutant(
        "what is computed sooner is read",
        PRESENCE, "Presence.with_l2", "if most > hit_chunks and self.is_slow(", "if False and self.is_slow(",
        FILL_TESTS,
    ),
    Mutant(
        "an engine of unknown speed never reads",
        PRESENCE, "Presence.is_slow", "bool(speed) and ", "", FILL_TESTS,
        equivalent="at a speed of 0 nothing is computed sooner",
    ),
    Mutant(
        "chunks are read before windows and states",
        PRESENCE, "hit_with", 'specs[group].kind == "full"', 'specs[group].kind != "full"', FILL_TESTS,
    ),
    Mutant(
        "what is behind a hole in L2 counts as attainable",
        PRESENCE, "hit_with", "if ready & layout.full != layout.full:", "if False:", FILL_TESTS,
    ),
    # ---- probes.py ----------------------------------------------------------------------------------
    Mutant(
        "a request waits for every probe",
        PROBES, "Probes.begin", "waits = worth.is_waited_for(tokens, fill.instance.expected_speed)", "waits = True",
        PROBE_TESTS,
    ),
    Mutant(
        "probes beside a prefill have no bound",
        PROBES, "Probes.begin", "if waits or worth.beside < MOST_BESIDE:", "if True:", PROBE_TESTS,
    ),
    Mutant(
        "a probe beside a prefill counts as under way for ever",
        PROBES, "Probes._probe", "worth.beside -= 1", "pass", PROBE_TESTS,
    ),
    Mutant(
        "answers from memory count as those of the store",
        PROBES, "Probes._probe", "if chain and asked:", "if chain:", PROBE_TESTS,
    ),
    Mutant(
        "a fast store is not waited for",
        PROBES, "ProbeWorth.is_waited_for", " or min(self.seconds) <= _SHORT_SECONDS", "", PROBE_TESTS,
    ),
    Mutant(
        "what probes found does not count",
        PROBES, "ProbeWorth.is_waited_for", "tokens * max(share, _LEAST_SHARE)", "tokens", PROBE_TESTS,
    ),
    # ---- rates.py -----------------------------------------------------------------------------------
    Mutant(
        "reads that other fills wait for are not counted",
        READ_RATES, "_Tier.expected_seconds", " + self.queued_bytes", "", RATE_TESTS,
    ),
    Mutant(
        "a slow tier is never tried again",
        READ_RATES, "_Tier.rate", " or now - self.last_end > _FORGOTTEN_SECONDS", "", RATE_TESTS,
    ),
    Mutant(
        "idle time counts as time of reading",
        READ_RATES, "_Tier.change", "        if self.open:\n", "        if self.changed:\n", RATE_TESTS,
    ),
    # ---- spill.py -----------------------------------------------------------------------------------
    Mutant(
        "a tier that may only be read counts each store as dropped",
        SPILL, "Spill._offer", "if queue.configured.url.read_only:", "if False:", SPILL_TESTS,
    ),
    Mutant(
        "the queue of a tier has no bound",
        SPILL, "Spill._offer", "if len(queue.names) >= MOST_QUEUED:", "if False:", SPILL_TESTS,
    ),
    Mutant(
        "an object that waits is queued once more",
        SPILL, "Spill._offer", "if name not in queue.names:", "if True:", SPILL_TESTS,
    ),
    Mutant("puts have no bound", SPILL, "Spill._may_put", "queue.puts >= _MOST_PUTS or", "False or", SPILL_TESTS),
    Mutant(
        "an object that left L1 while it waited is written from other pages",
        SPILL, "Spill._put_next", "or not chunk.ready >> item.coverage.group & 1", "", SPILL_TESTS,
    ),
    Mutant(
        "a written object stays pinned",
        SPILL, "Spill._put_next", "self._cache.unpin_chunks([chunk])", "pass", SPILL_TESTS,
    ),
    Mutant(
        "a tier that may only be read is written to",
        SPILL, "Spill._offer", "if not queue.configured.writable and not queue.opens():", "if False:",
        SPILL_TESTS,
        equivalent="_put_next() drops it for the same reason: it only saves the queue",
    ),
    Mutant(
        "what is stored while a tier opens is lost to it",
        SPILL, "Spill._offer", "and not queue.opens()", "", SPILL_TESTS,
    ),
    Mutant(
        "what waits for a tier that opens is dropped in the next turn",
        SPILL, "Spill.step", "queue.opens() or ", "", SPILL_TESTS,
    ),
    Mutant(
        "what is stored while a tier's breaker is open waits for it",
        SPILL, "_Queue.opens", "if not self.has_opened:", "if True:", SPILL_TESTS,
    ),
    Mutant(
        "single uses are written with admit=reused",
        SPILL, "Spill.stored", 'queue.configured.url.admit == "all"', "True", SPILL_TESTS,
    ),
    Mutant(
        "an object that is being written may be evicted",
        SPILL, "Spill._put_next", "self._cache.pin_chunks([chunk])", "self._cache.space.pins += 1; chunk.pins += 0",
        SPILL_TESTS,
    ),
    Mutant(
        "what was cleared while it waited is written",
        SPILL, "Spill._put_next", "chunk.detached or ", "", SPILL_TESTS,
    ),
    Mutant(
        "a child is written although its parent was not",
        SPILL, "Spill._put_next", "item.number <= queue.lost.get(name._replace(key=item.parent), 0)", "False", SPILL_TESTS,
    ),
    Mutant(
        "a dropped object keeps its children out until the queue is empty",
        SPILL, "Spill._put_next", "item.number <= queue.lost.get(name._replace(key=item.parent), 0)",
        "name._replace(key=item.parent) in queue.lost", ("issues/test_a_dropped_parent_kept_its_children_out_of_l2.py",),
    ),
    Mutant("a write limit is ignored", SPILL, "Spill._may_put", "queue.credit > 0", "True", SPILL_TESTS),
    # ---- tiered.py ----------------------------------------------------------------------------------
    Mutant(
        "a prompt that is only looked up grows old in its tiers",
        "kvserver/tiering/tiered.py", "TieredStorage.found", "if hit_chunks:", "if False:", SPILL_TESTS,
    ),
    Mutant(
        "what L2 stored is published after evictions from L1",
        "kvserver/tiering/tiered.py", "TieredStorage.complete", "self._events.publish()", "pass",
        ("unit/tiering/test_events.py",),
    ),
    # ---- tiers.py -----------------------------------------------------------------------------------
    Mutant(
        "an object is in a tier that outlives those who can find it",
        "kvserver/tiering/tiers.py", "ConfiguredTier.admits",
        "Durability.ANYWHERE if self.tier.shared else Durability.MACHINE", "Durability.MACHINE", SPILL_TESTS,
    ),
    Mutant(
        "a tier is searched for what it may not have",
        "kvserver/tiering/tiers.py", "Tiers.present", " if each.admits(durability) else 0", "", FILL_TESTS,
    ),
    Mutant(
        "a shared tier is probed for what it may not have",
        "kvserver/tiering/tiers.py", "Tiers.unknown_to", " and each.admits(durability)", "", FILL_TESTS,
    ),
)  # fmt: skip
