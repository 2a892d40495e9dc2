// threads.cpp: see threads.h.
#include "copy/threads.h"

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace kvserver {

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

}  // namespace kvserver
