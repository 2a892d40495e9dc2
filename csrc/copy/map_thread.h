// map_thread.h: the thread in which a device maps and unmaps memory.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "copy/job.h"

namespace kvserver {

// One job after the other, in the order of add(): mapping may take long, and no copy waits for it.
class MapThread {
  public:
    explicit MapThread(std::function<void(const MapJob&)> run);
    ~MapThread();  // after the jobs that were added: everything is unmapped
    void add(MapJob job);

  private:
    void run_jobs();

    const std::function<void(const MapJob&)> run_;
    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_;
    std::deque<MapJob> jobs_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace kvserver
