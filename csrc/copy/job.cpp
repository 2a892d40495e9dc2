// job.cpp: what every device does alike: the checks of a job, and the state word at its two ends.
#include "copy/job.h"

#include <stdexcept>
#include <utility>

#include "copy/threads.h"

namespace kvserver {

namespace {

// Sets extent_ends.
void check_extents(CopyJob& job, const L1& l1) {
    uint64_t pages = 0;
    job.extent_ends.clear();
    for (const Extent& extent : job.extents) {
        if (extent.count == 0 ||
            uint64_t{extent.first} + extent.count > l1.region->size() / l1.page_bytes)
            throw std::invalid_argument(std::to_string(extent.count) + " pages from page " +
                                        std::to_string(extent.first) + " on do not lie in L1");
        job.extent_ends.push_back(pages += extent.count);
    }
    if (job.pages_per_slot == 0 || pages % job.pages_per_slot != 0)
        throw std::invalid_argument("the extents of a copy job make no whole slots");
}

// REQUIRES: check_extents() passed.
void check_slots(const CopyJob& job, uint64_t page_bytes) {
    const uint64_t pages = job.extent_ends.empty() ? 0 : job.extent_ends.back();
    const uint64_t slots = pages / job.pages_per_slot;
    if (job.skip + job.positions() > slots * job.blocks_per_slot)
        throw std::invalid_argument("a copy job names more blocks than its slots hold");
    const auto slot_bytes =
        static_cast<unsigned __int128>(job.blocks_per_slot) * job.planes->block_bytes();
    if (slot_bytes > static_cast<unsigned __int128>(job.pages_per_slot) * page_bytes)
        throw std::invalid_argument("a slot has too few pages for its blocks");
}

// RUNNING or CANCELLING becomes the state by which the worker's blocks are its own again.
// True if the worker had cancelled it.
bool give_up_word(const CopyJob& job) {
    if (job.word == nullptr) return false;
    auto move = [&](State from, State to) { return move_word(*job.word, job.sequence, from, to); };
    if (move(State::kCancelling, State::kCancelled)) return true;
    if (move(State::kRunning, State::kFailed)) return false;
    // A load's cancel may have come between the two attempts; it must be answered too.
    move(State::kCancelling, State::kCancelled);
    return true;
}

// Whatever one of them does; what went wrong is added to `what`.
void unmap_all(const MapJob& job, std::string& what) {
    for (auto& mapping : job.mappings) {
        try {
            mapping->unmap();
        } catch (const std::exception& error) {
            what += (what.empty() ? "" : "; ") + std::string(error.what());
        }
    }
}

}  // namespace

uint64_t CopyJob::bytes_at(uint64_t position) const {
    const uint64_t groups = planes->groups();
    uint64_t sum = 0;
    for (uint64_t group = 0; group < groups; ++group)
        if (blocks[position * groups + group] != kNoBlock) sum += planes->group_bytes(group);
    return sum;
}

void check_l1(const L1& l1) {
    if (l1.page_bytes == 0 || l1.page_bytes > l1.region->size())
        throw std::invalid_argument("a page needs at least one byte, and L1 at least one page");
}

void check_job(CopyJob& job, const L1& l1) {
    if (job.blocks.empty() || job.blocks_per_slot == 0)
        throw std::invalid_argument("a copy job needs blocks and a slot size");
    check_extents(job, l1);
    check_slots(job, l1.page_bytes);
}

bool cancelled(const CopyJob& job) {
    if (job.word == nullptr) return false;
    return job.word->load(std::memory_order_acquire) != make_word(job.sequence, State::kRunning);
}

std::optional<Part> next_part(CopyJob& job, uint64_t copied, uint64_t least_bytes) {
    const uint64_t slots = copied / job.blocks_per_slot;
    const uint64_t added = (slots - job.reported_slots) * job.blocks_per_slot;
    if (added == 0 || added * job.planes->block_bytes() < least_bytes) return std::nullopt;
    const bool in_time = job.deadline_nanos == 0 || monotonic_nanos() <= job.deadline_nanos;
    if (job.stop || job.memory_lost || cancelled(job) || !in_time || !job.planes->intact())
        return std::nullopt;
    job.reported_slots = slots;
    return Part{job.ticket, slots};
}

Completion refuse_job(const CopyJob& job, Outcome outcome, std::string what) {
    if (job.word != nullptr) move_word(*job.word, job.sequence, State::kPending, State::kFailed);
    return {job.ticket, outcome, 0, 0, std::move(what)};
}

std::optional<Completion> begin_job(CopyJob& job) {
    job.started_nanos = monotonic_nanos();
    if (job.deadline_nanos != 0 && job.started_nanos > job.deadline_nanos)
        return refuse_job(job, Outcome::kLate,
                          "its deadline had passed before the copy could start");
    if (job.stop)
        return refuse_job(job, Outcome::kCancelled, "the server ended it before the copy started");
    if (job.word != nullptr &&
        !move_word(*job.word, job.sequence, State::kPending, State::kRunning))
        return refuse_job(job, Outcome::kCancelled,
                          "the worker cancelled it before the copy started");
    return std::nullopt;
}

Completion end_job(const CopyJob& job, Outcome fault, std::string what) {
    Completion end{job.ticket, fault, job.bytes, monotonic_nanos() - job.started_nanos,
                   std::move(what)};
    if (fault != Outcome::kDeviceLost && (job.memory_lost || !job.planes->intact())) {
        end.outcome = Outcome::kMemoryLost;
        end.what = "the engine's memory was truncated while it was copied";
    }
    const bool whole = end.outcome == Outcome::kDone && !job.stop;
    if (whole &&
        (job.word == nullptr || move_word(*job.word, job.sequence, State::kRunning, State::kDone)))
        return end;
    const bool by_worker = give_up_word(job);
    if (end.outcome == Outcome::kDone) {
        end.outcome = Outcome::kCancelled;
        end.what = by_worker ? "the worker cancelled it" : "the server ended it";
    }
    return end;
}

Completion run_map_job(const MapJob& job) {
    Completion end{job.ticket, Outcome::kDone, 0, monotonic_nanos(), ""};
    try {
        if (!job.unmap)
            for (auto& mapping : job.mappings) mapping->map();
    } catch (const std::exception& error) {
        end.what = error.what();
    }
    if (job.unmap || !end.what.empty()) unmap_all(job, end.what);
    if (!end.what.empty()) end.outcome = Outcome::kFailed;
    for (auto& mapping : job.mappings) end.bytes += mapping->size();
    end.nanos = monotonic_nanos() - end.nanos;
    return end;
}

Completion refuse_map_job(const MapJob& job, std::string what) {
    unmap_all(job, what);
    return {job.ticket, Outcome::kDeviceLost, 0, 0, std::move(what)};
}

}  // namespace kvserver
