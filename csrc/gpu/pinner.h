// pinner.h: pins L1 for GPUs, in the background.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "copy/host_region.h"
#include "gpu/gpu.h"

namespace kvserver {

// Pins from the region's start on, HostRegion::kPinBytes at a time: several threads touch the
// pages, so that they exist, then one call registers them, portable to all GPUs. Registration holds
// locks of the driver that stall every CUDA process of the machine (~0.1 s a GB), so each is
// followed by a pause of the same length. L1 is in use meanwhile: pages that are not pinned yet
// only copy more slowly. An error ends the pinning; the rest of L1 stays unpinned.
class Pinner {
  public:
    // `cpus`: where the touching threads run, so that fresh pages come from memory near them;
    // empty: anywhere.
    Pinner(std::shared_ptr<HostRegion> region, std::shared_ptr<Gpu> gpu, unsigned threads,
           std::vector<unsigned> cpus);
    ~Pinner();  // stops after the current piece, and unpins; REQUIRES: no copy runs
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
