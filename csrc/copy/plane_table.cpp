// plane_table.cpp: planes, checked against the memory that they lie in.
#include "copy/plane_table.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvserver {

PlaneTable::PlaneTable(std::vector<std::shared_ptr<Mapping>> memories, const std::vector<Row>& rows,
                       uint64_t num_blocks)
    : memories_(std::move(memories)), num_blocks_(num_blocks) {
    if (num_blocks == 0) throw std::invalid_argument("a plane table needs at least one block");
    std::vector<const void*> allocation_of;
    for (size_t i = 0; i < rows.size(); ++i) {
        const Row& row = rows[i];
        const std::string name = "plane " + std::to_string(i);
        if (row.memory >= memories_.size())
            throw std::invalid_argument(name + " names memory " + std::to_string(row.memory) +
                                        " of " + std::to_string(memories_.size()));
        const Mapping& memory = *memories_[row.memory];
        if (!memory.mapped()) throw std::invalid_argument(name + ": its memory is not mapped");
        if (row.run == 0) throw std::invalid_argument(name + " has a run of 0 bytes");
        // 128-bit so that hostile numbers cannot wrap around the bound.
        const unsigned __int128 end = static_cast<unsigned __int128>(row.offset) +
                                      static_cast<unsigned __int128>(num_blocks - 1) * row.stride +
                                      row.run;
        if (end > memory.size())
            throw std::invalid_argument(
                name + " ends outside its memory of " + std::to_string(memory.size()) +
                " bytes (offset " + std::to_string(row.offset) + ", stride " +
                std::to_string(row.stride) + ", run " + std::to_string(row.run) + ", " +
                std::to_string(num_blocks) + " blocks)");
        if (num_blocks > 1 && row.stride < row.run)
            throw std::invalid_argument(name + " has blocks that overlap: stride " +
                                        std::to_string(row.stride) + " < run " +
                                        std::to_string(row.run));
        if (row.group >= kMaxGroups)
            throw std::invalid_argument(name + " is of group " + std::to_string(row.group) +
                                        ", there are at most " + std::to_string(kMaxGroups));
        if (row.group >= group_bytes_.size()) group_bytes_.resize(row.group + 1);
        group_bytes_[row.group] += row.run;
        planes_.push_back(
            {memory.data() + row.offset, row.stride, row.run, block_bytes_, row.group});
        allocation_of.push_back(memory.allocation());
        block_bytes_ += row.run;
    }
    if (planes_.empty()) throw std::invalid_argument("a plane table needs at least one plane");
    for (size_t group = 0; group < group_bytes_.size(); ++group)
        if (group_bytes_[group] == 0)
            throw std::invalid_argument("no plane is of group " + std::to_string(group) + " of " +
                                        std::to_string(group_bytes_.size()));
    series_ = plane_series(planes_, allocation_of);
}

bool PlaneTable::intact() const {
    for (const auto& memory : memories_)
        if (!memory->intact()) return false;
    return true;
}

bool PlaneTable::on_host() const {
    return std::all_of(memories_.begin(), memories_.end(),
                       [](const auto& memory) { return memory->on_host(); });
}

}  // namespace kvserver
