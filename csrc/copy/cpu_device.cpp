// cpu_device.cpp: the CPU as a device: threads, and the queues of their jobs.
#include "copy/cpu_device.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "copy/host_copy.h"
#include "copy/threads.h"

namespace kvserver {

namespace {

constexpr uint64_t kMostParts = 16;  // of a store, whose parts are larger then

}  // namespace

CpuDevice::CpuDevice(std::shared_ptr<HostRegion> region, uint64_t page_bytes,
                     std::function<void(uint64_t)> before_block, CpuOptions options)
    : l1_{std::move(region), page_bytes},
      before_block_(std::move(before_block)),
      options_(options),
      maps_([this](const MapJob& job) { completions_.push(run_map_job(job)); }) {
    check_l1(l1_);
    install_sigbus_guard();
}

// By the constructor above: so the destructor ends those there are if a thread cannot be made.
CpuDevice::CpuDevice(std::shared_ptr<HostRegion> region, uint64_t page_bytes, unsigned threads,
                     std::function<void(uint64_t)> before_block, CpuOptions options)
    : CpuDevice(std::move(region), page_bytes, std::move(before_block), options) {
    if (threads == 0) throw std::invalid_argument("a CPU device needs at least one thread");
    for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { run_copies(); });
}

CpuDevice::~CpuDevice() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        for (auto* queue : {&loads_, &stores_}) {
            for (auto& job : *queue) job->stop = true;
        }
        for (auto& job : busy_) job->stop = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void CpuDevice::submit_copy(std::shared_ptr<CopyJob> job) {
    check_job(*job, l1_);
    if (!job->planes->on_host()) throw std::invalid_argument("planes that are no host memory");
    {
        std::lock_guard lock(mutex_);
        (job->direction == Direction::kLoad ? loads_ : stores_).push_back(std::move(job));
    }
    wake_.notify_all();
}

void CpuDevice::cancel(uint64_t ticket) {
    std::lock_guard lock(mutex_);
    auto stop = [ticket](const std::shared_ptr<CopyJob>& job) {
        if (job->ticket == ticket) job->stop = true;
    };
    std::for_each(loads_.begin(), loads_.end(), stop);
    std::for_each(stores_.begin(), stores_.end(), stop);
    std::for_each(busy_.begin(), busy_.end(), stop);
}

// REQUIRES: mutex_ held. The job whose blocks should be copied next, or null.
std::shared_ptr<CopyJob> CpuDevice::front_job() {
    if (!loads_.empty()) return loads_.front();
    if (!stores_.empty()) return stores_.front();
    return nullptr;
}

void CpuDevice::run_copies() {
    block_signals();
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return stopping_ || !loads_.empty() || !stores_.empty(); });
        if (stopping_) return;
        std::shared_ptr<CopyJob> job = front_job();
        auto& queue = job->direction == Direction::kLoad ? loads_ : stores_;
        const uint64_t total = job->positions();
        const uint64_t first = job->next;
        if (first == 0) {
            if (auto refused = begin_job(*job)) {
                completions_.push(std::move(*refused));
                queue.pop_front();
                continue;
            }
        }
        const uint64_t batch =
            std::max<uint64_t>(1, options_.batch_bytes / job->planes->block_bytes());
        const uint64_t last = job->stop ? total : std::min(total, first + batch);
        job->next = last;
        job->begun.insert(first);
        if (last == total) {
            queue.pop_front();
            busy_.push_back(job);
        }
        lock.unlock();
        copy_batch(*job, first, last);
        finish_copies();
        lock.lock();
        job->begun.erase(first);
        // Nothing touches a job after the end of its last batch: it may be freed, and its memory
        // unmapped.
        job->processed += last - first;
        if (job->processed == total) {
            std::erase(busy_, job);
            lock.unlock();
            completions_.push(end_job(*job));
            lock.lock();
        } else if (job->direction == Direction::kStore) {
            report_part(*job);
        }
    }
}

// REQUIRES: mutex_ held, and what this thread copied is finished.
void CpuDevice::report_part(CopyJob& job) {
    const uint64_t copied = job.begun.empty() ? job.next.load() : *job.begun.begin();
    const uint64_t least_bytes =
        std::max(options_.part_bytes, job.positions() * job.planes->block_bytes() / kMostParts);
    if (auto part = next_part(job, copied, least_bytes)) {
        {
            std::lock_guard reporting(reports_);
            parts_.push_back(*part);
        }
        completions_.notify();
    }
}

std::vector<Part> CpuDevice::drain_parts() {
    std::lock_guard lock(reports_);
    return std::exchange(parts_, {});
}

void CpuDevice::copy_batch(CopyJob& job, uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
        if (job.stop || cancelled(job)) {
            job.stop = true;
            return;
        }
        if (before_block_) before_block_(i);
        if (!copy_block_guarded(job, i, l1_)) {
            job.memory_lost = true;
            job.stop = true;
            return;
        }
        job.bytes += job.bytes_at(i);
    }
}

void CpuDevice::submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) {
    maps_.add({ticket, false, std::move(mappings)});
}

void CpuDevice::submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) {
    maps_.add({ticket, true, std::move(mappings)});
}

}  // namespace kvserver
