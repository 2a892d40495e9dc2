// slow_copies.h: a way for tests to act in the middle of a copy.
#pragma once

#include <cstdint>
#include <string>

namespace kvserver {

// A copy calls it before each block, a stream before each operation. The call returns after the
// delay, and not while the file exists: then only the first block of a copy is moved, or all but
// the one at position `pause_at`. A call that waits for that makes FILE.reached.
struct SlowCopies {
    unsigned delay_micros = 0;
    std::string pause_file = {};
    uint64_t pause_at = 0;  // 0: all but the first

    void operator()(uint64_t position) const;
};

}  // namespace kvserver
