// gpu_lane.cpp: jobs into batches, batches onto streams. Slots and ends are in files of their own.
#include "gpu/gpu_lane.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "copy/threads.h"
#include "gpu/pieces.h"

namespace kvserver {

Lane::Lane(const L1& l1, std::shared_ptr<Gpu> gpu, CompletionQueue& completions, GpuOptions options)
    : l1_(l1), gpu_(std::move(gpu)), completions_(completions), options_(options) {
    for (unsigned i = 0; i < kSlots; ++i) idle_.push_back(&slots_.emplace_back());
    try {
        for (auto run : {&Lane::run_submits, &Lane::run_ends, &Lane::run_growth})
            threads_.emplace_back(run, this);
    } catch (const std::system_error&) {
        end_threads();
        throw;
    }
}

Lane::~Lane() { end_threads(); }

void Lane::end_threads() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Lane::submit(std::shared_ptr<CopyJob> job) {
    {
        std::lock_guard lock(mutex_);
        if (gpu_->is_lost()) {
            completions_.push(refuse_job(*job, Outcome::kDeviceLost, gpu_->lost()));
            return;
        }
        const bool one_batch =
            job->positions() * job->planes->block_bytes() <= options_.batch_bytes;
        auto flight = std::make_shared<Flight>();
        open_[job->ticket] = flight;
        flight->job = std::move(job);
        (one_batch ? short_ : long_).push_back(std::move(flight));
    }
    wake_.notify_all();
}

void Lane::cancel(uint64_t ticket) {
    std::lock_guard lock(mutex_);
    if (auto found = open_.find(ticket); found != open_.end()) found->second->job->stop = true;
}

void Lane::gpu_lost() {
    std::lock_guard lock(mutex_);
    if (gpu_->is_lost()) end_as_lost(false);
}

// ---- the submitting thread ------------------------------------------------------------------

void Lane::run_submits() {
    block_signals();
    std::unique_lock lock(mutex_);
    for (;;) {
        std::deque<Shared>* queue = nullptr;
        wake_.wait(lock, [&] { return stopping_ || (queue = next_queue()) != nullptr; });
        if (stopping_) break;
        if (gpu_->is_lost()) {
            end_as_lost(false);
            continue;
        }
        const Shared flight = std::move(queue->front());
        queue->pop_front();
        short_had_turn_ = queue == &short_;
        if (!advance(flight)) continue;
        const Batch batch = next_batch(flight, queue == &long_);
        queuing_ = true;
        lock.unlock();
        const Queued queued = try_queue(batch);
        lock.lock();
        queuing_ = false;
        wake_.notify_all();
        if (gpu_->is_lost()) continue;
        if (!queued.fault.empty()) give_up(flight, queued.fault);
        if (queued.in_flight) {
            running_.push_back(batch);
            ask_for_growth();
        } else {
            free_slot(batch);
            complete_batch(batch);
        }
    }
    wake_.wait(lock, [this] { return running_.empty() && !growing_; });
    lock.unlock();
    tear_down();
    lock.lock();
    submits_over_ = true;
    wake_.notify_all();
}

// Whose turn it is; null if nothing may go now. REQUIRES: mutex_ held.
std::deque<Lane::Shared>* Lane::next_queue() {
    if (idle_.empty()) return nullptr;
    const uint64_t all = slots_.size();
    const bool a_long =
        !long_.empty() && long_ones_ < std::max<uint64_t>(kSlots, std::min(all, waiting(all)));
    if (!short_.empty() && !(a_long && short_had_turn_)) return &short_;
    return a_long ? &long_ : nullptr;
}

// Batches that are not submitted yet, counted up to `most`. REQUIRES: mutex_ held.
uint64_t Lane::waiting(uint64_t most) const {
    uint64_t batches = 0;
    for (const auto* queue : {&short_, &long_})
        for (const Shared& flight : *queue) {
            const CopyJob& job = *flight->job;
            const uint64_t bytes = (job.positions() - job.next) * job.planes->block_bytes();
            batches += (bytes + options_.batch_bytes - 1) / options_.batch_bytes;
            if (batches >= most) return most;
        }
    return batches;
}

// REQUIRES: mutex_ held, a slot is idle, advance() let it.
Lane::Batch Lane::next_batch(const Shared& flight, bool of_long) {
    CopyJob& job = *flight->job;
    const Batch batch{flight, job.next, batch_end(job), idle_.front(), of_long};
    idle_.pop_front();
    long_ones_ += of_long;
    job.next = batch.last;
    flight->submitted = batch.last == job.positions();
    if (!flight->submitted) long_.push_front(flight);
    ++flight->in_flight;
    return batch;
}

// REQUIRES: mutex_ held.
void Lane::free_slot(const Batch& batch) {
    idle_.push_back(batch.slot);
    long_ones_ -= batch.of_long;
}

// Begin it if need be. False if no batch of it is to be queued: then it has ended, or will.
// REQUIRES: mutex_ held.
bool Lane::advance(const Shared& flight) {
    CopyJob& job = *flight->job;
    if (!flight->begun) {
        if (auto refused = begin_job(job)) {
            open_.erase(job.ticket);
            completions_.push(std::move(*refused));
            return false;
        }
        flight->begun = true;
    }
    if (!job.stop && !cancelled(job)) return true;
    job.stop = true;
    flight->submitted = true;
    end_if_over(flight);
    return false;
}

uint64_t Lane::batch_end(const CopyJob& job) const {
    const uint64_t most = std::min(options_.batch_bytes / job.planes->block_bytes(),
                                   kBatchIds / job.planes->groups());
    return std::min(job.positions(), job.next + std::max<uint64_t>(1, most));
}

// What was queued of a batch that failed is waited for as if it had not.
Lane::Queued Lane::try_queue(const Batch& batch) {
    Queued queued{false, ""};
    try {
        prepare();
        queued.in_flight = true;
        queue_batch(batch);
    } catch (const GpuError& error) {
        queued.fault = error.what();
    }
    try {
        if (queued.in_flight && !gpu_->is_lost())
            gpu_->record(batch.slot->done, batch.slot->stream);
    } catch (const GpuError& error) {
        queued = {false, error.what()};
        finish(*batch.slot);
    }
    return queued;
}

// By the table alone: blocks are taken to be scattered, as they are once an engine has worked.
bool Lane::wants_staging(const CopyJob& job, uint64_t positions) const {
    if (options_.way) return *options_.way == Way::kStaged;
    const uint64_t pieces = job.planes->series().size();  // of a block
    const uint64_t least =
        job.direction == Direction::kStore ? options_.short_store_bytes : options_.short_load_bytes;
    return positions * pieces > kFewPieces && job.planes->block_bytes() / pieces < least;
}

// Whether it is to be staged, and can be.
bool Lane::stage(const Batch& batch) {
    const CopyJob& job = *batch.flight->job;
    const uint64_t positions = batch.last - batch.first;
    const uint64_t table = job.planes->planes().size() * sizeof(Plane) +
                           positions * job.planes->groups() * sizeof(uint32_t);
    if (table > kTableBytes || positions * job.planes->block_bytes() > options_.batch_bytes ||
        !wants_staging(job, positions))
        return false;
    if (batch.slot->staging == nullptr) prepare_staging();
    return batch.slot->staging != nullptr;
}

// Wait here, since no event reports it, until the slot's stream moves nothing any more.
void Lane::finish(const Slot& slot) {
    try {
        gpu_->finish(slot.stream);
    } catch (const GpuError& error) {
        gpu_->lose(std::string("what a stream still does is not known: ") + error.what());
    }
}

void Lane::queue_batch(const Batch& batch) {
    const CopyJob& job = *batch.flight->job;
    if (batch.first == 0) {
        batch.flight->began = take_event();
        gpu_->record(batch.flight->began, batch.slot->stream);
    }
    if (stage(batch)) return queue_staged(batch);
    const Pieces pieces = run_pieces(job, l1_, batch.first, batch.last);
    gpu_->copy(batch.slot->stream, pieces.list(), pieces.unpinned() == 0);
    counts_.dma_bytes += (batch.last - batch.first) * job.planes->block_bytes();
    counts_.unpinned_bytes += pieces.unpinned();
}

void Lane::queue_staged(const Batch& batch) {
    const CopyJob& job = *batch.flight->job;
    Slot& slot = *batch.slot;
    const std::vector<Plane>& planes = job.planes->planes();
    const uint64_t groups = job.planes->groups(), positions = batch.last - batch.first;
    const uint64_t plane_bytes = planes.size() * sizeof(Plane);
    const uint64_t id_bytes = positions * groups * sizeof(uint32_t);
    std::memcpy(slot.table, planes.data(), plane_bytes);
    std::memcpy(slot.table + plane_bytes, job.blocks.data() + batch.first * groups, id_bytes);
    const PackedBlocks packed{
        .planes = reinterpret_cast<const Plane*>(slot.gpu_table),
        .num_planes = static_cast<uint32_t>(planes.size()),
        .groups = static_cast<uint32_t>(groups),
        .blocks = reinterpret_cast<const uint32_t*>(slot.gpu_table + plane_bytes),
        .positions = static_cast<uint32_t>(positions),
        .position_bytes = job.planes->block_bytes(),
        .packed = slot.staging,
    };
    gpu_->copy(slot.stream, {{slot.gpu_table, slot.table, plane_bytes + id_bytes}}, true);
    const Pieces pieces = staged_pieces(job, l1_, batch.first, batch.last, slot.staging);
    const bool pinned = pieces.unpinned() == 0;
    if (job.direction == Direction::kLoad) gpu_->copy(slot.stream, pieces.list(), pinned);
    gpu_->copy_blocks(slot.stream, job.direction, packed);
    if (job.direction == Direction::kStore) gpu_->copy(slot.stream, pieces.list(), pinned);
    counts_.staged_bytes += positions * packed.position_bytes;
    counts_.unpinned_bytes += pieces.unpinned();
}

}  // namespace kvserver
