// pinner.h: L1 gets pinned for GPUs, in the background.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "copy/core.h"
#include "gpu/gpu.h"

namespace kvserver {

// From the region's start on, HostRegion::kPinBytes at a time: touched by several threads, so that
// the registration finds the pages there, then registered, portable to all GPUs. Registration holds
// locks of the driver that stall every CUDA process of the machine (~0.1 s a GB), so each is
// followed by a pause as long as it took. L1 is in use all the while: what is not pinned yet only
// copies more slowly. An error ends it; the rest of L1 stays as it is.
class Pinner {
  public:
    // `cpus`: where the touching threads run, so that fresh pages come from memory near them;
    // empty: anywhere.
    Pinner(std::shared_ptr<HostRegion> region, std::shared_ptr<Gpu> gpu, unsigned threads,
           std::vector<unsigned> cpus);
    ~Pinner();  // stops after the piece at hand, and unpins; REQUIRES: nothing copies any more
    std::string error() const;
    bool done() const { return done_; }
    double seconds() const { return static_cast<double>(pin_nanos_) / 1e9; }  // spent registering

  private:
    void run();
    void pin_all();
    void touch(std::byte* first, uint64_t bytes) const;
    void unpin();

    const std::shared_ptr<HostRegion> region_;
    const std::shared_ptr<Gpu> gpu_;
    const unsigned threads_;
    const std::vector<unsigned> cpus_;
    std::atomic<bool> stopping_{false}, done_{false};
    std::atomic<uint64_t> pin_nanos_{0};
    mutable std::mutex mutex_;
    std::condition_variable wake_;
    std::string error_;
    std::thread thread_;
};

}  // namespace kvserver
