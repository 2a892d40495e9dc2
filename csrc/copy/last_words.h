// The last words of a process: what it wrote to a redirected stderr before a fatal signal.
#pragma once

namespace kvserver {

// At SIGABRT or SIGSEGV copy what waits in the socket `from` to the descriptor `to`, which becomes
// descriptor 2. Then the former handler runs. Negative: only the former handler.
// One pair at a time. REQUIRES: both stay open until the next call.
void copy_last_words(int from, int to);

}  // namespace kvserver
