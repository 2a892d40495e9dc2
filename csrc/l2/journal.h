// journal.h: the entries of a file tier's journal: which record lies where, and what was dropped.
//
// One entry, little-endian, a multiple of 8 bytes long:
//
//     0  u64 XXH3-64 of all that follows
//     8  u64 id of the journal file
//    16  u64 sequence: 0, 1, 2, ... in the file
//    24  u64 generation
//    32  u64 age: greater is younger
//    40  u64 meaning
//    48  u32 group
//    52  u32 extents: of a put at least one, of a drop none
//    56  u32 bytes of the namespace
//    60  u32 1 put, 2 drop, 3 put of a record with a parent; 4 and 5: as 1 and 3, of a unit, plus
//        256 for each record behind its first one
//    64  key, 32 bytes; of a unit that of its first record
//    96  key of the parent, 32 bytes; zero if there is none
//   128  the namespace, padded with zeros to 8, then the extents, each u32 page, u32 pages; of a
//        unit then the other keys. Its records have equal shares of the pages, in their order
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "copy/job.h"

namespace kvserver {

constexpr size_t kMostInUnit = 16;  // records

struct JournalEntry {
    bool put;
    std::string_view ns;
    uint64_t generation;
    uint32_t group;
    std::string_view key;
    std::string_view others;  // of a put of a unit: the keys behind the first one, end to end
    std::string_view parent;  // empty: none
    uint64_t meaning;         // of coverage and lengths
    uint64_t age;
    std::vector<Extent> extents;
};

size_t entry_bytes(size_t namespace_bytes, size_t extents, size_t records);
void append_entry(std::string& log, uint64_t file_id, uint64_t sequence, const JournalEntry& entry);
// The bytes of the entry that `data` begins with, and that entry, which refers to `data`; 0 if
// there is no whole entry of this file and sequence.
size_t read_entry(std::string_view data, uint64_t file_id, uint64_t sequence, JournalEntry& entry);

}  // namespace kvserver
