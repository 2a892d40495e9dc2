// fake_device.h: a device for tests. It keeps the contract of device.h to the letter and to its
// limits.
//
// Nothing moves until a test calls for it, and only in the calling thread: tickets run block by
// block, end in any order and any way, and the device can be lost. Bytes are copied for real, by
// the code and with the checks of the CPU device; what device.h only REQUIRES of callers is
// checked.
//
// Why this beside fake_gpu.h: the tests of the server and its random model repeat runs, end tickets
// out of turn, stop them between two blocks and go on after a loss. fake_gpu.h cannot do that: it
// is below a device, GpuDevice, whose threads decide when a ticket moves and ends. It is for tests
// of kernels, streams and staging, which this one does not have.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "copy/device.h"
#include "testing/slow_copies.h"

namespace kvserver {

class FakeDevice final : public Device {
  public:
    struct Options {
        uint64_t seed = 0;     // not 0: L1 is noise, and ends are reported out of order, some late
        double trouble = 0;    // how often a step() fails
        SlowCopies slow = {};  // before each block
    };
    enum class Order { kSubmitted, kReversed };

    FakeDevice(std::shared_ptr<HostRegion> region, uint64_t page_bytes, Options options);

    // ---- what the server calls; see Device. Broken REQUIRES throw std::logic_error.
    int completion_fd() const override { return completions_.fd(); }
    std::vector<Completion> drain() override;
    std::vector<Part> drain_parts() override;
    std::string lost() const override;
    void submit_copy(std::shared_ptr<CopyJob> job) override;
    void cancel(uint64_t ticket) override;
    void submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) override;
    void submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) override;

    // ---- what the test calls. A ticket that is not open, or is run by another thread, throws
    // std::invalid_argument.
    std::vector<uint64_t> open() const;          // in the order of their submission
    void run(uint64_t ticket, uint64_t blocks);  // begin it if need be, copy so many blocks
    void release(uint64_t ticket);               // copy what is left and end it
    void release_all(Order order = Order::kSubmitted);
    void report(uint64_t ticket);  // the slots of a store that were copied so far, if they count
    // Copy so many blocks more, then FAILED for this reason.
    void fail(uint64_t ticket, uint64_t blocks, const std::string& what);
    void step();  // something happens to some ticket
    void lose(const std::string& what);
    void recover();  // as if the daemon had got a new device
    const L1& l1() const { return l1_; }
    std::vector<uint32_t> newest_blocks() const;  // of the copy that was submitted last

  private:
    struct Ticket {
        uint64_t number;
        std::shared_ptr<CopyJob> copy;  // or
        MapJob map;
        bool begun = false;
        bool busy = false;  // a thread is running it
    };
    struct Stretch {  // how far to run a ticket, and what happens then
        uint64_t blocks;
        bool looks = true;     // at cancels, before each block
        bool reports = false;  // what it has copied then
        std::optional<Outcome> end = std::nullopt;
        std::string what = "";
    };
    using Shared = std::shared_ptr<Ticket>;

    void open_ticket(Ticket ticket);
    void check_caller(const CopyJob& job) const;
    Shared claim(uint64_t number);
    Shared claim_any();
    void advance(const Shared& ticket, const Stretch& stretch);
    std::optional<Completion> run_copy(Ticket& ticket, const Stretch& stretch);
    void report_part(Ticket& ticket);
    Completion end_lost(const Ticket& ticket) const;
    void return_ticket(const Shared& ticket, std::optional<Completion> end);
    Stretch next_stretch(const Ticket& ticket);
    uint64_t dice(uint64_t sides);  // 0 to sides - 1
    bool trouble();

    const L1 l1_;
    const Options options_;
    CompletionQueue completions_;
    std::atomic<bool> dead_{false};

    mutable std::mutex mutex_;  // guards what follows; never held while bytes move
    std::vector<Shared> open_;
    std::vector<Part> parts_;
    std::vector<uint32_t> newest_blocks_;
    std::string lost_;
    std::mt19937_64 random_;
};

}  // namespace kvserver
