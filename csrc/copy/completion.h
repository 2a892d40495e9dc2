// completion.h: the report of a job's end.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
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

// The first `slots` slots of a store are copied, and count whatever becomes of the others.
struct Part {
    uint64_t ticket;
    uint64_t slots;
};

// An eventfd: readable from notify() to the next reset().
class EventFd {
  public:
    EventFd();
    ~EventFd();
    EventFd(const EventFd&) = delete;
    EventFd& operator=(const EventFd&) = delete;
    int fd() const { return fd_; }
    void notify();
    void reset();

  private:
    int fd_;
};

// A mailbox with an eventfd that is readable while the mailbox is not empty.
template <typename End>
class EndQueue {
  public:
    int fd() const { return event_.fd(); }
    void push(End end) {
        {
            std::lock_guard lock(mutex_);
            items_.push_back(std::move(end));
        }
        event_.notify();
    }
    std::vector<End> drain() {
        event_.reset();
        std::lock_guard lock(mutex_);
        return std::exchange(items_, {});
    }
    void notify() { event_.notify(); }  // without an item

  private:
    EventFd event_;
    std::mutex mutex_;
    std::vector<End> items_;
};

using CompletionQueue = EndQueue<Completion>;

}  // namespace kvserver
