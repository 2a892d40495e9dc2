// completion.h: how the end of a job is reported.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace kvserver {

enum class Outcome : uint8_t { kDone, kFailed, kCancelled, kLate, kMemoryLost, kDeviceLost };

struct Completion {
    uint64_t ticket;
    Outcome outcome;
    uint64_t bytes;    // bytes moved, also by an unfinished job
    uint64_t nanos;    // from the first byte (or the start of the call) to the end
    std::string what;  // why it failed; empty otherwise
};

// A mailbox with an eventfd that is readable while the mailbox is not empty.
class CompletionQueue {
  public:
    CompletionQueue();
    ~CompletionQueue();
    int fd() const { return fd_; }
    void push(Completion completion);
    std::vector<Completion> drain();

  private:
    int fd_;
    std::mutex mutex_;
    std::vector<Completion> items_;
};

}  // namespace kvserver
