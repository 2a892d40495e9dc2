// copy_blocks.h: the kernels between an engine's paged KV cache and contiguous memory of the same
// GPU, and their launch. One kernel a direction, for every layout and dtype: see plane.h.
#pragma once

#include "copy/plane.h"

struct CUstream_st;  // cudaStream_t points to it

namespace kvserver {

// One launch. `packed` holds `positions` positions of `position_bytes` each, laid out as in a slot:
// [position][plane][run]. All pointers are of the GPU's memory.
struct PackedBlocks {
    const Plane* planes;  // in the order of the slot: slot_offset is the sum of the runs before
    uint32_t num_planes;
    uint32_t groups;
    const uint32_t*
        blocks;  // [positions][groups]; kNoBlock: no byte of that group is read or written there
    uint32_t positions;
    uint64_t position_bytes;  // sum of all runs
    std::byte* packed;
};

// Queue the copy of every block over all its planes on `stream` and return at once: kStore gathers
// planes -> packed, kLoad scatters packed -> planes. Every byte of the destination is written
// exactly once. Returns the cudaError_t of the launch.
// REQUIRES: the host checked it all: ids are < the plane's block count, no block is named twice by
// a load, positions > 0, and positions * position_bytes is what one launch may move (bounded by the
// caller; the kernels are short and as wide as the GPU, since other processes wait for them).
int launch_copy_blocks(Direction direction, const PackedBlocks& blocks, CUstream_st* stream);

// Load the kernels onto the current GPU, which the first launch would do otherwise. Returns a
// cudaError_t: whether this GPU can run them. Slow.
int load_copy_blocks();

}  // namespace kvserver
