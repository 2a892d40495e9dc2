// host_region.cpp: the L1 region and its place in the machine's memory.
#include "copy/host_region.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "copy/threads.h"

namespace kvserver {

namespace {

constexpr int kPopulateWrite = 23;    // MADV_POPULATE_WRITE; older headers lack it
constexpr unsigned kMaxNodes = 1024;  // the kernel knows no more
constexpr unsigned kWordBits = 8 * sizeof(unsigned long);
using NodeMask = std::array<unsigned long, kMaxNodes / kWordBits>;

// By system call: libnuma would be one more library for two calls.
std::string place(void* address, uint64_t size, const Placement& placement) {
    NodeMask mask{};
    for (unsigned node : placement.nodes) {
        if (node >= kMaxNodes) return "there is no memory node " + std::to_string(node);
        mask[node / kWordBits] |= 1ul << node % kWordBits;
    }
    const int mode = placement.bound ? MPOL_BIND : MPOL_INTERLEAVE;
    // The kernel reads one bit less than the count it gets.
    if (syscall(SYS_mbind, address, size, mode, mask.data(), kMaxNodes + 1, 0) == 0) return "";
    return std::string("mbind: ") + strerror(errno);
}

void advise(void* address, uint64_t size, const Placement& placement) {
    // Advice only: without it everything works, with smaller pages.
    if (placement.huge_page_bytes == 0)
        (void)madvise(address, size, placement.transparent ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    (void)madvise(address, size, MADV_DONTFORK);
}

int mapping_flags(const Placement& placement, int fd) {
    if (fd >= 0) return MAP_SHARED | MAP_NORESERVE;
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (placement.huge_page_bytes == 0) return kFlags | MAP_NORESERVE;
    return kFlags | MAP_HUGETLB | std::countr_zero(placement.huge_page_bytes) << MAP_HUGE_SHIFT;
}

uint64_t whole_pages(uint64_t size, uint64_t page_bytes) {
    if (page_bytes == 0) return size;
    const auto ordinary = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const bool huge = std::has_single_bit(page_bytes) && page_bytes > ordinary;
    if (!huge || size > UINT64_MAX - page_bytes)
        throw std::runtime_error("a huge page of " + std::to_string(page_bytes) + " bytes for L1");
    return (size + page_bytes - 1) / page_bytes * page_bytes;
}

}  // namespace

HostRegion::HostRegion(uint64_t size, const Placement& placement, int fd)
    : size_(size), mapped_bytes_(whole_pages(size, placement.huge_page_bytes)) {
    void* address =
        mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, mapping_flags(placement, fd), fd, 0);
    if (address == MAP_FAILED)
        throw std::runtime_error("mmap of " + std::to_string(mapped_bytes_) + " bytes for L1" +
                                 (placement.huge_page_bytes ? " in huge pages: " : ": ") +
                                 strerror(errno));
    data_ = static_cast<std::byte*>(address);
    advise(address, mapped_bytes_, placement);
    // Before the first touch: a policy moves no page that is there.
    if (!placement.nodes.empty()) numa_error_ = place(address, mapped_bytes_, placement);
}

HostRegion::~HostRegion() { munmap(data_, mapped_bytes_); }

bool HostRegion::populate(uint64_t offset, uint64_t bytes) {
    return madvise(data_ + offset, bytes, kPopulateWrite) == 0;
}

void HostRegion::unmap_pages(unsigned threads) {
    constexpr uint64_t kPart = 64ull << 20;
    std::atomic<uint64_t> next{0};
    run_by(threads, [&] {
        for (uint64_t at; (at = next.fetch_add(kPart)) < mapped_bytes_;)
            (void)madvise(data_ + at, std::min(kPart, mapped_bytes_ - at), MADV_DONTNEED);
    });
}

NumaPolicy numa_policy_at(const void* address) {
    int mode = 0;
    NodeMask mask{};
    const unsigned long flags = address != nullptr ? MPOL_F_ADDR : 0;
    if (syscall(SYS_get_mempolicy, &mode, mask.data(), kMaxNodes, address, flags) != 0)
        return {"unknown", {}};
    NumaPolicy policy;
    switch (mode & ~MPOL_MODE_FLAGS) {
        case MPOL_DEFAULT:
            policy.mode = "default";
            break;
        case MPOL_BIND:
            policy.mode = "bind";
            break;
        case MPOL_INTERLEAVE:
            policy.mode = "interleave";
            break;
        default:
            policy.mode = "preferred";
    }
    for (unsigned node = 0; node < kMaxNodes; ++node)
        if (mask[node / kWordBits] >> node % kWordBits & 1) policy.nodes.push_back(node);
    return policy;
}

}  // namespace kvserver
