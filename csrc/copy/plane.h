// plane.h: a plane, as the host and the kernels see it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvserver {

// Block `id` is the `run` bytes at base + id * stride, of the host's memory or of one GPU's.
struct Plane {
    std::byte* base;
    uint64_t stride;       // bytes from one block to the next
    uint64_t run;          // contiguous bytes of one block
    uint64_t slot_offset;  // where the run is within a position's bytes in a slot
    uint64_t group;        // which of a position's block ids names the block
};

// Where one group of a load has no block: its planes are not written there.
constexpr uint32_t kNoBlock = UINT32_MAX;

// store: L0 -> L1, load: L1 -> L0
enum class Direction : uint8_t { kStore, kLoad };

}  // namespace kvserver
