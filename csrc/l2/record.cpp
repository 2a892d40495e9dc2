// record.cpp: see record.h.
#include "l2/record.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "copy/host_copy.h"

namespace kvserver {

namespace {

static_assert(std::endian::native == std::endian::little, "headers are little-endian");

constexpr std::string_view kMagic = "KVSL2REC";
constexpr size_t kFormatAt = 8, kSizeAt = 12, kGroupAt = 16, kSlotsAt = 20, kGenerationAt = 24;
constexpr size_t kKeyAt = 32, kCoverageAt = 64, kNamespaceBytesAt = 80, kNamespaceAt = 88;
constexpr size_t kDigestAt = 256, kSealAt = 272, kSealBytes = 64, kLengthsAt = 512;
constexpr size_t kCoverageBytes = 16;
constexpr uint64_t kStepBytes = 4 << 10;  // stays in the first cache; more, or less, is slower
constexpr size_t kMostSlots = (kHeaderBytes - kLengthsAt) / sizeof(uint64_t);

template <typename T>
void put(std::string& header, size_t at, T value) {
    std::memcpy(header.data() + at, &value, sizeof(value));
}

void put(std::string& header, size_t at, std::string_view value) {
    std::memcpy(header.data() + at, value.data(), value.size());
}

uint64_t padded(uint64_t bytes) { return (bytes + kHeaderBytes - 1) / kHeaderBytes * kHeaderBytes; }

std::vector<MemoryPiece> pieces_of(const L1& l1, const std::vector<Extent>& extents,
                                   uint64_t bytes) {
    std::vector<MemoryPiece> pieces;
    uint64_t left = bytes;
    for (const Extent& extent : extents) {
        if (extent.count == 0 ||
            uint64_t{extent.first} + extent.count > l1.region->size() / l1.page_bytes)
            throw std::invalid_argument(std::to_string(extent.count) + " pages from page " +
                                        std::to_string(extent.first) + " on do not lie in L1");
        const uint64_t part = std::min(left, uint64_t{extent.count} * l1.page_bytes);
        if (part != 0) pieces.push_back({l1.region->data() + extent.first * l1.page_bytes, part});
        left -= part;
    }
    if (left != 0) throw std::invalid_argument("a slot has too few pages for its bytes");
    return pieces;
}

void check_name(const RecordName& name, std::string_view coverage) {
    if (name.ns.empty() || name.ns.size() > RecordName::kMostNamespaceBytes)
        throw std::invalid_argument("a namespace has 1 to 128 bytes");
    if (name.key.size() != RecordName::kKeyBytes) throw std::invalid_argument("a key has 32 bytes");
    if (coverage.size() != kCoverageBytes) throw std::invalid_argument("a coverage has 16 bytes");
}

bool equal(const std::byte* header, std::string_view wanted, size_t begin, size_t end) {
    return std::memcmp(header + begin, wanted.data() + begin, end - begin) == 0;
}

// The copy stays in the cache, for who reads it next.
void gather_and_digest(std::byte* to, const std::byte* from, uint64_t bytes, Digest& digest) {
    for (uint64_t done = 0; done < bytes; done += kStepBytes) {
        const uint64_t step = std::min(kStepBytes, bytes - done);
        digest.update(from + done, step);
        std::memcpy(to + done, from + done, step);
    }
}

// Past the cache, as the copier's. Others may write to `from` meanwhile: it is read once, and what
// is digested is what L1 gets.
void scatter_and_digest(std::byte* to, const std::byte* from, uint64_t bytes, Digest& digest) {
    alignas(64) std::array<std::byte, kStepBytes> piece;
    for (uint64_t done = 0; done < bytes; done += kStepBytes) {
        const uint64_t step = std::min(kStepBytes, bytes - done);
        std::memcpy(piece.data(), from + done, step);
        digest.update(piece.data(), step);
        copy_bytes(to + done, piece.data(), step);
    }
}

}  // namespace

Record::Record(const L1& l1, RecordName name, std::string_view coverage, uint64_t generation,
               const std::vector<std::vector<Extent>>& slots,
               const std::vector<uint64_t>& slot_bytes)
    : region_(l1.region), header_(kHeaderBytes, '\0') {
    check_l1(l1);
    check_name(name, coverage);
    if (slots.empty() || slots.size() > kMostSlots || slots.size() != slot_bytes.size())
        throw std::invalid_argument("a record has 1 to 448 slots, and each has its bytes");
    put(header_, 0, kMagic);
    put(header_, kFormatAt, kRecordFormat);
    put(header_, kSizeAt, static_cast<uint32_t>(kHeaderBytes));
    put(header_, kGroupAt, name.group);
    put(header_, kSlotsAt, static_cast<uint32_t>(slots.size()));
    put(header_, kGenerationAt, generation);
    put(header_, kKeyAt, std::string_view(name.key));
    put(header_, kCoverageAt, coverage);
    put(header_, kNamespaceBytesAt, static_cast<uint32_t>(name.ns.size()));
    put(header_, kNamespaceAt, std::string_view(name.ns));
    for (size_t i = 0; i < slots.size(); ++i) {
        if (slot_bytes[i] == 0) throw std::invalid_argument("a slot without bytes");
        slots_.push_back(pieces_of(l1, slots[i], slot_bytes[i]));
        put(header_, kLengthsAt + i * sizeof(uint64_t), slot_bytes[i]);
        bytes_ += slot_bytes[i];
        file_bytes_ += padded(slot_bytes[i]);
    }
}

void Record::seal(std::byte* header, const DigestBytes& digest) {
    std::memcpy(header + kDigestAt, digest.data(), digest.size());
}

DigestBytes Record::digest_in(const std::byte* header) {
    DigestBytes digest;
    std::memcpy(digest.data(), header + kDigestAt, digest.size());
    return digest;
}

RecordMatch Record::match(const std::byte* header) const {
    // Magic, format and sizes; group; key; namespace and zeros up to the digest.
    const bool named = equal(header, header_, 0, kSlotsAt) &&
                       equal(header, header_, kKeyAt, kCoverageAt) &&
                       equal(header, header_, kNamespaceBytesAt, kDigestAt) &&
                       equal(header, header_, kSealAt + kSealBytes, kLengthsAt);
    if (!named) return RecordMatch::kCorrupt;
    const bool same = equal(header, header_, kSlotsAt, kKeyAt) &&
                      equal(header, header_, kCoverageAt, kNamespaceBytesAt) &&
                      equal(header, header_, kLengthsAt, kHeaderBytes);
    return same ? RecordMatch::kMatch : RecordMatch::kOther;
}

void Record::pack(std::byte* to) const {
    std::memcpy(to, header_.data(), kHeaderBytes);
    Digest digest;
    digest.update(to, kHeaderBytes);
    std::byte* at = to + kHeaderBytes;
    for (const auto& slot : slots_) {
        for (const MemoryPiece& piece : slot) {
            gather_and_digest(at, piece.data, piece.bytes, digest);
            at += piece.bytes;
        }
    }
    seal(to, digest.value());
}

RecordMatch Record::unpack(std::span<const std::byte> from) const {
    if (from.size() < kHeaderBytes) return RecordMatch::kCorrupt;
    const RecordMatch found = match(from.data());
    if (found != RecordMatch::kMatch) return found;
    if (from.size() != packed_bytes()) return RecordMatch::kCorrupt;
    const DigestBytes expected = digest_in(from.data());  // once: others may write to `from`
    Digest digest;
    digest.update(header_.data(), header_.size());
    const std::byte* at = from.data() + kHeaderBytes;
    for (const auto& slot : slots_) {
        for (const MemoryPiece& piece : slot) {
            scatter_and_digest(piece.data, at, piece.bytes, digest);
            at += piece.bytes;
        }
    }
    finish_copies();
    return digest.value() == expected ? RecordMatch::kMatch : RecordMatch::kCorrupt;
}

void Record::unpack_piece(std::byte* header, uint64_t at, std::span<const std::byte> piece) const {
    if (at > packed_bytes() || piece.size() > packed_bytes() - at)
        throw std::invalid_argument("the piece ends behind the record");
    const auto take = [&](std::byte* to, uint64_t begin, uint64_t bytes) {  // of the record's bytes
        if (piece.empty() || at >= begin + bytes) return;
        const uint64_t part = std::min<uint64_t>(piece.size(), begin + bytes - at);
        copy_bytes(to + (at - begin), piece.data(), part);
        at += part;
        piece = piece.subspan(part);
    };
    take(header, 0, kHeaderBytes);
    uint64_t begin = kHeaderBytes;
    for (const auto& slot : slots_) {
        for (const MemoryPiece& memory : slot) {
            take(memory.data, begin, memory.bytes);
            begin += memory.bytes;
        }
    }
    finish_copies();
}

RecordMatch Record::match_written(const std::byte* header) const {
    if (const RecordMatch found = match(header); found != RecordMatch::kMatch) return found;
    Digest digest;
    digest.update(header_.data(), header_.size());
    for (const auto& slot : slots_)
        for (const MemoryPiece& memory : slot) digest.update(memory.data, memory.bytes);
    return digest.value() == digest_in(header) ? RecordMatch::kMatch : RecordMatch::kCorrupt;
}

}  // namespace kvserver
