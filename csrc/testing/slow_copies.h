// slow_copies.h: what lets a test act in the middle of a copy.
#pragma once

#include <cstdint>
#include <string>

namespace kvserver {

// Called before each block of a copy, or each operation of a stream.
struct SlowCopies {
    unsigned delay_micros = 0;  // that it takes
    // And while this exists, no block is moved but a copy's first; who waits makes FILE.reached.
    std::string pause_file = {};

    void operator()(uint64_t position) const;
};

}  // namespace kvserver
