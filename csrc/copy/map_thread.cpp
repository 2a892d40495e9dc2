// map_thread.cpp: see map_thread.h.
#include "copy/map_thread.h"

#include <utility>

#include "copy/threads.h"

namespace kvserver {

MapThread::MapThread(std::function<void(const MapJob&)> run) : run_(std::move(run)) {
    thread_ = std::thread([this] { run_jobs(); });
}

MapThread::~MapThread() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
}

void MapThread::add(MapJob job) {
    {
        std::lock_guard lock(mutex_);
        jobs_.push_back(std::move(job));
    }
    wake_.notify_all();
}

void MapThread::run_jobs() {
    block_signals();
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        const MapJob job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        run_(job);
        lock.lock();
    }
}

}  // namespace kvserver
