// threads.h: calls of the system for a device's threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace kvserver {

uint64_t monotonic_nanos();  // CLOCK_MONOTONIC, the same in all processes of a machine
// Of a copying thread: signals are the main thread's. SIGBUS is synchronous and must stay ours.
void block_signals();
// The calling thread gives way to all others that want to run.
void give_way(int nice);
// Up to `count` threads that run `work`, to be joined: fewer where the system makes no more.
template <typename Work>
std::vector<std::thread> make_threads(unsigned count, const Work& work) {
    std::vector<std::thread> threads;
    threads.reserve(count);
    try {
        while (threads.size() < count) threads.emplace_back(work);
    } catch (const std::system_error&) {
    }
    return threads;
}
// Run `work` by this thread and up to `threads` - 1 others; returns when all have ended.
template <typename Work>
void run_by(unsigned threads, const Work& work) {
    std::vector<std::thread> others = make_threads(std::max(1u, threads) - 1, [&] {
        block_signals();
        work();
    });
    work();
    for (std::thread& other : others) other.join();
}

}  // namespace kvserver
