#include "copy/last_words.h"

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>

namespace kvserver {
namespace {

std::atomic<int> source{-1}, target{-1};
struct sigaction former_abort, former_fault;

// Only calls that a signal handler may make.
void on_fatal(int number) {
    char bytes[4096];
    ssize_t count;
    while ((count = recv(source, bytes, sizeof bytes, MSG_DONTWAIT)) > 0)
        if (write(target, bytes, static_cast<size_t>(count)) != count) break;
    dup2(target, STDERR_FILENO);
    sigaction(number, number == SIGABRT ? &former_abort : &former_fault, nullptr);
    raise(number);
}

}  // namespace

void copy_last_words(int from, int to) {
    const bool was_on = source >= 0;
    source = from;
    target = to;
    struct sigaction ours{};
    ours.sa_handler = on_fatal;
    ours.sa_flags = SA_NODEFER;  // or raise() would return
    if (from >= 0 && !was_on) {
        sigaction(SIGABRT, &ours, &former_abort);
        sigaction(SIGSEGV, &ours, &former_fault);
    } else if (from < 0 && was_on) {
        sigaction(SIGABRT, &former_abort, nullptr);
        sigaction(SIGSEGV, &former_fault, nullptr);
    }
}

}  // namespace kvserver
