// file_io.cpp: see file_io.h.
#include "l2/file_io.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>

#include "l2/extents.h"

namespace kvserver {

namespace {

// Bytes of one call: large enough for a disk's full speed, small enough that cancels and what is
// hashed stay near.
constexpr uint64_t kPieceBytes = 1 << 20;
constexpr size_t kMostVectors = 256;

ssize_t no_signal(ssize_t moved) { return moved < 0 && errno == EINTR ? 0 : moved; }

// Memory that is contiguous in the file: whole kHeaderBytes, of which the first `counted` are the
// object's.
struct Segment {
    std::byte* data;
    uint64_t bytes;
    uint64_t counted;
};

// One buffer for the header and the ends of slots.
class Layout {
  public:
    explicit Layout(const Record& record) {
        const size_t pages = 1 + record.slots().size();
        buffer_.reset(
            static_cast<std::byte*>(std::aligned_alloc(kHeaderBytes, pages * kHeaderBytes)));
        if (!buffer_) throw std::bad_alloc();
        std::memset(buffer_.get(), 0, pages * kHeaderBytes);
        std::memcpy(header(), record.header().data(), kHeaderBytes);
        segments.push_back({header(), kHeaderBytes, 0});
        std::byte* end = header() + kHeaderBytes;
        for (const auto& slot : record.slots()) {
            for (const MemoryPiece& piece : slot) {
                const uint64_t whole = piece.bytes / kHeaderBytes * kHeaderBytes;
                if (whole != 0) segments.push_back({piece.data, whole, whole});
                if (whole == piece.bytes) continue;
                const uint64_t rest = piece.bytes - whole;
                segments.push_back({end, kHeaderBytes, rest});
                ends_.push_back({piece.data + whole, end, rest});
                end += kHeaderBytes;
            }
        }
    }

    std::byte* header() const { return buffer_.get(); }
    void ends_from_l1() const {
        for (const End& end : ends_) std::memcpy(end.buffer, end.l1, end.bytes);
    }
    void ends_to_l1() const {
        for (const End& end : ends_) std::memcpy(end.l1, end.buffer, end.bytes);
    }

    std::vector<Segment> segments;

  private:
    struct End {
        std::byte* l1;
        std::byte* buffer;
        uint64_t bytes;
    };
    struct Free {
        void operator()(std::byte* memory) const { std::free(memory); }
    };
    std::unique_ptr<std::byte, Free> buffer_;
    std::vector<End> ends_;
};

// Walks segments and extents side by side: each next() is one call's memory and its offset.
class Pieces {
  public:
    Pieces(const std::vector<Segment>& segments, const DataFile& file,
           const std::vector<Extent>& extents)
        : segments_(segments), page_bytes_(file.page_bytes), extents_(extents) {}

    // False at the end. `parts` are those of `vectors`.
    bool next(std::vector<iovec>& vectors, std::vector<Segment>& parts, uint64_t& offset) {
        vectors.clear();
        parts.clear();
        if (segment_ == segments_.size()) return false;
        skip_used_extents();
        offset = extents_[extent_].first * page_bytes_ + in_extent_;
        uint64_t room = std::min(kPieceBytes, extents_[extent_].count * page_bytes_ - in_extent_);
        while (room != 0 && segment_ < segments_.size() && vectors.size() < kMostVectors) {
            const Segment& segment = segments_[segment_];
            const uint64_t part = std::min(room, segment.bytes - in_segment_);
            const uint64_t counted =
                std::min(part, segment.counted - std::min(segment.counted, in_segment_));
            vectors.push_back({segment.data + in_segment_, part});
            parts.push_back({segment.data + in_segment_, part, counted});
            room -= part;
            in_extent_ += part;
            in_segment_ += part;
            if (in_segment_ == segment.bytes) {
                ++segment_;
                in_segment_ = 0;
            }
        }
        return true;
    }

  private:
    void skip_used_extents() {
        while (in_extent_ == extents_[extent_].count * page_bytes_) {
            ++extent_;
            in_extent_ = 0;
        }
    }

    const std::vector<Segment>& segments_;
    const uint64_t page_bytes_;
    const std::vector<Extent>& extents_;
    size_t segment_ = 0, extent_ = 0;
    uint64_t in_segment_ = 0, in_extent_ = 0;
};

// Call until all vectors were moved. A call that moves less is continued at whole kHeaderBytes.
// 0, an errno, or -1 at the end of the file.
template <typename Call>
int move_all(std::vector<iovec>& vectors, uint64_t offset, Call call) {
    size_t first = 0;
    unsigned without = 0;  // calls in a row that moved nothing
    while (first < vectors.size()) {
        const ssize_t moved =
            no_signal(call(vectors.data() + first, static_cast<int>(vectors.size() - first),
                           static_cast<off_t>(offset)));
        if (moved < 0) return errno;
        uint64_t whole = static_cast<uint64_t>(moved) / kHeaderBytes * kHeaderBytes;
        if (whole == 0 && ++without == 8) return -1;
        if (whole != 0) without = 0;
        offset += whole;
        while (whole != 0) {
            iovec& vector = vectors[first];
            const uint64_t part = std::min<uint64_t>(whole, vector.iov_len);
            vector.iov_base = static_cast<std::byte*>(vector.iov_base) + part;
            vector.iov_len -= part;
            whole -= part;
            if (vector.iov_len == 0) ++first;
        }
    }
    return 0;
}

IoResult failed(bool put, int error) {
    const std::string verb = put ? "write: " : "read: ";
    if (error < 0)
        return {put ? FileOutcome::kFailed : FileOutcome::kCorrupt, verb + "the file ends early"};
    if (put && (error == ENOSPC || error == EDQUOT || error == EFBIG))
        return {FileOutcome::kFull, verb + strerror(error)};
    return {FileOutcome::kFailed, verb + strerror(error)};
}

IoResult unlike(RecordMatch match) {
    if (match == RecordMatch::kOther)
        return {FileOutcome::kOther, "the record has another coverage, generation or lengths"};
    return {FileOutcome::kCorrupt, "the header is not that of the record"};
}

uint64_t counted_bytes(const std::vector<Segment>& parts) {
    uint64_t sum = 0;
    for (const Segment& part : parts) sum += part.counted;
    return sum;
}

}  // namespace

IoResult write_records(const std::vector<std::shared_ptr<const Record>>& records,
                       const DataFile& file, const std::vector<Extent>& extents, FileCalls& calls,
                       const std::atomic<bool>& stop, uint64_t& bytes) {
    alignas(kHeaderBytes) static std::byte zeros[kHeaderBytes];
    const uint64_t share = page_count(extents) / records.size() * file.page_bytes;
    std::vector<Layout> layouts;
    std::vector<Segment> segments;
    for (const auto& record : records) {
        const Layout& layout = layouts.emplace_back(*record);
        layout.ends_from_l1();
        Digest digest;
        digest.update(record->header().data(), record->header().size());
        for (const Segment& segment : layout.segments) digest.update(segment.data, segment.counted);
        Record::seal(layout.header(), digest.value());
        segments.insert(segments.end(), layout.segments.begin(), layout.segments.end());
        if (record == records.back()) break;
        for (uint64_t at = record->file_bytes(); at < share; at += kHeaderBytes)
            segments.push_back({zeros, kHeaderBytes, 0});
    }
    Pieces pieces(segments, file, extents);
    std::vector<iovec> vectors;
    std::vector<Segment> parts;
    uint64_t offset = 0;
    while (pieces.next(vectors, parts, offset)) {
        if (stop) return {FileOutcome::kCancelled, ""};
        const int error = move_all(vectors, offset, [&](const iovec* from, int count, off_t at) {
            return calls.write(file.fd, from, count, at);
        });
        if (error != 0) return failed(true, error);
        bytes += counted_bytes(parts);
    }
    return {};
}

IoResult read_record(const Record& record, const DataFile& file, const std::vector<Extent>& extents,
                     FileCalls& calls, const std::atomic<bool>& stop, uint64_t& bytes) {
    const Layout layout(record);
    Digest digest;
    digest.update(record.header().data(), record.header().size());
    Pieces pieces(layout.segments, file, extents);
    std::vector<iovec> vectors;
    std::vector<Segment> parts;
    uint64_t offset = 0;
    bool first = true;
    while (pieces.next(vectors, parts, offset)) {
        if (stop) return {FileOutcome::kCancelled, ""};
        const int error = move_all(vectors, offset, [&](const iovec* to, int count, off_t at) {
            return calls.read(file.fd, to, count, at);
        });
        if (error != 0) return failed(false, error);
        if (first) {
            const RecordMatch match = record.match(layout.header());
            if (match != RecordMatch::kMatch) return unlike(match);
            first = false;
        }
        for (const Segment& part : parts) digest.update(part.data, part.counted);
        bytes += counted_bytes(parts);
    }
    if (digest.value() != Record::digest_in(layout.header()))
        return {FileOutcome::kCorrupt, "the bytes do not have the digest of the header"};
    layout.ends_to_l1();
    return {};
}

}  // namespace kvserver
