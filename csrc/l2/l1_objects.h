// l1_objects.h: objects in L1 that a restart keeps: whether their pages are theirs, and digests.
//
// Objects are given as `counts`, the number of extents of each, and their extents, end to end.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/host_region.h"
#include "copy/job.h"
#include "l2/digest.h"

namespace kvserver {

struct KeptPages {
    std::vector<uint8_t> fits;  // of each object: 1 if all of it is below the last page
    std::vector<Extent> free;   // pages of no object that fits, in their order
};

// Throws std::invalid_argument if an object has no page, or two objects that fit share one.
KeptPages kept_pages(const std::vector<uint32_t>& counts, const std::vector<Extent>& extents,
                     uint32_t pages);

// The digest of each object: of its whole pages, in the order of its extents. `threads` threads
// work from the first object on; an object that none has begun by `deadline_nanos`
// (CLOCK_MONOTONIC; 0: no deadline) has zeros. Throws std::invalid_argument if an extent is not
// within L1. REQUIRES: nothing writes to these pages.
std::vector<DigestBytes> digest_objects(const L1& l1, const std::vector<uint32_t>& counts,
                                        const std::vector<Extent>& extents, unsigned threads,
                                        uint64_t deadline_nanos);

}  // namespace kvserver
