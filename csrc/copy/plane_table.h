// plane_table.h: the planes of one registration.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "copy/mapping.h"
#include "copy/plane_series.h"

namespace kvserver {

constexpr uint64_t kMaxGroups = 64;

// The planes of one registration, bounds-checked against the mappings once, here.
// Keeps its mappings alive. REQUIRES of an unmap: every job on the table has ended.
//
// Planes belong to KV cache groups 0..groups()-1. Every group has a block of its own at each
// position, and their planes may share memory. In a slot, a position's bytes are those of all
// planes in order, whatever their group.
class PlaneTable : public std::enable_shared_from_this<PlaneTable> {
  public:
    // One row per plane: index into `memories`, byte offset, stride, run, group.
    struct Row {
        uint64_t memory, offset, stride, run, group = 0;
    };
    // Throws std::invalid_argument naming the plane and the numbers.
    PlaneTable(std::vector<std::shared_ptr<Mapping>> memories, const std::vector<Row>& rows,
               uint64_t num_blocks);

    const std::vector<Plane>& planes() const { return planes_; }
    const std::vector<PlaneSeries>& series() const { return series_; }  // the same planes
    uint64_t num_blocks() const { return num_blocks_; }
    uint64_t block_bytes() const { return block_bytes_; }  // of one position, over all groups
    uint64_t groups() const { return group_bytes_.size(); }
    uint64_t group_bytes(uint64_t group) const { return group_bytes_[group]; }
    bool intact() const;
    bool on_host() const;  // all of it
    const std::vector<std::shared_ptr<Mapping>>& memories() const { return memories_; }

  private:
    std::vector<std::shared_ptr<Mapping>> memories_;
    std::vector<Plane> planes_;
    std::vector<PlaneSeries> series_;
    uint64_t num_blocks_;
    uint64_t block_bytes_ = 0;
    std::vector<uint64_t> group_bytes_;
};

}  // namespace kvserver
