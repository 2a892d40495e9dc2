// slow_copies.cpp: see slow_copies.h.
#include "testing/slow_copies.h"

#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

namespace kvserver {

void SlowCopies::operator()(uint64_t position) const {
    if (delay_micros != 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_micros));
    if (pause_file.empty() || position == 0 || (pause_at != 0 && position != pause_at)) return;
    while (access(pause_file.c_str(), F_OK) == 0) {
        std::ofstream(pause_file + ".reached");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

}  // namespace kvserver
