"""Mutants of `kvserver/kv_events`."""

from __future__ import annotations

from support.mutation import Mutant

HUB = "kvserver/kv_events/hub.py"
FEED = "kvserver/kv_events/feed.py"
STREAM = "kvserver/kv_events/stream.py"
SOCKETS = "kvserver/kv_events/stream_sockets.py"
CONSUMERS = ("model/test_kv_events.py",)

MUTANTS = (
    # ---- described.py -------------------------------------------------------------------------------
    Mutant(
        "an object in L1 and L2 counts twice for the memory of descriptions",
        "kvserver/kv_events/described.py", "Described.add", "self.bytes += 0 if shared else size", "self.bytes += size",
        ("unit/kv_events/test_kv_hub.py",),
    ),
    Mutant(
        "descriptions of L2 leave no memory for those of L1",
        "kvserver/kv_events/described.py", "Described.trim", "self._l2_bytes <= self._limit // 2", "True",
        ("unit/kv_events/test_kv_hub.py",),
    ),
    # ---- descriptions.py ----------------------------------------------------------------------------
    Mutant(
        "KV events of a window name all blocks of its chunks",
        "kvserver/kv_events/descriptions.py", "of_objects", "if not objects.members:", "if True:",
        ("unit/kv_events/test_kv_groups.py",),
    ),
    # ---- feed.py ------------------------------------------------------------------------------------
    Mutant(
        "an engine announces an object in KV cache groups that it has no blocks of",
        FEED, "_FeedCursor.blocks_of", "chunk.description.members or ", "",
        ("adapters/test_kv_events_groups.py::test_what_is_stored_dropped_and_cleared_is_named_by_group",),
    ),
    Mutant(
        "a follower receives again what its snapshot had",
        FEED, "_FeedCursor.start", "self._events[0].number <= number", "False",
        ("unit/kv_events/test_kv_feed.py::test_an_event_that_the_snapshot_has_is_counted_once",),
    ),
    Mutant(
        "what happened since the snapshot is lost with its end",
        FEED, "_FeedCursor._pop", "self._whole = True", "self._whole = True; self.ready.clear()",
        ("unit/kv_events/test_kv_feed.py::test_what_happens_after_the_snapshot_is_in_the_same_reply_behind_it",),
    ),
    Mutant(
        "a reply that was lost does not come again",
        FEED, "_FeedCursor.advance", "if at == self._end:", "if True:",
        ("unit/kv_events/test_kv_feed.py::test_a_lost_reply_comes_again",),
    ),
    Mutant(
        "an event whose preparation paused waits for another event",
        FEED, "_FeedCursor.wants_work", "self._unfinished and", "(not self.started or bool(self._events)) and",
        ("unit/kv_events/test_kv_feed.py::test_an_event_whose_preparation_paused_is_delivered_without_another_event",),
    ),
    # ---- hub.py -------------------------------------------------------------------------------------
    Mutant(
        "a chunk that is described again is published again",
        HUB, "Hub._describe", "if key not in described:", "if True:", ("unit/kv_events/test_kv_hub.py",),
    ),
    Mutant(
        "a resync names a chunk twice to the index",
        HUB, "Hub._confirm_l1", " if key not in confirmed]", "]", CONSUMERS,
    ),
    Mutant(
        "a chunk that is stored again during a resync is unknown to the index",
        HUB, "Hub._evict", "self._confirmed.get(tier, {})", "dict[bytes, dict[int, set[bytes]]]()",
        ("unit/tiering/test_resync.py",),
    ),
    Mutant(
        "a resync that begins again believes the one before",
        HUB, "Hub._resync", "self._confirmed[tier] = {}", "self._confirmed.setdefault(tier, {})", CONSUMERS,
    ),
    Mutant(
        "what L2 has described during a resync is removed at its end",
        HUB, "Hub._add", "if tier is Tier.L2 and tier in self._confirmed:", "if False:",
        ("unit/kv_events/test_kv_hub.py",),
    ),
    # ---- ledger.py ----------------------------------------------------------------------------------
    Mutant(
        "a block that two chunks share is removed with the first of them",
        "kvserver/kv_events/ledger.py", "Ledger.removed", "return _runs(flags)",
        "return _runs(bytes([1]) * len(flags))", CONSUMERS,
    ),
    # ---- stream.py ----------------------------------------------------------------------------------
    Mutant(
        "a stream begins without a clear of what an earlier daemon published",
        STREAM, "Stream._view", "self._add(view, [self._writer.cleared], 0)\n            if",
        "self._add(view, [], 0)\n            if", CONSUMERS,
    ),
    Mutant(
        "routers that read group 0 alone read a window",
        STREAM, "Stream.reader_connected", "else full_attention_first(groups)", "else tuple(enumerate(groups))",
        ("issues/test_routers_took_a_window_for_full_attention.py",),
    ),
    # ---- stream_sockets.py --------------------------------------------------------------------------
    Mutant(
        "the first batches are published before a subscriber that waits has connected",
        SOCKETS, "StreamSockets.connect_seconds", "if self.subscriptions else MOST_CONNECT_SECONDS", "* 0",
        ("issues/test_a_subscriber_that_waited_for_the_daemon_missed_its_first_batches.py",),
    ),
    # ---- descriptors --------------------------------------------------------------------------------
    Mutant(
        "readers of KV events take the daemon's last descriptors",
        SOCKETS, "StreamSockets.open", "self._gates.append(ListenGate(made[-1]))", "pass",
        ("issues/test_a_daemon_without_descriptors_was_aborted.py::test_200_readers_of_kv_events_wait_while_few_descriptors_are_left",),
    ),
)  # fmt: skip
