// completion.cpp: state words, clocks and the mailbox by which the loop learns that a job ended.
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <ctime>
#include <system_error>
#include <utility>

#include "copy/core.h"

namespace kvserver {

bool move_word(Word& word, uint64_t sequence, State from, State to) {
    uint64_t expected = make_word(sequence, from);
    return word.compare_exchange_strong(expected, make_word(sequence, to),
                                        std::memory_order_acq_rel);
}

void block_signals() {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

uint64_t monotonic_nanos() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000ull +
           static_cast<uint64_t>(now.tv_nsec);
}

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
