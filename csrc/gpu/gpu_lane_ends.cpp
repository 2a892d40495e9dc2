// gpu_lane_ends.cpp: the waiting thread: ends of batches and jobs, and of all on a lost GPU.
#include <mutex>
#include <string>
#include <utility>

#include "copy/threads.h"
#include "gpu/gpu_lane.h"

namespace kvserver {

void Lane::run_ends() {
    block_signals();
    bool entered = false;
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] {
            return !running_.empty() || submits_over_ || (gpu_->is_lost() && !loss_over_);
        });
        if (gpu_->is_lost() && !loss_over_) {
            end_after_loss(lock);
            continue;
        }
        if (running_.empty()) return;
        const Batch batch = running_.front();            // stays there: its slot is in use
        const bool timed = batch.flight->fault.empty();  // else `began` may not have been recorded
        lock.unlock();
        const std::string fault = wait_for(batch, entered);
        const uint64_t nanos = timed && fault.empty() ? nanos_of(batch) : 0;
        lock.lock();
        if (gpu_->is_lost()) continue;
        running_.pop_front();
        free_slot(batch);
        if (!fault.empty()) give_up(batch.flight, fault);
        batch.flight->gpu_nanos = nanos;
        complete_batch(batch);
        wake_.notify_all();
    }
}

// Until nothing of it moves any more. What went wrong, if it did.
std::string Lane::wait_for(const Batch& batch, bool& entered) {
    try {
        if (!entered) gpu_->enter();
        entered = true;
        gpu_->wait(batch.slot->done);
        return "";
    } catch (const GpuError& error) {
        finish(*batch.slot);
        return error.what();
    }
}

// From the job's first batch on; 0 if unknown, which harms no byte.
uint64_t Lane::nanos_of(const Batch& batch) {
    try {
        return gpu_->nanos_between(batch.flight->began, batch.slot->done);
    } catch (const GpuError&) {
        return 0;
    }
}

// No batch of it follows; those in flight are waited for. REQUIRES: mutex_ held.
void Lane::give_up(const Shared& flight, const std::string& fault) {
    flight->fault = fault;
    flight->submitted = true;
    std::erase(long_, flight);
}

// A lost GPU may still move what it was given: only a dead context surely does not. REQUIRES: lock
// held; not all the while.
void Lane::end_after_loss(std::unique_lock<std::mutex>& lock) {
    end_as_lost(false);
    wake_.wait(lock, [this] { return !queuing_ && !growing_; });
    lock.unlock();
    const bool quiet = all_quiet();
    lock.lock();
    if (quiet) end_as_lost(true);
    running_.clear();  // what is left in open_ stays there
    loss_over_ = true;
    wake_.notify_all();
}

// REQUIRES: mutex_ held; of those that have begun nothing moves any more.
void Lane::end_as_lost(bool begun) {
    std::erase_if(open_, [&](const auto& open) {
        Flight& flight = *open.second;
        if (flight.begun != begun) return false;
        completions_.push(begun ? end_job(*flight.job, Outcome::kDeviceLost, gpu_->lost())
                                : refuse_job(*flight.job, Outcome::kDeviceLost, gpu_->lost()));
        return true;
    });
    short_.clear();
    long_.clear();
    wake_.notify_all();
}

// Wait until no stream moves anything any more. False if that is unknown.
bool Lane::all_quiet() {
    try {
        for (Slot& slot : slots_)
            if (slot.stream != nullptr) gpu_->finish(slot.stream);
        return true;
    } catch (const GpuError&) {
        return false;
    }
}

// Nothing of it moves any more. REQUIRES: mutex_ held.
void Lane::complete_batch(const Batch& batch) {
    Flight& flight = *batch.flight;
    --flight.in_flight;
    if (flight.fault.empty())
        for (uint64_t i = batch.first; i < batch.last; ++i)
            flight.job->bytes += flight.job->bytes_at(i);
    end_if_over(batch.flight);
}

// REQUIRES: mutex_ held.
void Lane::end_if_over(const Shared& flight) {
    if (!flight->submitted || flight->in_flight > 0) return;
    if (open_.erase(flight->job->ticket) == 0) return;  // ended: the GPU was lost
    const CopyJob& job = *flight->job;
    Completion end =
        flight->fault.empty() ? end_job(job) : end_job(job, Outcome::kFailed, flight->fault);
    if (flight->gpu_nanos != 0) end.nanos = flight->gpu_nanos;
    if (flight->began != nullptr) events_.push_back(flight->began);
    completions_.push(std::move(end));
}

}  // namespace kvserver
