// journal.cpp: see journal.h.
#include "l2/journal.h"

#include <cstddef>
#include <cstring>

#include "l2/digest.h"
#include "l2/record.h"

namespace kvserver {

namespace {

constexpr uint32_t kPut = 1, kDrop = 2, kPutBehind = 3;  // the last one has a parent
constexpr uint32_t kMostExtents = 1 << 16;
constexpr size_t kKeyBytes = RecordName::kKeyBytes;

struct Fixed {
    uint64_t checksum, file_id, sequence, generation, age, meaning;
    uint32_t group, extents, namespace_bytes, kind;
    char key[kKeyBytes], parent[kKeyBytes];
};
static_assert(sizeof(Fixed) == 128);

constexpr size_t kUnchecked = sizeof(Fixed::checksum);

size_t padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

}  // namespace

size_t entry_bytes(size_t namespace_bytes, size_t extents) {
    return sizeof(Fixed) + padded(namespace_bytes) + extents * sizeof(Extent);
}

void append_entry(std::string& log, uint64_t file_id, uint64_t sequence,
                  const JournalEntry& entry) {
    Fixed fixed{0,
                file_id,
                sequence,
                entry.generation,
                entry.age,
                entry.meaning,
                entry.group,
                static_cast<uint32_t>(entry.extents.size()),
                static_cast<uint32_t>(entry.ns.size()),
                !entry.put             ? kDrop
                : entry.parent.empty() ? kPut
                                       : kPutBehind,
                {},
                {}};
    std::memcpy(fixed.key, entry.key.data(), kKeyBytes);
    if (!entry.parent.empty()) std::memcpy(fixed.parent, entry.parent.data(), kKeyBytes);
    const size_t begin = log.size();
    log.append(reinterpret_cast<const char*>(&fixed), sizeof(fixed));
    log.append(entry.ns);
    log.append(padded(entry.ns.size()) - entry.ns.size(), '\0');
    log.append(reinterpret_cast<const char*>(entry.extents.data()),
               entry.extents.size() * sizeof(Extent));
    const uint64_t sum = checksum(std::string_view(log).substr(begin + kUnchecked));
    std::memcpy(log.data() + begin, &sum, sizeof(sum));
}

size_t read_entry(std::string_view data, uint64_t file_id, uint64_t sequence, JournalEntry& entry) {
    if (data.size() < sizeof(Fixed)) return 0;
    Fixed fixed;
    std::memcpy(&fixed, data.data(), sizeof(fixed));
    const bool put = fixed.kind == kPut || fixed.kind == kPutBehind;
    if (fixed.file_id != file_id || fixed.sequence != sequence || (!put && fixed.kind != kDrop) ||
        fixed.extents > kMostExtents || (fixed.extents != 0) != put || fixed.namespace_bytes == 0 ||
        fixed.namespace_bytes > RecordName::kMostNamespaceBytes)
        return 0;
    const size_t bytes = entry_bytes(fixed.namespace_bytes, fixed.extents);
    if (data.size() < bytes) return 0;
    if (checksum(data.substr(kUnchecked, bytes - kUnchecked)) != fixed.checksum) return 0;
    const auto key_at = [&](size_t at) { return data.substr(at, kKeyBytes); };
    entry.put = put;
    entry.ns = data.substr(sizeof(Fixed), fixed.namespace_bytes);
    entry.generation = fixed.generation;
    entry.group = fixed.group;
    entry.key = key_at(offsetof(Fixed, key));
    entry.parent = {};
    if (fixed.kind == kPutBehind) entry.parent = key_at(offsetof(Fixed, parent));
    entry.meaning = fixed.meaning;
    entry.age = fixed.age;
    entry.extents.resize(fixed.extents);
    std::memcpy(entry.extents.data(), data.data() + bytes - fixed.extents * sizeof(Extent),
                fixed.extents * sizeof(Extent));
    return bytes;
}

}  // namespace kvserver
