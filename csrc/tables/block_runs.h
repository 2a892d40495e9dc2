// block_runs.h: lists of block ids in few bytes.
//
// An engine allocates its blocks in ascending order at first and in ascending or descending
// stretches later, so most lists are a few runs; a fully shuffled list costs about two bytes an id.
// Forms, each number a varint (7 bits a byte, low ones first, the top bit is set if more follow):
//   nothing    no ids
//   0, then for each id    zigzag(id - the id before it)
//   1, then for each run   zigzag(its first id - the last id before it), length << 1 | descending
// The first id is a difference from 0. pack_blocks() uses the shorter form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvserver {

std::string pack_blocks(const std::vector<uint32_t>& ids);

// Throws std::invalid_argument, naming where and what, on anything that is not one of the forms
// with at most `most` ids. The sender may be hostile: the result uses at most 4 * most bytes of
// memory.
std::vector<uint32_t> unpack_blocks(std::string_view packed, size_t most);

}  // namespace kvserver
