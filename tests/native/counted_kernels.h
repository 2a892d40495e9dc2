// counted_kernels.h: the kernels for the host, with every byte that they write counted.
#pragma once

#include "testing/copy_blocks_host.h"

// The memory that the kernels may write, and how often each byte of it was written.
struct Counted {
    std::byte* data = nullptr;
    uint64_t size = 0;
    uint8_t* times = nullptr;
    uint64_t bytes = 0;  // in all
};
extern Counted counted;

// As kvserver::host_copy_blocks(). A store to other memory than `counted`'s ends the process.
void counted_copy_blocks(kvserver::Direction direction, const kvserver::PackedBlocks& blocks,
                         const kvserver::HostGrid& grid);
