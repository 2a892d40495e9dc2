// cpu_device.h: the CPU as a device.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "copy/device.h"
#include "copy/map_thread.h"

namespace kvserver {

struct CpuOptions {
    // Of a job that a thread copies at a time: large enough that the queue lock is cheap, small
    // enough that a load queued behind a store starts within a fraction of a millisecond.
    uint64_t batch_bytes = 1 << 20;
    // Of a part of a store: storage behind L1 writes the first ones while the others are copied.
    uint64_t part_bytes = 16 << 20;
};

// The CPU as a device: threads that copy. All of them help the job in front, loads before stores,
// so one large job uses the whole machine and a small load never waits behind a large store for
// more than a batch. A CPU is never lost.
class CpuDevice final : public Device {
  public:
    // before_block: called with its position in the copy. For tests, which act in the middle of
    // one; the daemon has none. Throws std::system_error if the system makes no more threads.
    CpuDevice(std::shared_ptr<HostRegion> region, uint64_t page_bytes, unsigned threads,
              std::function<void(uint64_t)> before_block = {}, CpuOptions options = {});
    ~CpuDevice()
        override;  // stops; jobs not begun are dropped, running ones end at their next block

    int completion_fd() const override { return completions_.fd(); }
    std::vector<Completion> drain() override { return completions_.drain(); }
    std::vector<Part> drain_parts() override;
    std::string lost() const override { return {}; }
    void submit_copy(std::shared_ptr<CopyJob> job) override;
    void cancel(uint64_t ticket) override;
    void submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) override;
    void submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) override;

  private:
    CpuDevice(std::shared_ptr<HostRegion> region, uint64_t page_bytes,
              std::function<void(uint64_t)> before_block, CpuOptions options);
    void run_copies();
    std::shared_ptr<CopyJob> front_job();
    void report_part(CopyJob& job);
    void copy_batch(CopyJob& job, uint64_t first, uint64_t last);

    const L1 l1_;
    const std::function<void(uint64_t)> before_block_;
    const CpuOptions options_;
    CompletionQueue completions_;
    std::mutex reports_;  // guards:
    std::vector<Part> parts_;

    std::mutex mutex_;  // guards the queues below
    std::condition_variable wake_;
    std::deque<std::shared_ptr<CopyJob>> loads_;
    std::deque<std::shared_ptr<CopyJob>> stores_;
    std::vector<std::shared_ptr<CopyJob>> busy_;  // all positions begun, not all processed
    bool stopping_ = false;
    std::vector<std::thread> threads_;
    MapThread maps_;  // uses what is above
};

}  // namespace kvserver
