// completion.cpp: the eventfd by which the loop learns that a job ended.
#include "copy/completion.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace kvserver {

EventFd::EventFd() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

EventFd::~EventFd() { close(fd_); }

// The counter cannot overflow: reset() clears it and there are far fewer than 2^64 jobs.
void EventFd::notify() { (void)eventfd_write(fd_, 1); }

void EventFd::reset() {
    eventfd_t count = 0;
    (void)eventfd_read(fd_, &count);  // EAGAIN: no notify() since the last reset()
}

}  // namespace kvserver
