// slow_copies.h: a way for tests to act in the middle of a copy.
#pragma once

#include <cstdint>
#include <string>

namespace kvserver {

// A copy calls it before each block, a stream before each operation. The call returns after the
// delay, and not while the file exists: then only the first block of a copy is moved. A call that
// waits for that makes FILE.reached.
struct SlowCopies {
    unsigned delay_micros = 0;
    std::string pause_file = {};

    void operator()(uint64_t position) const;
};

}  // namespace kvserver
