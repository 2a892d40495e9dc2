// pieces.h: what a batch of a GPU's lane copies between L1 and GPU memory, piece by piece.
#pragma once

#include <vector>

#include "gpu_copier.h"

namespace kvserver {

// Pieces between L1 and the GPU, neighbours merged, none across two registrations of L1.
class Pieces {
  public:
    Pieces(const L1& l1, Direction direction)
        : base_(l1.region->data()),
          pinned_end_(base_ + l1.region->pinned_bytes),
          direction_(direction) {}

    void add(std::byte* in_l1, std::byte* on_gpu, uint64_t bytes);

    const std::vector<Piece>& list() const { return list_; }
    uint64_t unpinned() const { return unpinned_; }
    bool short_runs() const;

  private:
    void append(const Piece& piece, bool begins_registration);

    std::byte* const base_;
    std::byte* const pinned_end_;
    const Direction direction_;
    std::vector<Piece> list_;
    uint64_t unpinned_ = 0;
};

// Of positions first..last-1 of a job: each run of each block by itself.
Pieces run_pieces(const CopyJob& job, const L1& l1, uint64_t first, uint64_t last);

// The same positions, packed end to end in `staging`.
Pieces staged_pieces(const CopyJob& job, const L1& l1, uint64_t first, uint64_t last,
                     std::byte* staging);

}  // namespace kvserver
