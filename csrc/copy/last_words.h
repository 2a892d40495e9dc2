// Lines that libraries write to a redirected stderr, and the last words of a process among them.
#pragma once

#include <string>

namespace kvserver {

// Waits for whole lines in the stream socket `from`; empty at its end. Lines count as logged when
// the next call begins. One thread calls it.
std::string next_lines(int from);

// At SIGABRT or SIGSEGV copy the lines that are not logged to the descriptor `to`, which becomes
// descriptor 2. Then the former handler runs. Negative: only the former handler.
// One pair at a time. REQUIRES: both stay open until the next call.
void copy_last_words(int from, int to);

}  // namespace kvserver
