// time_sums.h: a number for each time 0, 1, 2 ..., and the sum of all after a time.
//
// A number is at most 2^32 - 1. To set one is three additions, in neighbouring places for
// neighbouring times, where a Fenwick tree reads and writes 20 far apart; a sum reads at most 3 *
// 127.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvserver {

class TimeSums {
  public:
    // All numbers are 0.
    void resize(size_t times) {
        numbers_.assign(times, 0);
        sums_[0].assign(times / kFan + 1, 0);
        sums_[1].assign(times / kFan / kFan + 1, 0);
        total_ = 0;
    }
    // Memory is free until the next resize().
    void release() {
        std::vector<uint32_t>().swap(numbers_);
        for (std::vector<uint64_t>& sums : sums_) std::vector<uint64_t>().swap(sums);
    }

    void set(size_t time, uint32_t number) {
        const uint64_t more = uint64_t{number} - numbers_[time];  // modulo 2^64: also less
        numbers_[time] = number;
        sums_[0][time / kFan] += more;
        sums_[1][time / kFan / kFan] += more;
        total_ += more;
    }

    uint64_t after(size_t time) const {
        return rest(numbers_, time) + rest(sums_[0], time / kFan) +
               sum(sums_[1], time / kFan / kFan + 1, sums_[1].size());
    }

    size_t times() const { return numbers_.size(); }
    uint64_t total() const { return total_; }
    size_t memory_bytes() const {
        return numbers_.size() * sizeof(uint32_t) +
               (sums_[0].size() + sums_[1].size()) * sizeof(uint64_t);
    }

  private:
    static constexpr size_t kFan = 128;

    template <typename Number>
    static uint64_t sum(const std::vector<Number>& of, size_t from, size_t end) {
        uint64_t found = 0;
        for (size_t at = from; at < end; ++at) found += of[at];
        return found;
    }
    // Behind `at`, up to the end of those that one number of the next level sums up.
    template <typename Number>
    static uint64_t rest(const std::vector<Number>& of, size_t at) {
        return sum(of, at + 1, std::min(of.size(), (at / kFan + 1) * kFan));
    }

    std::vector<uint32_t> numbers_;
    std::array<std::vector<uint64_t>, 2> sums_;
    uint64_t total_ = 0;
};

}  // namespace kvserver
