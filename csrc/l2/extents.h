// extents.h: parts of lists of extents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "copy/job.h"

namespace kvserver {

inline uint64_t page_count(const std::vector<Extent>& extents) {
    uint64_t pages = 0;
    for (const Extent& extent : extents) pages += extent.count;
    return pages;
}

// `pages` pages behind the first `skip`. REQUIRES: there are so many.
inline std::vector<Extent> part_of(const std::vector<Extent>& extents, uint64_t skip,
                                   uint64_t pages) {
    std::vector<Extent> part;
    for (const Extent& extent : extents) {
        if (pages == 0) break;
        const auto skipped = static_cast<uint32_t>(std::min<uint64_t>(skip, extent.count));
        const auto count = static_cast<uint32_t>(std::min<uint64_t>(pages, extent.count - skipped));
        skip -= skipped;
        pages -= count;
        if (count != 0) part.push_back({extent.first + skipped, count});
    }
    return part;
}

}  // namespace kvserver
