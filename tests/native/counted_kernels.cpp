// counted_kernels.cpp: see counted_kernels.h. KERNEL_SOURCE is copy_blocks.cu, or one with a fault.
#include "counted_kernels.h"

#include "testing/host_cuda.h"

Counted counted;

namespace kvserver {

namespace {

template <typename T>
void counted_store(T* to, T value) {
    const auto offset = static_cast<uint64_t>(reinterpret_cast<std::byte*>(to) - counted.data);
    if (offset >= counted.size || counted.size - offset < sizeof(T)) {
        std::fprintf(stderr, "a store at byte %ld of memory of %lu bytes\n",
                     static_cast<long>(offset), static_cast<unsigned long>(counted.size));
        std::exit(1);
    }
    for (uint64_t i = 0; i < sizeof(T); ++i) ++counted.times[offset + i];
    counted.bytes += sizeof(T);
    __stcs(to, value);
}

}  // namespace

}  // namespace kvserver

#define __stcs counted_store
#include KERNEL_SOURCE

void counted_copy_blocks(kvserver::Direction direction, const kvserver::PackedBlocks& blocks,
                         const kvserver::HostGrid& grid) {
    kvserver::device = grid;
    kvserver::launch(direction, blocks, nullptr);
}
