// record.h: one object of L1 as L2 stores it, all ranks together: a header of kHeaderBytes, then
// the slots in the order of their ranks.
//
// The header, little-endian; what is not named is zero:
//
//     0  magic "KVSL2REC"        80  u32 bytes of the namespace
//     8  u32 format              88  the namespace, up to 128 bytes
//    12  u32 kHeaderBytes       256  XXH3-128 of the header and of all slots' bytes
//    16  u32 group              272  64 bytes for a keyed seal; zero, and no part of the digest
//    20  u32 slots              512  u64 bytes of each slot
//    24  u64 generation
//    32  key, 32 bytes
//    64  coverage, 16 bytes
//
// The digest reads its own 16 bytes as zero. In a file every slot is padded with zeros to
// kHeaderBytes, for direct I/O; elsewhere slots lie end to end. Padding is no part of the digest.
//
// The group is in the header because the groups of one chunk share namespace and key, and often
// their size: without it one group's record would verify as another's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "copy/job.h"
#include "l2/digest.h"

namespace kvserver {

constexpr uint64_t kHeaderBytes = 4096;
constexpr uint32_t kRecordFormat = 1;

struct RecordName {
    std::string ns;  // the namespace, 1 to kMostNamespaceBytes
    uint32_t group;
    std::string key;  // kKeyBytes
    static constexpr size_t kMostNamespaceBytes = 128;
    static constexpr size_t kKeyBytes = 32;
};

// The result of comparing a stored header with the wanted one.
enum class RecordMatch : uint8_t {
    kMatch,
    kOther,    // intact as far as it can be known, with another coverage, generation or lengths
    kCorrupt,  // no record, one of another name or format, or bytes that were changed
};

// Bytes of L1 that count, in order.
struct MemoryPiece {
    std::byte* data;
    uint64_t bytes;
};

// An object and the memory of its slots. Immutable: any thread may use it. The memory is the
// caller's to keep allocated, and to keep others from writing to.
class Record : public std::enable_shared_from_this<Record> {
  public:
    // Throws std::invalid_argument unless the slots' extents lie in L1 and have room for
    // `slot_bytes`, and the header has room for all.
    Record(const L1& l1, RecordName name, std::string_view coverage, uint64_t generation,
           const std::vector<std::vector<Extent>>& slots, const std::vector<uint64_t>& slot_bytes);

    uint64_t bytes() const { return bytes_; }  // of the slots
    uint64_t packed_bytes() const { return kHeaderBytes + bytes_; }
    uint64_t file_bytes() const { return file_bytes_; }  // with padding
    const std::vector<std::vector<MemoryPiece>>& slots() const { return slots_; }

    // The header without its digest, kHeaderBytes.
    std::string_view header() const { return header_; }
    // Put the digest of a header into it. REQUIRES: kHeaderBytes at `header`.
    static void seal(std::byte* header, const DigestBytes& digest);
    // Compare a stored header; its digest is not checked yet. REQUIRES: kHeaderBytes.
    RecordMatch match(const std::byte* header) const;
    static DigestBytes digest_in(const std::byte* header);

    // Gather: the header with its digest, and the slots end to end. REQUIRES: packed_bytes().
    void pack(std::byte* to) const;
    // Scatter a packed record, and match what has been scattered: only after kMatch does it count.
    // Of one whose header or length is another, nothing is.
    RecordMatch unpack(std::span<const std::byte> from) const;
    // The same of a record that arrives in pieces, in any order: copy the bytes from byte `at` of
    // the packed record on to `header` and L1. Throws std::invalid_argument if they end behind it.
    // REQUIRES: kHeaderBytes at `header`.
    void unpack_piece(std::byte* header, uint64_t at, std::span<const std::byte> piece) const;
    // Match the header, and with its digest what L1 has now: what was written counts only after
    // kMatch. REQUIRES: kHeaderBytes at `header`; nothing else writes to the slots.
    RecordMatch match_written(const std::byte* header) const;

  private:
    const std::shared_ptr<HostRegion> region_;  // kept mapped
    std::string header_;
    std::vector<std::vector<MemoryPiece>> slots_;
    uint64_t bytes_ = 0;
    uint64_t file_bytes_ = kHeaderBytes;
};

}  // namespace kvserver
