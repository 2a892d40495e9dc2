// host_pool.cpp: the L1 region.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "core.h"

namespace kvserver {

HostRegion::HostRegion(uint64_t size) : size_(size) {
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        throw std::runtime_error("mmap of " + std::to_string(size) +
                                 " bytes for L1: " + strerror(errno));
    data_ = static_cast<std::byte*>(address);
    // Advice only: without it everything works, with smaller pages.
    (void)madvise(address, size, MADV_HUGEPAGE);
    (void)madvise(address, size, MADV_DONTFORK);
}

HostRegion::~HostRegion() { munmap(data_, size_); }

}  // namespace kvserver
