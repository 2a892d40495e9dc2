// copy_blocks_host.h: the kernels of copy_blocks.h run by this thread over host memory: what a
// simulated GPU does, and how tests show that the kernels are right where there is no GPU.
#pragma once

#include "gpu/copy_blocks.h"

namespace kvserver {

// A simulated launch: thread after thread, of as many blocks as a GPU of so many SMs would have.
struct HostGrid {
    // The thread of the launch that is run as the index-th one: a permutation. Null: in order.
    uint64_t (*order)(uint64_t index, uint64_t threads) = nullptr;
    int sms = 1;
};

// As launch_copy_blocks(), but the copy is done when it returns.
void host_copy_blocks(Direction direction, const PackedBlocks& blocks, const HostGrid& grid = {});

}  // namespace kvserver
