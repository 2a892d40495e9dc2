// block_ids.h: the blocks that one request names, checked once.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "copy/plane_table.h"

namespace kvserver {

// The blocks of `planes` that a copy in `direction` reads or writes: for each position the id of
// one block of each group, or kNoBlock. All ids are below num_blocks() and different, a store has
// no kNoBlock, and a load has it for a part of a position's groups at most. A copy job is made of
// these only, so no device checks an id.
class BlockIds : public std::enable_shared_from_this<BlockIds> {
  public:
    // From `least` to `most` positions, packed as tables/block_runs.h describes. `null_block` is
    // the engine's id for no block. Throws std::invalid_argument with the reason; the sender may be
    // hostile.
    BlockIds(std::shared_ptr<PlaneTable> planes, Direction direction, std::string_view packed,
             uint64_t least, uint64_t most, uint32_t null_block);

    const std::shared_ptr<PlaneTable>& planes() const { return planes_; }
    Direction direction() const { return direction_; }
    uint64_t positions() const { return ids_.size() / planes_->groups(); }
    const std::vector<uint32_t>& all() const { return ids_; }
    // The ids of these chunks, `positions` each. Throws std::invalid_argument if one is not there.
    std::vector<uint32_t> of_chunks(const std::vector<uint64_t>& chunks, uint64_t positions) const;

  private:
    const std::shared_ptr<PlaneTable> planes_;
    const Direction direction_;
    std::vector<uint32_t> ids_;
};

}  // namespace kvserver
