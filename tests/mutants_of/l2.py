"""Mutants of `kvserver/l2`."""

from __future__ import annotations

from support.mutation import Mutant

REMOTE = "unit/l2/test_remote.py"
REMOTE_PARTS, LANE_TESTS = ("unit/l2/test_remote_parts.py",), ("unit/l2/test_lanes.py",)
REMOTE_FAULTS = "unit/l2/test_remote_faults.py"
LANES = "kvserver/l2/remote/lanes.py"
GENERATIONS = "kvserver/l2/remote/generations.py"
IDS = "kvserver/l2/remote/ids.py"
FILE_GENERATIONS = "kvserver/l2/files/generations.py"
OLDER_FILE = "issues/test_an_older_file_of_generations_brought_cleared_kv_back.py"
OLDER_STORE = "issues/test_cleared_kv_returned_with_an_older_store.py"
STORE_WORK = "kvserver/l2/remote/work.py"
REMOTE_TIER = "kvserver/l2/remote/tier.py"
EXISTENCE = "kvserver/l2/remote/existence.py"
MOONCAKE = "kvserver/l2/remote/mooncake.py"
MAKE = "kvserver/l2/remote/make.py"
FILE_TIER = "kvserver/l2/files/tier.py"
FILE_RECORDS = "kvserver/l2/files/records.py"
FILE_PUTS = "kvserver/l2/files/puts.py"
FILE_GETS = "kvserver/l2/files/gets.py"
FILE_LOG = "kvserver/l2/files/log_writer.py"
FILE_OPENING = "kvserver/l2/files/opening.py"
FILE_JOURNAL = "kvserver/l2/files/journal.py"
FILES = "unit/l2/test_files.py"
FILES_CLEAR, FILES_REOPENING = "unit/l2/test_files_clear.py", "unit/l2/test_files_reopening.py"
FILE_FAULTS = "unit/l2/test_files_faults.py"
FILE_FULL = "issues/test_a_full_disk_made_a_file_tier_read_only_for_ever.py"
FILE_COMPACTION = "issues/test_a_compaction_of_the_journal_ran_twice.py"
FILE_TURNS = "issues/test_one_call_looked_at_all_records_of_l2.py"

MOVED = "issues/test_a_put_that_moved_was_cut_off_by_its_time_out.py"
UNREADABLE = "issues/test_an_object_that_cannot_be_read_was_promised_for_ever.py"
COUNTED = ("issues/test_failed_writes_to_l2_were_counted_as_reads.py",)
FAILOVER = "issues/test_after_a_failover_a_tier_never_wrote_again.py"

MUTANTS = (
    # ---- files/folder.py ----------------------------------------------------------------------------
    Mutant(
        "two machines write to one folder on NFS",
        "kvserver/l2/files/folder.py", "Folder._lock", "locked = self._locked(self._lock_fd) or locked", "pass",
        ("issues/test_two_machines_used_one_folder_on_nfs.py",),
    ),
    # ---- files/generations.py -----------------------------------------------------------------------
    Mutant(
        "a clear's generation returns",
        FILE_GENERATIONS, "_new_generation", "last + 1 + secrets.randbits(32 if last else 62)", "5",
        (FILES_CLEAR,),
    ),
    Mutant(
        "generations of the file tier do not grow",
        FILE_GENERATIONS, "FolderGenerations.clear", "_new_generation(self.last)", "_new_generation()",
        (f"{OLDER_FILE}::test_generations_only_grow",),
    ),
    Mutant(
        "an older file of generations counts",
        FILE_GENERATIONS, "read", "max(whole, key", "min(whole, key", (OLDER_FILE,),
    ),
    Mutant(
        "a file of generations has no copy",
        FILE_GENERATIONS, "write", "for name in (NAME, COPY):", "for name in (NAME,):", (OLDER_FILE,),
    ),
    # ---- files/gets.py ------------------------------------------------------------------------------
    Mutant(
        "a get that began before a clear is a hit",
        FILE_GETS, "FileGets.ended",
        "if get.void or get.generation != self._records.generation_of(get.name) or closed:", "if False:",
        (FILES_CLEAR,),
    ),
    Mutant(
        "a get with another coverage reads the object",
        FILE_GETS, "FileGets.begin", " or found.meaning != meaning_of(memory)", "", (f"{FILES}::TestObjects",),
    ),
    Mutant(
        "a corrupt object is promised again",
        FILE_GETS, "FileGets._found_corrupt", "self._records.remove(get.name)", "pass",
        (f"{FILE_FAULTS}::TestRecords",),
    ),
    Mutant(
        "a disk of corrupt objects is used for ever",
        FILE_GETS, "FileGets._found_corrupt", "self._corrupt_in_a_row >= MOST_CORRUPT", "False",
        (f"{FILE_FAULTS}::TestRecords",),
    ),
    Mutant(
        "a loss of power closes the tier",
        FILE_GETS, "FileGets._found_corrupt", "if get.recovered:", "if False:", (f"{FILE_FAULTS}::TestFiles",),
    ),
    # ---- files/journal.py ---------------------------------------------------------------------------
    Mutant(
        "entries are appended behind a bad one",
        FILE_JOURNAL, "replay", "if writable and os.fstat(fd).st_size != end:", "if False:",
        (f"{FILE_FAULTS}::TestFiles",),
    ),
    Mutant(
        "a journal of another data file counts",
        FILE_JOURNAL, "_read_head", "intact and of_data == data_id", "intact", (f"{FILE_FAULTS}::TestFiles",),
    ),
    Mutant(
        "a journal that is replaced leaves its space to others",
        FILE_JOURNAL, "Journal.switch", "self._disk.exchange(_NEW, NAME,", "self._disk.replace(_NEW, NAME,", (FILE_FULL,),
    ),
    Mutant(
        "a compaction is synced at its end only",
        FILE_JOURNAL, "Journal.append_next", "if size - self._synced >= _SYNC_BYTES:", "if False:", (FILE_COMPACTION,),
    ),
    # ---- files/log_writer.py ------------------------------------------------------------------------
    Mutant(
        "pages whose drop could not be written are used again",
        FILE_LOG, "LogWriter._write", "self._freed[:0] = freed", "self._free.append(freed); self._free_some()",
        (f"{FILE_FAULTS}::TestJournal",),
    ),
    Mutant(
        "a second compaction begins before the first one has ended",
        FILE_LOG, "LogWriter.step", "(self._compacting or self.failure)", "self.failure", (FILE_COMPACTION,),
    ),
    Mutant(
        "a journal that was replaced is compacted again",
        FILE_LOG, "LogWriter._compact", "self.bytes = self._next_bytes", "pass", (FILE_COMPACTION,),
    ),
    Mutant(
        "a journal that had no space is never written again",
        FILE_LOG, "LogWriter._fail", "1 if passes else 0", "0", (FILE_FULL,),
    ),
    Mutant(
        "a journal that the disk refuses is written again",
        FILE_LOG, "LogWriter._fail", "1 if passes else 0", "1", (FILE_FULL,),
    ),
    Mutant(
        "entries are appended behind one that failed",
        FILE_LOG, "LogWriter._write", "full or self.failure or ", "full or ", (FILE_FULL,),
    ),
    Mutant(
        "pages of a clear are all freed in one turn",
        FILE_LOG, "LogWriter._free_some", "part = bytes(batch[-_PER_FREE:])\n        del batch[-_PER_FREE:]",
        "part = bytes(batch)\n        del batch[:]", (f"{FILE_TURNS}::test_a_clear_frees_its_pages_in_slices",),
    ),
    # ---- files/opening.py ---------------------------------------------------------------------------
    Mutant(
        "the journal's records of before a clear are found after a restart",
        FILE_OPENING, "open_tier", "    _drop_other_generations(table, known)\n", "", (FILES_CLEAR,),
    ),
    Mutant(
        "records dropped while opening return",
        FILE_OPENING, "open_tier", "written.append(table.drain_log())", "table.drain_log()",
        (f"{FILES_REOPENING}::TestReopening",),
    ),
    # ---- files/puts.py ------------------------------------------------------------------------------
    Mutant(
        "a put that began before a clear is found after it",
        FILE_PUTS, "FilePuts._is_current", "put.generation == self._records.generation_of(put.name)", "True",
        (FILES_CLEAR,),
    ),
    Mutant(
        "a put that was dropped meanwhile is found",
        FILE_PUTS, "FilePuts._ended", "not put.void", "True", (f"{FILES}::TestObjects",),
    ),
    Mutant(
        "a record that is written before its parent has none",
        FILE_PUTS, "FilePuts.ended", "(written and put.name._replace(key=put.parent) in unended)", "False",
        ("issues/test_a_prompt_stored_in_several_messages_left_l2_from_its_start.py",),
    ),
    Mutant(
        "each put waits for a journal's write of its own",
        FILE_PUTS, "FilePuts.start", "sum(each.pages for each in self._waiting)", "put.pages",
        (f"{FILES}::TestEviction",),
    ),
    # ---- files/records.py ---------------------------------------------------------------------------
    Mutant(
        "records may be more than the journal has space for",
        FILE_RECORDS, "FileRecords.allocate", "None if self._journal_is_full() else ", "", (FILE_FULL,),
    ),
    Mutant(
        "room for a large object is made in one turn",
        FILE_RECORDS, "FileRecords.make_room", "range(_MOST_EVICTIONS)", "range(1 << 30)",
        (f"{FILE_TURNS}::test_room_for_a_large_object_is_made_in_slices",),
    ),
    Mutant(
        "a file tier does not report what it evicts",
        FILE_RECORDS, "FileRecords.make_room", "self._changed(False, ObjectName(*evicted[:3]))", "pass",
        ("daemon/test_l2_events.py::test_what_the_tier_evicts_is_removed",),
    ),
    Mutant(
        "pages are used again before their drop is in the journal",
        FILE_RECORDS, "FileRecords._release", "self._writer.free_later(extents, page_count(extents))",
        "self.pool.free_pages(extents)", (f"{FILE_FAULTS}::TestJournal",),
    ),
    Mutant(
        "pages are used again while a get reads them",
        FILE_RECORDS, "FileRecords._release", "if extents in self._reads:", "if False:", (f"{FILES}::TestEviction",),
    ),
    Mutant(
        "a failed write to a file counts as a failed read",
        FILE_PUTS, "FilePuts._ended", "of_get=False", "of_get=True", COUNTED,
    ),
    # ---- files/tier.py ------------------------------------------------------------------------------
    Mutant(
        "pages of a clear that is not durable are used again",
        FILE_TIER, "FileTier.drain", "parts.clears.durable and ", "", (f"{FILE_FAULTS}::TestJournal",),
    ),
    Mutant(
        "a journal that hangs stops reads",
        FILE_TIER, "FileTier.tick", "self._stalled_journal = self._stall(", "self._stalled = self._stall(",
        (FILE_COMPACTION,),
    ),
    # ---- remote/existence.py ------------------------------------------------------------------------
    Mutant(
        "what a store had once is promised for ever",
        EXISTENCE, "Existence.bitmap", "> now_ns", "> 0", REMOTE_PARTS,
    ),
    # ---- remote/generations.py ----------------------------------------------------------------------
    Mutant(
        "a lost id of a scope is replaced by one that was used before",
        GENERATIONS, "Generations._ids_of", "value or self._created(client, name, least[scope])", "value or bytes(16)",
        ("unit/l2/test_valkey.py::test_what_was_cleared_stays_so_when_the_server_loses_the_ids",),
    ),
    Mutant(
        "a clear that failed is forgotten",
        GENERATIONS, "Generations.write", "(value,) = client.read_ids([name])",
        "self._unwritten.pop(scope); (value,) = client.read_ids([name])",
        (f"{REMOTE_FAULTS}::test_a_clear_whose_write_fails_keeps_the_scope_closed",),
    ),
    Mutant(
        "an id that was replaced is believed",
        GENERATIONS, "Generations._ids_of", "if ids[scope] < self._highest.least(scope)", "if False", (OLDER_STORE,),
    ),
    Mutant(
        "a clear's number is not above those that were seen",
        GENERATIONS, "Generations.write", "max(id_of(value), self._highest.least(scope))", "id_of(value)",
        (OLDER_STORE,),
    ),
    Mutant(
        "a clear's number is not above the one of the store",
        GENERATIONS, "Generations.write", "max(id_of(value), self._highest.least(scope))",
        "self._highest.least(scope)",
        (f"{OLDER_STORE}::test_a_clear_by_a_daemon_that_just_started_is_above_the_stores_id",),
    ),
    Mutant(
        "ids that this daemon wrote are not remembered",
        GENERATIONS, "Generations._written", "self._highest.raise_to({scope: id})", "pass", (OLDER_STORE,),
    ),
    Mutant(
        "ids that another daemon wrote are not remembered",
        GENERATIONS, "Generations._ids_of", "self._highest.raise_to(found)", "pass",
        (f"{OLDER_STORE}::test_ids_that_another_daemon_wrote_are_remembered",),
    ),
    # ---- remote/ids.py ------------------------------------------------------------------------------
    Mutant(
        "the highest ids end with the process",
        IDS, "HighestIds.raise_to", "if self._folder:", "if False:", (OLDER_STORE,),
    ),
    Mutant(
        "an id that was dropped is believed again",
        IDS, "HighestIds.raise_to", "max(kept.floor, _number(kept.ids.pop(scope)))", "_number(kept.ids.pop(scope)) * 0",
        (OLDER_STORE,),
    ),
    # ---- remote/lanes.py ----------------------------------------------------------------------------
    Mutant(
        "a job that is copying to or from L1 ends before its copy",
        LANES, "Lanes._end_outside", "if job.phase is JobPhase.INSIDE:", "if False:", LANE_TESTS,
    ),
    Mutant(
        "a job that was ended copies to L1",
        LANES, "Lanes._inside", "if job.phase is JobPhase.ENDED:", "if False:", LANE_TESTS,
    ),
    Mutant(
        "a tier is closed while L1 is being copied",
        LANES, "Lanes.close", "self._left.wait_for(lambda: not self._open.jobs)", "pass", LANE_TESTS,
    ),
    Mutant("a get waits for puts", LANES, "Lanes._next", "if all_kinds else", "if True else", LANE_TESTS),
    Mutant(
        "jobs that waited in the queue open the breaker",
        LANES, "Lanes._watch_clock", "job.began_ns > 0 or self._all_hang()", "True", LANE_TESTS,
    ),
    Mutant(
        "clients that hang for good never open the breaker",
        LANES, "Lanes._watch_clock", "job.began_ns > 0 or self._all_hang()", "job.began_ns > 0", LANE_TESTS,
    ),
    Mutant(
        "small jobs of other kinds share a command",
        LANES, "_take_bundle", "queue[0].bundle != jobs[0].bundle", "False", LANE_TESTS,
    ),
    Mutant(
        "a command takes all that is queued, however large",
        LANES, "_take_bundle", "while queue and size < most_bytes:", "while queue:", LANE_TESTS,
    ),
    Mutant(
        "commands of Mooncake are as small as those of other kinds",
        MAKE, "make_remote_tier", "_BUNDLE_BYTES[url.kind]", "BUNDLE_BYTES",
        ("unit/l2/test_mooncake.py::test_objects_of_two_mebibytes_share_a_command",),
    ),
    # ---- remote/mooncake.py -------------------------------------------------------------------------
    Mutant(
        "a buffer that grew is not the one that Mooncake's client writes to",
        MOONCAKE, "_MooncakeClient._ask", "self._mapped != self._buffer.growths", "not self._mapped",
        ("unit/l2/test_mooncake.py::test_a_buffer_that_grew_is_the_one_that_is_written_to",),
    ),
    Mutant(
        "a process of Mooncake's client that hangs is used on",
        MOONCAKE, "_MooncakeClient.close", "self._process.kill()", "pass",
        ("unit/l2/test_mooncake.py::test_a_process_that_hangs_ends_with_its_request",),
    ),
    # ---- remote/mooncake_child.py -------------------------------------------------------------------
    Mutant(
        "a clear leaves the id that Mooncake has",
        "kvserver/l2/remote/mooncake_child.py", "LibraryStore.write_id", "batch_upsert_from", "batch_put_from",
        (f"{REMOTE}::test_a_clear_survives_a_restart",),
    ),
    # ---- remote/names.py ----------------------------------------------------------------------------
    Mutant(
        "groups of one chunk have one name",
        "kvserver/l2/remote/names.py", "Names.of", "/{name.group}/", "/", REMOTE_PARTS,
    ),
    # ---- remote/tier.py -----------------------------------------------------------------------------
    Mutant(
        "a failed write to a store counts as a failed read",
        REMOTE_TIER, "_count", "failed, of_get)", "failed, True)", COUNTED,
    ),
    Mutant(
        "each object of a command that failed counts for the breaker",
        REMOTE_TIER, "RemoteTier._apply", "not 0 < job.command == self._failed_command", "True", LANE_TESTS,
    ),
    Mutant(
        "what another daemon cleared is still promised",
        REMOTE_TIER, "RemoteTier.drain", "self._existence.forget_namespaces(namespace)", "pass",
        (f"{REMOTE_FAULTS}::test_a_clear_by_one_daemon_is_seen_by_the_other_in_time",),
    ),
    Mutant(
        "what was cleared is still promised",
        REMOTE_TIER, "RemoteTier.clear", "self._existence.forget_namespaces(scope)", "pass",
        (f"{REMOTE}::test_what_was_cleared_is_never_served_again",),
    ),
    Mutant(
        "a get that ended just before a clear is a hit",
        REMOTE_TIER, "RemoteTier._apply", "if ticket.void:", "if False:",
        (f"{REMOTE}::test_a_put_and_a_get_that_have_ended_when_a_clear_begins_count_no_more",),
    ),
    Mutant(
        "objects are promised while the breaker is open",
        REMOTE_TIER, "RemoteTier.holds", "if self._refusal():", "if False:",
        (f"{REMOTE_FAULTS}::test_the_breaker_opens_for_a_store_that_hangs_and_closes_when_it_goes_on",),
    ),
    Mutant(
        "a store of corrupt objects is used for ever",
        REMOTE_TIER, "RemoteTier._watch_corruption", "self._corrupt_in_a_row == _CORRUPT_TO_CLOSE", "False",
        (f"{REMOTE_FAULTS}::test_eight_corrupt_objects_in_a_row_close_the_tier",),
    ),
    # ---- remote/s3.py -------------------------------------------------------------------------------
    Mutant(
        "an id that is written anew replaces that of a clear",
        "kvserver/l2/remote/s3.py", "_S3Client._renew", 'mode={"e_tag": tag}, ', "",
        ("unit/l2/test_s3.py::test_a_renewal_never_replaces_the_id_of_a_clear",),
    ),
    # ---- remote/valkey.py ---------------------------------------------------------------------------
    Mutant(
        "two daemons that start together have other ids of one scope",
        "kvserver/l2/remote/valkey.py", "_ValkeyClient.create_id", "conditional_set=condition, ", "",
        (f"{REMOTE_FAULTS}::test_the_first_id_of_a_scope_is_the_one_that_all_use",),
    ),
    # ---- remote/work.py -----------------------------------------------------------------------------
    Mutant(
        "a record whose checks failed is a hit",
        STORE_WORK, "_read", "if match is RecordMatch.CORRUPT:", "if False:",
        (f"{REMOTE_FAULTS}::test_wrong_bytes_under_a_right_name_are_found",),
    ),
    Mutant(
        "a record of another coverage or generation is a hit",
        STORE_WORK, "_read", "if match is RecordMatch.OTHER:", "if False:",
        (f"{REMOTE_FAULTS}::test_an_earlier_generations_bytes_under_a_right_name_are_a_miss",),
    ),
    Mutant(
        "a store that refuses to remove objects is written to no more",
        STORE_WORK, "StoreWork._remove", "return False\n        return True", "raise\n        return True",
        ("issues/test_one_ill_object_failed_its_whole_command.py::test_a_store_that_refuses_deletes_is_not_cut_off_by_drops",),
    ),
    Mutant(
        "an object that another daemon cleared while it was read is a hit",
        STORE_WORK, "StoreWork.get", "changed = self._generations.of_reader(client, namespace) != generation",
        "changed = False",
        (f"{REMOTE_FAULTS}::test_what_another_daemon_cleared_while_it_was_under_way_counts_no_more",),
    ),
    Mutant(
        "an object that another daemon cleared while it was written is remembered",
        STORE_WORK, "StoreWork.put", "changed = self._generations.of(client, namespace) != generation",
        "changed = False",
        (f"{REMOTE_FAULTS}::test_what_another_daemon_cleared_while_it_was_under_way_counts_no_more",),
    ),
    # ---- failures of objects, of reads, of writes ---------------------------------------------------
    Mutant(
        "an object that cannot be read is promised again and again",
        FILE_RECORDS, "FileRecords.holds",
        "return self.failures.shown(found, namespace, group, keys, time.monotonic_ns())", "return found", (UNREADABLE,),
    ),
    Mutant(
        "an object on a bad sector is not written anew",
        FILE_PUTS, "FilePuts.begin", "if found.extents in records.unreadable:", "if False:", (UNREADABLE,),
    ),
    Mutant(
        "a tier that hangs makes its objects unreadable",
        "kvserver/l2/failures.py", "ObjectFailures.blame_tier", "self._failed[name][0], 0", "self._failed[name]", (UNREADABLE,),
    ),
    Mutant(
        "a refused put closes a tier to reads",
        REMOTE_TIER, "RemoteTier._fail", "if not writes or not result.answered:", "if True:", (FAILOVER,),
    ),
    Mutant(
        "a store that takes no writes is ready",
        REMOTE_TIER, "RemoteTier._judge_ping", "if result.refused or not result.answered:", "if not result.answered:", (FAILOVER,),
    ),
    Mutant(
        "a connection to what was the primary stays",
        LANES, "Lanes._serve", "if lane.connections != self._connections:", "if False:", (FAILOVER,),
    ),
    Mutant(
        "a tier that is configured read-only writes",
        REMOTE_TIER, "RemoteTier.__init__", "reading(connect) if url.read_only else connect", "connect", (FAILOVER,),
    ),
    Mutant(
        "a folder that was removed is trusted for ever",
        FILE_TIER, "FileTier.state", "if self._stalled or self._lost:", "if self._stalled:",
        ("issues/test_a_tier_whose_folder_was_removed_stayed_ready.py",),
    ),
    # ---- deadlines and sizes ------------------------------------------------------------------------
    Mutant(
        "a put that moves is cut off by what it waited before",
        LANES, "Lanes._give_time", "if job.deadline_ns < deadline_ns:", "if False:", (MOVED,),
    ),
    Mutant(
        "the time-outs of a client do not grow with its requests",
        LANES, "Lane.client_for", "if size > self.buffer.covers:", "if False:", (MOVED,),
    ),
    Mutant(
        "puts of what the store has reset the count of refused ones",
        REMOTE_TIER, "RemoteTier._apply", "if result.bytes or ticket.kind in _PROOFS:", "if True:", (FAILOVER,),
    ),
    Mutant(
        "a reader that saw an older id never believes the store again",
        GENERATIONS, "Generations.write", "if replaced and id_of(value) > self._highest.least(scope):", "if False:", (OLDER_STORE,),
    ),
    Mutant(
        "a disk that hangs keeps the lanes of a shared tier",
        IDS, "HighestIds._wait_for_disk", "if not self._late and not", "if not", (OLDER_STORE,),
    ),
)  # fmt: skip
