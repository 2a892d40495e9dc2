// journal.cpp: see journal.h.
#include "l2/journal.h"

#include <cstddef>
#include <cstring>

#include "l2/digest.h"
#include "l2/extents.h"
#include "l2/record.h"

namespace kvserver {

namespace {

// kPutBehind and kUnitBehind have a parent. Of a unit the bits from kOthersShift on count the
// records behind the first one.
constexpr uint32_t kPut = 1, kDrop = 2, kPutBehind = 3, kUnit = 4, kUnitBehind = 5;
constexpr unsigned kOthersShift = 8;
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

uint32_t kind_of(const JournalEntry& entry) {
    if (!entry.put) return kDrop;
    const auto others = static_cast<uint32_t>(entry.others.size() / kKeyBytes);
    if (others == 0) return entry.parent.empty() ? kPut : kPutBehind;
    return (entry.parent.empty() ? kUnit : kUnitBehind) | others << kOthersShift;
}

}  // namespace

size_t entry_bytes(size_t namespace_bytes, size_t extents, size_t records) {
    return sizeof(Fixed) + padded(namespace_bytes) + extents * sizeof(Extent) +
           (records - 1) * kKeyBytes;
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
                kind_of(entry),
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
    log.append(entry.others);
    const uint64_t sum = checksum(std::string_view(log).substr(begin + kUnchecked));
    std::memcpy(log.data() + begin, &sum, sizeof(sum));
}

size_t read_entry(std::string_view data, uint64_t file_id, uint64_t sequence, JournalEntry& entry) {
    if (data.size() < sizeof(Fixed)) return 0;
    Fixed fixed;
    std::memcpy(&fixed, data.data(), sizeof(fixed));
    const uint32_t kind = fixed.kind & ((1 << kOthersShift) - 1);
    const size_t others = fixed.kind >> kOthersShift;
    const bool put = kind != kDrop;
    if (fixed.file_id != file_id || fixed.sequence != sequence || kind < kPut ||
        kind > kUnitBehind || (kind >= kUnit) != (others != 0) || others >= kMostInUnit ||
        fixed.extents > kMostExtents || (fixed.extents != 0) != put || fixed.namespace_bytes == 0 ||
        fixed.namespace_bytes > RecordName::kMostNamespaceBytes)
        return 0;
    const size_t bytes = entry_bytes(fixed.namespace_bytes, fixed.extents, 1 + others);
    if (data.size() < bytes) return 0;
    if (checksum(data.substr(kUnchecked, bytes - kUnchecked)) != fixed.checksum) return 0;
    const auto key_at = [&](size_t at) { return data.substr(at, kKeyBytes); };
    entry.put = put;
    entry.ns = data.substr(sizeof(Fixed), fixed.namespace_bytes);
    entry.generation = fixed.generation;
    entry.group = fixed.group;
    entry.key = key_at(offsetof(Fixed, key));
    entry.others = data.substr(bytes - others * kKeyBytes, others * kKeyBytes);
    entry.parent = {};
    if (kind == kPutBehind || kind == kUnitBehind) entry.parent = key_at(offsetof(Fixed, parent));
    entry.meaning = fixed.meaning;
    entry.age = fixed.age;
    entry.extents.resize(fixed.extents);
    std::memcpy(entry.extents.data(), data.data() + entry_bytes(fixed.namespace_bytes, 0, 1),
                fixed.extents * sizeof(Extent));
    return page_count(entry.extents) % (1 + others) != 0 ? 0 : bytes;
}

}  // namespace kvserver
