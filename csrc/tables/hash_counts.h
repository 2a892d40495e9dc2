// hash_counts.h: how often each block hash is present.
//
// An event names a block once when it is stored and once when it is removed, however many chunks
// contain it: a publisher of such events counts blocks here first. Hashes are up to 32 bytes,
// shorter ones filled up with zeros; clients choose them, so their place in the table depends on a
// secret.
//
// One thread uses it. Memory: 40 bytes a slot, and at most 3 of 4 slots are used.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvserver {

class HashCounts {
  public:
    static constexpr size_t kHashBytes = 32;

    explicit HashCounts(uint64_t seed);

    // One byte for each of the hashes, which lie end to end: 1 if it became present.
    // Throws std::invalid_argument unless `hashes` is whole hashes of `hash_bytes` <= 32.
    std::string add(std::string_view hashes, size_t hash_bytes);

    // One byte for each: 1 if it is no longer present, 2 if it was not present before.
    std::string remove(std::string_view hashes, size_t hash_bytes);

    // One byte for each: 1 if it is present.
    std::string contains(std::string_view hashes, size_t hash_bytes) const;

    // Up to `most` of the hashes present, 32 bytes each, in no order, from `cursor` on, which
    // begins at 0 and is moved behind them. All are returned if nothing is added or removed between
    // the calls.
    std::string slice(size_t& cursor, size_t most) const;

    // True if `more` hashes can be added without moving all others, which is slow.
    bool has_room(size_t more) const { return (size_ + more) * 4 <= slots_.size() * 3; }

    size_t size() const { return size_; }
    size_t memory_bytes() const { return slots_.size() * sizeof(Slot); }

  private:
    using Hash = std::array<uint64_t, 4>;
    struct Slot {
        Hash hash;
        uint64_t count;  // 0: empty
    };

    static Hash read(const char* at, size_t hash_bytes);
    size_t home(const Hash& hash) const;
    size_t find(const Hash& hash) const;  // its slot, or the empty one where it would be
    void grow();
    void erase(size_t at);

    uint64_t seed_;
    size_t size_ = 0;
    size_t mask_;
    std::vector<Slot> slots_;
};

}  // namespace kvserver
