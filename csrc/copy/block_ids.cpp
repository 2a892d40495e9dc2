// block_ids.cpp: the checks of the blocks that a request names.
#include "copy/block_ids.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "tables/block_runs.h"

namespace kvserver {

namespace {

using Ids = std::vector<uint32_t>;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string name(uint32_t id) { return "block id " + std::to_string(id); }

Ids unpack(std::string_view packed, uint64_t least, uint64_t most) {
    const std::string expected =
        (least == most ? "" : std::to_string(least) + " to ") + std::to_string(most) + " blocks";
    Ids ids;
    try {
        ids = unpack_blocks(packed, most);
    } catch (const std::invalid_argument& error) {
        refuse("block_ids of " + std::to_string(packed.size()) + " bytes cannot be unpacked: " +
               error.what() + "; " + expected + " belong to these keys");
    }
    if (ids.size() < least)
        refuse("block_ids holds " + std::to_string(4 * ids.size()) + " bytes when unpacked; " +
               expected + " of 4 bytes each belong to these keys");
    return ids;
}

void check_different(Ids ids) {
    std::ranges::sort(ids);
    const auto twice = std::ranges::adjacent_find(ids);
    if (twice != ids.end()) refuse(name(*twice) + " is named more than once");
}

}  // namespace

BlockIds::BlockIds(std::shared_ptr<PlaneTable> planes, Direction direction, std::string_view packed,
                   uint64_t least, uint64_t most, uint32_t null_block)
    : planes_(std::move(planes)),
      direction_(direction),
      ids_(unpack(packed, least * planes_->groups(), most * planes_->groups())) {
    const auto groups = static_cast<std::ptrdiff_t>(planes_->groups());
    const bool may_have_holes = groups > 1 && direction_ == Direction::kLoad;
    Ids named;  // without holes
    for (uint32_t& id : ids_) {
        const bool null = id == null_block;
        if (!null && (id >= planes_->num_blocks() || id == kNoBlock))
            refuse(name(id) + " is out of range: the worker registered " +
                   std::to_string(planes_->num_blocks()) + " blocks");
        if (null && may_have_holes)
            id = kNoBlock;
        else
            named.push_back(id);
    }
    check_different(named);
    if (std::ranges::find(named, null_block) != named.end())
        refuse(name(null_block) + " is the null block: it is never stored or loaded");
    if (std::ssize(ids_) % groups != 0)
        refuse(std::to_string(ids_.size()) + " block ids are no whole positions of " +
               std::to_string(groups) + " groups");
    for (auto at = ids_.begin(); at != ids_.end(); at += groups)
        if (std::count(at, at + groups, kNoBlock) == groups)
            refuse("a position has the null block, id " + std::to_string(null_block) +
                   ", in every group");
}

Ids BlockIds::of_chunks(const std::vector<uint64_t>& chunks, uint64_t positions) const {
    const uint64_t size = positions * planes_->groups();
    Ids ids;
    ids.reserve(chunks.size() * size);
    for (const uint64_t chunk : chunks) {
        if (size == 0 || chunk >= ids_.size() / size)
            refuse("a copy job names chunk " + std::to_string(chunk) + " of " +
                   std::to_string(this->positions()) + " positions");
        const auto first = ids_.begin() + static_cast<std::ptrdiff_t>(chunk * size);
        ids.insert(ids.end(), first, first + static_cast<std::ptrdiff_t>(size));
    }
    return ids;
}

}  // namespace kvserver
