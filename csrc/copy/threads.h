// threads.h: calls of the system for a device's threads.
#pragma once

#include <cstdint>

namespace kvserver {

uint64_t monotonic_nanos();  // CLOCK_MONOTONIC, the same in all processes of a machine
// Of a copying thread: signals are the main thread's. SIGBUS is synchronous and must stay ours.
void block_signals();
// The calling thread gives way to all others that want to run.
void give_way(int nice);

}  // namespace kvserver
