// host_region.h: L1: one region of equal pages, and its place in the machine's memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvserver {

// The place of L1. Explicit huge pages are reserved when L1 is mapped, or mapping fails: a page
// that is missing at the first touch would be a SIGBUS. Nodes are a wish; if it fails, numa_error()
// is the reason.
struct Placement {
    uint64_t huge_page_bytes = 0;  // of explicit ones; 0: none
    bool transparent = true;       // if there are none, advise transparent ones or against them
    std::vector<unsigned> nodes;   // interleave over several, stay on a single one; none: no policy
    bool bound = false;
};

// A memory policy as the kernel reports it; mode is "unknown" where the query is forbidden.
struct NumaPolicy {
    std::string mode;
    std::vector<unsigned> nodes;
};
NumaPolicy numa_policy_at(const void* address);  // of that memory; of this thread for null

// The L1 region: private memory, touched lazily, or a file of a memory file system, shared with no
// process but the next one. It exists as long as the process serves.
class HostRegion : public std::enable_shared_from_this<HostRegion> {
  public:
    // `fd`: of the file, whose pages are its own, not placement's; -1: none. It may be closed
    // afterwards. A page that the file system cannot provide is a SIGBUS at its first touch.
    explicit HostRegion(uint64_t size, const Placement& placement = {},
                        int fd = -1);  // std::runtime_error
    ~HostRegion();
    HostRegion(const HostRegion&) = delete;
    HostRegion& operator=(const HostRegion&) = delete;
    std::byte* data() const { return data_; }
    uint64_t size() const { return size_; }
    const std::string& numa_error() const { return numa_error_; }

    // Make the memory of these bytes, and map it. Only a touch gets the huge pages that a file
    // system has on advice: memory that was reserved by the file's descriptor is of small ones.
    // False where the kernel cannot (before Linux 5.14), or has no memory; some of them may have
    // memory then. REQUIRES: they are within the region.
    bool populate(uint64_t offset, uint64_t bytes);

    // Unmap all pages by `threads` threads; the bytes stay in the file. The end of the process
    // would do it by one, for as long as their digests take. REQUIRES: it is a file's; nothing
    // copies.
    void unmap_pages(unsigned threads);

    // The first `pinned_bytes` bytes are pinned for GPUs, in registrations of kPinBytes; no copy
    // may span two of them. Only a Pinner changes it.
    static constexpr uint64_t kPinBytes = 256ull << 20;
    std::atomic<uint64_t> pinned_bytes{0};

  private:
    std::byte* data_;
    uint64_t size_;
    uint64_t mapped_bytes_;  // whole huge pages
    std::string numa_error_;
};

// L1 as jobs address it.
struct L1 {
    std::shared_ptr<HostRegion> region;
    uint64_t page_bytes;
};

void check_l1(const L1& l1);  // throws std::invalid_argument

}  // namespace kvserver
