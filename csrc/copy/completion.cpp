// completion.cpp: the mailbox by which the loop learns that a job ended.
#include "copy/completion.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace kvserver {

CompletionQueue::CompletionQueue() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

CompletionQueue::~CompletionQueue() { close(fd_); }

void CompletionQueue::push(Completion completion) {
    {
        std::lock_guard lock(mutex_);
        items_.push_back(std::move(completion));
    }
    // The counter cannot overflow: drain() resets it and there are far fewer than 2^64 jobs.
    (void)eventfd_write(fd_, 1);
}

std::vector<Completion> CompletionQueue::drain() {
    eventfd_t count = 0;
    (void)eventfd_read(fd_, &count);  // EAGAIN: nothing was pushed since the last drain
    std::lock_guard lock(mutex_);
    return std::exchange(items_, {});
}

}  // namespace kvserver
