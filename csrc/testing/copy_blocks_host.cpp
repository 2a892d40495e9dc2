// copy_blocks_host.cpp: copy_blocks.cu itself, compiled for the host.
#include "testing/copy_blocks_host.h"

#include "testing/host_cuda.h"
// in terms of it
#include "gpu/copy_blocks.cu"

namespace kvserver {

void host_copy_blocks(Direction direction, const PackedBlocks& blocks, const HostGrid& grid) {
    device = grid;
    launch(direction, blocks, nullptr);
}

}  // namespace kvserver
