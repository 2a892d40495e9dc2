// pieces.cpp: see pieces.h.
#include "gpu/pieces.h"

#include <algorithm>
#include <utility>

#include "copy/slot_cursor.h"

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

void Pieces::add(const Rows& rows) {
    if (rows.count == 1) return add(rows.in_l1, rows.on_gpu, rows.bytes);
    if (rows.l1_pitch == rows.bytes && rows.gpu_pitch == rows.bytes)
        return add(rows.in_l1, rows.on_gpu, rows.bytes * rows.count);
    if (direction_ == Direction::kStore)
        list_.push_back(
            {rows.in_l1, rows.on_gpu, rows.bytes, rows.count, rows.l1_pitch, rows.gpu_pitch});
    else
        list_.push_back(
            {rows.on_gpu, rows.in_l1, rows.bytes, rows.count, rows.gpu_pitch, rows.l1_pitch});
    if (rows.in_l1 + (rows.count - 1) * rows.l1_pitch + rows.bytes > pinned_end_)
        unpinned_ += rows.bytes * rows.count;
}

bool Pieces::one_registration(const std::byte* in_l1, uint64_t bytes) const {
    const auto offset = static_cast<uint64_t>(in_l1 - base_);
    return offset / HostRegion::kPinBytes == (offset + bytes - 1) / HostRegion::kPinBytes;
}

void Pieces::append(const Piece& piece, bool begins_registration) {
    if (!list_.empty() && !begins_registration) {
        Piece& last = list_.back();
        if (last.rows == 1 && last.to + last.bytes == piece.to &&
            last.from + last.bytes == piece.from) {
            last.bytes += piece.bytes;
            return;
        }
    }
    list_.push_back(piece);
}

namespace {

// What run_pieces() walks: the blocks of one batch, and where each lies in L1 if it lies there in
// one piece.
class Walk {
  public:
    Walk(const CopyJob& job, const L1& l1, uint64_t first, uint64_t last)
        : job_(job), l1_(l1), first_(first), pieces_(l1, job.direction) {
        SlotCursor cursor(job, l1, job.skip + first);
        const uint64_t bytes = job.planes->block_bytes();
        for (uint64_t i = first; i < last; ++i)
            places_.push_back(whole(cursor, cursor.start_of(job.skip + i), bytes));
    }

    void add(const PlaneSeries& series) {
        for (uint64_t i = 0; i < places_.size();) {
            if (id_of(series, i) == kNoBlock) {
                ++i;
            } else if (places_[i] == nullptr) {
                add_broken(series, i++);
            } else {
                const uint64_t blocks = neighbours(series, i);
                add_whole(series, i, blocks);
                i += blocks;
            }
        }
    }

    Pieces drain_pieces() { return std::move(pieces_); }

  private:
    // Its first byte; null if it is cut by the end of an extent or a registration.
    std::byte* whole(SlotCursor& cursor, uint64_t offset, uint64_t bytes) const {
        std::byte* place = nullptr;
        cursor.visit(offset, bytes, [&](std::byte* at, uint64_t piece) {
            if (piece == bytes && pieces_.one_registration(at, bytes)) place = at;
        });
        return place;
    }

    uint32_t id_of(const PlaneSeries& series, uint64_t i) const {
        return job_.blocks[(first_ + i) * job_.planes->groups() + series.first.group];
    }

    // How many blocks from here on follow each other in L0 and in L1.
    uint64_t neighbours(const PlaneSeries& series, uint64_t i) const {
        const uint64_t bytes = job_.planes->block_bytes();
        if (series.first.stride > kMaxPitch || bytes > kMaxPitch) return 1;
        uint64_t n = 1;
        while (i + n < places_.size() && id_of(series, i + n) == id_of(series, i) + n &&
               places_[i + n] == places_[i] + n * bytes &&
               pieces_.one_registration(places_[i], (n + 1) * bytes))
            ++n;
        return n;
    }

    void add_whole(const PlaneSeries& series, uint64_t i, uint64_t blocks) {
        const Plane& plane = series.first;
        std::byte* in_l1 = places_[i] + plane.slot_offset;
        std::byte* on_gpu = plane.base + id_of(series, i) * plane.stride;
        if (blocks > series.count) {
            for (uint64_t row = 0; row < series.count; ++row)
                pieces_.add({in_l1 + row * series.slot_pitch, on_gpu + row * series.pitch,
                             plane.run, blocks, job_.planes->block_bytes(), plane.stride});
            return;
        }
        for (uint64_t block = 0; block < blocks; ++block)
            pieces_.add({in_l1 + block * job_.planes->block_bytes(), on_gpu + block * plane.stride,
                         plane.run, series.count, series.slot_pitch, series.pitch});
    }

    // The rows that lie whole and equally spaced together, those that are cut in pieces.
    void add_broken(const PlaneSeries& series, uint64_t i) {
        const Plane& plane = series.first;
        std::byte* on_gpu = plane.base + id_of(series, i) * plane.stride;
        SlotCursor cursor(job_, l1_, job_.skip + first_ + i);
        uint64_t offset = cursor.start_of(job_.skip + first_ + i) + plane.slot_offset;
        Pieces::Rows rows{nullptr, nullptr, plane.run, 0, series.slot_pitch, series.pitch};
        for (uint64_t row = 0; row < series.count; ++row) {
            SlotCursor at_row = cursor;
            std::byte* place = whole(at_row, offset, plane.run);
            const bool follows =
                rows.count > 0 && place == rows.in_l1 + rows.count * rows.l1_pitch &&
                pieces_.one_registration(rows.in_l1, rows.count * rows.l1_pitch + plane.run);
            if (!follows) {
                if (rows.count > 0) pieces_.add(rows);
                rows.in_l1 = place;
                rows.on_gpu = on_gpu;
                rows.count = 0;
            }
            if (place != nullptr) {
                ++rows.count;
            } else {
                std::byte* part = on_gpu;
                cursor.visit(offset, plane.run, [&](std::byte* at, uint64_t bytes) {
                    pieces_.add(at, part, bytes);
                    part += bytes;
                });
            }
            on_gpu += series.pitch;
            offset += series.slot_pitch;
        }
        if (rows.count > 0) pieces_.add(rows);
    }

    const CopyJob& job_;
    const L1& l1_;
    const uint64_t first_;
    Pieces pieces_;
    std::vector<std::byte*> places_;  // by position of the batch
};

}  // namespace

Pieces run_pieces(const CopyJob& job, const L1& l1, uint64_t first, uint64_t last) {
    Walk walk(job, l1, first, last);
    for (const PlaneSeries& series : job.planes->series()) walk.add(series);
    return walk.drain_pieces();
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
