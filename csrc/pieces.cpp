// pieces.cpp: see pieces.h.
#include "pieces.h"

#include <algorithm>

#include "slot_cursor.h"

namespace kvserver {

void Pieces::add(std::byte* in_l1, std::byte* on_gpu, uint64_t bytes) {
    while (bytes > 0) {
        const auto offset = static_cast<uint64_t>(in_l1 - base_);
        const uint64_t piece =
            std::min(bytes, HostRegion::kPinBytes - offset % HostRegion::kPinBytes);
        const bool store = direction_ == Direction::kStore;
        append({store ? in_l1 : on_gpu, store ? on_gpu : in_l1, piece},
               offset % HostRegion::kPinBytes == 0);
        if (in_l1 + piece > pinned_end_) unpinned_ += piece;
        in_l1 += piece;
        on_gpu += piece;
        bytes -= piece;
    }
}

bool Pieces::short_runs() const {
    uint64_t bytes = 0;
    for (const Piece& piece : list_) bytes += piece.bytes;
    return list_.size() > kFewPieces && bytes / list_.size() < kShortRunBytes;
}

void Pieces::append(const Piece& piece, bool begins_registration) {
    if (!list_.empty() && !begins_registration) {
        Piece& last = list_.back();
        if (last.to + last.bytes == piece.to && last.from + last.bytes == piece.from) {
            last.bytes += piece.bytes;
            return;
        }
    }
    list_.push_back(piece);
}

Pieces run_pieces(const CopyJob& job, const L1& l1, uint64_t first, uint64_t last) {
    Pieces pieces(l1, job.direction);
    SlotCursor cursor(job, l1, job.skip + first);
    for (uint64_t i = first; i < last; ++i) {
        const uint64_t begin = cursor.start_of(job.skip + i);
        const uint32_t* ids = job.blocks.data() + i * job.planes->groups();
        for (const Plane& plane : job.planes->planes()) {
            if (ids[plane.group] == kNoBlock) continue;
            std::byte* on_gpu = plane.base + ids[plane.group] * plane.stride;
            cursor.visit(begin + plane.slot_offset, plane.run, [&](std::byte* at, uint64_t bytes) {
                pieces.add(at, on_gpu, bytes);
                on_gpu += bytes;
            });
        }
    }
    return pieces;
}

Pieces staged_pieces(const CopyJob& job, const L1& l1, uint64_t first, uint64_t last,
                     std::byte* staging) {
    Pieces pieces(l1, job.direction);
    SlotCursor cursor(job, l1, job.skip + first);
    const uint64_t block_bytes = job.planes->block_bytes();
    for (uint64_t i = first; i < last; ++i)
        cursor.visit(cursor.start_of(job.skip + i), block_bytes,
                     [&](std::byte* at, uint64_t bytes) {
                         pieces.add(at, staging, bytes);
                         staging += bytes;
                     });
    return pieces;
}

}  // namespace kvserver
