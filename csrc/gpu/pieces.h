// pieces.h: the pieces that one batch of a GPU's lane copies between L1 and GPU memory. No CUDA in
// here: positions in, descriptors of copies out.
#pragma once

#include <vector>

#include "gpu/gpu_device.h"

namespace kvserver {

// Pieces between L1 and the GPU, neighbours merged, none across two registrations of L1.
class Pieces {
  public:
    Pieces(const L1& l1, Direction direction)
        : base_(l1.region->data()),
          pinned_end_(base_ + l1.region->pinned_bytes),
          direction_(direction) {}

    void add(std::byte* in_l1, std::byte* on_gpu, uint64_t bytes);

    struct Rows {
        std::byte *in_l1, *on_gpu;
        uint64_t bytes, count, l1_pitch, gpu_pitch;
    };
    // REQUIRES: one_registration() from its first to its last byte.
    void add(const Rows& rows);

    bool one_registration(const std::byte* in_l1, uint64_t bytes) const;

    const std::vector<Piece>& list() const { return list_; }
    uint64_t unpinned() const { return unpinned_; }

  private:
    void append(const Piece& piece, bool begins_registration);

    std::byte* const base_;
    std::byte* const pinned_end_;
    const Direction direction_;
    std::vector<Piece> list_;
    uint64_t unpinned_ = 0;
};

// The pieces of positions first..last-1 of a job, with each run at its place in L0. A series of
// planes is one piece a block. Where more blocks than planes follow each other, each plane is one
// piece for all of them. Where an extent or a registration ends inside of a block, its rows on
// either side are pieces of their own.
Pieces run_pieces(const CopyJob& job, const L1& l1, uint64_t first, uint64_t last);

// The same positions, packed end to end in `staging`.
Pieces staged_pieces(const CopyJob& job, const L1& l1, uint64_t first, uint64_t last,
                     std::byte* staging);

}  // namespace kvserver
