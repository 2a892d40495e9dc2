// slot_cursor.h: where the bytes of a job's slots lie in L1.
#pragma once

#include <algorithm>
#include <cstdint>

#include "copy/job.h"

namespace kvserver {

// Walks a job's slots laid end to end. REQUIRES: check_job() passed; offsets only grow.
class SlotCursor {
  public:
    // At the first byte of a position.
    SlotCursor(const CopyJob& job, const L1& l1, uint64_t position) : job_(job), l1_(l1) {
        const auto ends = job.extent_ends.begin();
        extent_ = static_cast<size_t>(
            std::upper_bound(ends, job.extent_ends.end(), start_of(position) / l1.page_bytes) -
            ends);
    }

    // Where a position begins, counted from the first slot's first byte.
    uint64_t start_of(uint64_t position) const {
        return position / job_.blocks_per_slot * job_.pages_per_slot * l1_.page_bytes +
               position % job_.blocks_per_slot * job_.planes->block_bytes();
    }

    // f(address in L1, bytes) for each stretch of L1 with some of these bytes, in order.
    template <typename F>
    void visit(uint64_t offset, uint64_t bytes, F f) {
        while (bytes > 0) {
            while (job_.extent_ends[extent_] * l1_.page_bytes <= offset) ++extent_;
            const uint64_t left = job_.extent_ends[extent_] * l1_.page_bytes - offset;
            const uint64_t piece = std::min(bytes, left);
            const Extent& extent = job_.extents[extent_];
            const uint64_t end = (uint64_t{extent.first} + extent.count) * l1_.page_bytes;
            f(l1_.region->data() + end - left, piece);
            offset += piece;
            bytes -= piece;
        }
    }

  private:
    const CopyJob& job_;
    const L1& l1_;
    size_t extent_;
};

}  // namespace kvserver
