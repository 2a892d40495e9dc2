// gpu_lane_slots.cpp: slots of a lane, their staging memory, and more of them.
#include <mutex>
#include <utility>
#include <vector>

#include "copy/threads.h"
#include "gpu/gpu_lane.h"

namespace kvserver {

// Nothing grows before it is done, so slots_ stays as it is.
void Lane::prepare() {
    if (prepared_) return;
    gpu_->enter();
    for (Slot& slot : slots_) make(slot);
    prepared_ = true;
}

// For every slot or for none. Without memory for it all goes by DMA. Nothing grows before it is
// done.
void Lane::prepare_staging() {
    if (no_staging_) return;
    std::vector<std::byte*> made;
    try {
        while (made.size() < slots_.size()) made.push_back(gpu_->allocate(options_.batch_bytes));
    } catch (const GpuError& error) {
        if (gpu_->is_lost()) throw;
        for (std::byte* memory : made) gpu_->free(memory);
        if (!error.out_of_memory) throw;
        no_staging_ = true;
        return;
    }
    for (size_t i = 0; i < made.size(); ++i) slots_[i].staging = made[i];
    counts_.staging_bytes = options_.batch_bytes * kSlots;
}

void Lane::tear_down() {
    if (gpu_->is_lost() || !prepared_) return;
    try {
        for (Slot& slot : slots_) free(slot);
        for (Gpu::Event event : events_) gpu_->free_event(event);
    } catch (const GpuError&) {  // the end of the process frees the rest
    }
}

// What an earlier try left missing.
void Lane::make(Slot& slot) {
    if (slot.stream == nullptr) slot.stream = gpu_->make_stream();
    if (slot.done == nullptr) slot.done = gpu_->make_event();
    if (slot.table == nullptr) slot.table = gpu_->allocate_pinned(kTableBytes);
    if (slot.gpu_table == nullptr) slot.gpu_table = gpu_->allocate(kTableBytes);
}

void Lane::free(Slot& slot) {
    if (auto stream = std::exchange(slot.stream, nullptr)) gpu_->free_stream(stream);
    if (auto event = std::exchange(slot.done, nullptr)) gpu_->free_event(event);
    if (auto* memory = std::exchange(slot.table, nullptr)) gpu_->free_pinned(memory);
    if (auto* memory = std::exchange(slot.gpu_table, nullptr)) gpu_->free(memory);
    if (auto* memory = std::exchange(slot.staging, nullptr)) gpu_->free(memory);
}

Gpu::Event Lane::take_event() {
    {
        std::lock_guard lock(mutex_);
        if (!events_.empty()) {
            Gpu::Event event = events_.back();
            events_.pop_back();
            return event;
        }
    }
    return gpu_->make_event();
}

// ---- growth -------------------------------------------------------------------------------

// If all slots of a lane that stages are in use, and as much waits. REQUIRES: mutex_ held.
void Lane::ask_for_growth() {
    const uint64_t slots = slots_.size();
    if (stopping_ || growing_ || !idle_.empty() || slots >= options_.most_slots ||
        counts_.staging_bytes == 0 || waiting(slots) < slots || monotonic_nanos() < grow_after_)
        return;
    growing_ = true;
    wake_.notify_all();
}

void Lane::run_growth() {
    block_signals();
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return stopping_ || growing_; });
        if (!stopping_) {
            lock.unlock();
            Slot slot;
            const bool made = make_more(slot);
            lock.lock();
            if (made) {
                idle_.push_back(&slots_.emplace_back(slot));
                counts_.staging_bytes += options_.batch_bytes;
            } else {
                grow_after_ = monotonic_nanos() + kGrowthPauseNanos;
            }
        }
        growing_ = false;
        wake_.notify_all();
        if (stopping_) return;
    }
}

// One more slot with staging memory. False if there is none, or none to spare, for whatever reason:
// the lane does with those it has.
bool Lane::make_more(Slot& slot) {
    try {
        if (gpu_->is_lost()) return false;
        gpu_->enter();
        if (gpu_->free_bytes() < kSpareBytes + options_.batch_bytes) return false;
        make(slot);
        slot.staging = gpu_->allocate(options_.batch_bytes);
        return true;
    } catch (const GpuError&) {
        if (gpu_->is_lost()) return false;
    }
    try {
        free(slot);
    } catch (const GpuError&) {  // the end of the process frees it
    }
    return false;
}

}  // namespace kvserver
