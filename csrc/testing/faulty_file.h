// faulty_file.h: file calls with faults that a test switches on and off while they are used.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "l2/file_calls.h"

namespace kvserver {

// The faults of one direction, each off by default.
struct Faults {
    std::atomic<int> error{0};          // errno of each call
    std::atomic<size_t> most_bytes{0};  // a call moves so many at most
    std::atomic<size_t> flip_every{
        0};  // the bit in the middle of each so many-th call's first part
    std::atomic<unsigned> delay_micros{0};
    std::atomic<size_t> calls{0};  // since the start
};

class FaultyFile final : public FileCalls {
  public:
    ssize_t read(int fd, const iovec* to, int count, off_t offset) override;
    ssize_t write(int fd, const iovec* from, int count, off_t offset) override;

    // Calls that begin from now on wait until hang(false).
    void hang(bool on);
    size_t hanging() const { return hanging_; }

    Faults reads, writes;

  private:
    bool fails(Faults& faults);
    void wait();

    std::mutex mutex_;
    std::condition_variable woken_;
    bool hangs_ = false;
    std::atomic<size_t> hanging_{0};
};

}  // namespace kvserver
