// fold.h: the mixing step of the tables whose places depend on a secret.
#pragma once

#include <cstdint>

namespace kvserver {

// Both halves of the product: every bit of either number changes about half of the result's.
inline uint64_t fold(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

}  // namespace kvserver
