// job.h: one ticket's copy or mappings: its checks, and the state word at its two ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "copy/block_ids.h"
#include "copy/completion.h"
#include "copy/host_region.h"
#include "copy/state_word.h"

namespace kvserver {

struct Extent {
    uint32_t first, count;  // pages
};

// One ticket's copy. `blocks` names one block per group for each position; the i-th of these belong
// to position skip + i of the slots laid end to end, `blocks_per_slot` positions each: a load that
// leaves the first n blocks alone sets skip = n. REQUIRES: word outlives it.
struct CopyJob {
    // All blocks of `ids`, or those of these chunks, each of which has a slot.
    CopyJob(const BlockIds& ids, uint32_t blocks_in_slot,
            const std::vector<uint64_t>* chunks = nullptr)
        : direction(ids.direction()),
          planes(ids.planes()),
          blocks(chunks == nullptr ? ids.all() : ids.of_chunks(*chunks, blocks_in_slot)),
          blocks_per_slot(blocks_in_slot) {}

    uint64_t ticket = 0;
    const Direction direction;
    const std::shared_ptr<PlaneTable> planes;
    const std::vector<uint32_t> blocks;
    const uint32_t blocks_per_slot;
    std::vector<Extent> extents;        // pages_per_slot for each slot, slots in order
    std::vector<uint64_t> extent_ends;  // pages up to the end of each extent; set by check_job()
    uint32_t pages_per_slot = 0;
    uint32_t skip = 0;
    std::shared_ptr<WordMapping> word_memory;  // keeps `word` mapped
    Word* word = nullptr;
    uint64_t sequence = 0;
    uint64_t deadline_nanos = 0;  // CLOCK_MONOTONIC; not started after it; 0 = none

    // Progress, written by the device only.
    std::atomic<uint64_t> next{0};       // first position that no thread has begun
    std::atomic<uint64_t> processed{0};  // positions copied or given up
    std::atomic<uint64_t> bytes{0};
    std::atomic<bool> stop{false};  // set by cancel() or by a failing thread
    std::atomic<bool> memory_lost{false};
    uint64_t started_nanos = 0;
    std::set<uint64_t> begun;     // first positions of batches in progress
    uint64_t reported_slots = 0;  // by the last part

    uint64_t positions() const { return blocks.size() / planes->groups(); }
    uint64_t bytes_at(uint64_t position) const;  // what is copied there
};

// One ticket's mappings: all are mapped, or all unmapped.
struct MapJob {
    uint64_t ticket;
    bool unmap;
    std::vector<std::shared_ptr<Mapping>> mappings;
};

// Throws std::invalid_argument, naming the numbers, unless the extents lie in L1 and are whole
// slots with room for the blocks. Sets extent_ends.
void check_job(CopyJob& job, const L1& l1);
bool cancelled(const CopyJob& job);  // by the worker
// The slots of a store that began, up to the last one whose positions are all among the first
// `copied`; none if fewer than `least_bytes` of them are new, or if they do not count: see
// device.h.
std::optional<Part> next_part(CopyJob& job, uint64_t copied, uint64_t least_bytes);
// Claim the operation: PENDING -> RUNNING. If it may not begin, how it ended; not a byte moves
// then.
std::optional<Completion> begin_job(CopyJob& job);
// End a job that did not begin. Its word becomes FAILED unless the worker cancelled it.
Completion refuse_job(const CopyJob& job, Outcome outcome, std::string what);
// End a job that began, once, after its last byte. `fault` is what broke it, if anything did.
// Moving the word to DONE is what makes a copy count: after a worker's cancel that fails.
Completion end_job(const CopyJob& job, Outcome fault = Outcome::kDone, std::string what = "");
Completion run_map_job(const MapJob& job);
// End a map that was not run because the device is lost: its descriptors are closed.
Completion refuse_map_job(const MapJob& job, std::string what);

}  // namespace kvserver
