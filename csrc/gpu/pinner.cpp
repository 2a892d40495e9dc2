// pinner.cpp: see pinner.h.
#include "gpu/pinner.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "copy/threads.h"

namespace kvserver {

namespace {

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif
constexpr uint64_t kPage = 4096;
constexpr uint64_t kTouchBytes = 16ull << 20;  // bytes that a thread touches at a time

// Make the pages present and leave their bytes alone: copies may be writing them.
void touch_pages(std::byte* first, uint64_t bytes) {
    if (madvise(first, bytes, MADV_POPULATE_WRITE) == 0 || errno != EINVAL) return;
    for (uint64_t i = 0; i < bytes; i += kPage)
        reinterpret_cast<std::atomic<uint64_t>*>(first + i)->fetch_add(0);
}

void stay_on(const std::vector<unsigned>& cpus) {
    if (cpus.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (unsigned cpu : cpus)
        if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    (void)sched_setaffinity(0, sizeof set, &set);  // a wish: in a cpuset without them, elsewhere
}

}  // namespace

Pinner::Pinner(std::shared_ptr<HostRegion> region, std::shared_ptr<Gpu> gpu, unsigned threads,
               std::vector<unsigned> cpus)
    : region_(std::move(region)),
      gpu_(std::move(gpu)),
      threads_(std::max(1u, threads)),
      cpus_(std::move(cpus)) {
    thread_ = std::thread([this] { run(); });
}

Pinner::~Pinner() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
}

std::string Pinner::error() const {
    std::lock_guard lock(mutex_);
    return error_;
}

void Pinner::run() {
    block_signals();
    std::string error;
    try {
        gpu_->enter();
        pin_all();
    } catch (const GpuError& failure) {
        error = failure.what();
    }
    std::unique_lock lock(mutex_);
    error_ = error;
    done_ = true;
    wake_.wait(lock, [this] { return stopping_.load(); });
    lock.unlock();
    unpin();
}

void Pinner::pin_all() {
    for (uint64_t at = 0; at < region_->size() && !stopping_ && !gpu_->is_lost();) {
        const uint64_t bytes = std::min(HostRegion::kPinBytes, region_->size() - at);
        touch(region_->data() + at, bytes);
        const uint64_t began = monotonic_nanos();
        gpu_->pin(region_->data() + at, bytes);
        const uint64_t took = monotonic_nanos() - began;
        pin_nanos_ += took;
        region_->pinned_bytes = at += bytes;
        std::unique_lock lock(mutex_);
        wake_.wait_for(lock, std::chrono::nanoseconds(took), [this] { return stopping_.load(); });
    }
}

void Pinner::touch(std::byte* first, uint64_t bytes) const {
    std::atomic<uint64_t> next{0};
    std::vector<std::thread> threads = make_threads(threads_, [&] {
        stay_on(cpus_);
        for (uint64_t at; (at = next.fetch_add(kTouchBytes)) < bytes && !stopping_;)
            touch_pages(first + at, std::min(kTouchBytes, bytes - at));
    });  // without any, pinning touches the pages
    for (std::thread& thread : threads) thread.join();
}

void Pinner::unpin() {
    const uint64_t pinned = region_->pinned_bytes.exchange(0);
    try {
        for (uint64_t at = 0; at < pinned && !gpu_->is_lost(); at += HostRegion::kPinBytes)
            gpu_->unpin(region_->data() + at);
    } catch (const GpuError&) {  // the end of the process unpins the rest
    }
}

}  // namespace kvserver
