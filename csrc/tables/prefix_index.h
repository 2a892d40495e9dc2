// prefix_index.h: the blocks of each owner, to find how much of a prompt each of them has.
//
// An owner is a tier of one engine or of several: the memory of one engine, or L1 for one
// namespace. A block is named by its hash, which covers the whole prompt up to there. Only the
// hash's last 8 bytes count, for some engines publish no more. With n blocks in the index a hash
// that no owner has matches one of them with odds of n / 2^64, and a wrong match costs no more than
// a detour of one request. A block may be added to an owner several times, and stays until it was
// removed as often.
//
// Any thread may use it. A call waits for others at most for as long as they need for 128 hashes,
// or for one of 1,024 parts of the table. Hashes are chosen by clients: their place depends on a
// secret.
//
// Memory: 16 bytes a slot, of which 3/5 to 3/4 are used: 21 to 27 bytes a block; 64 more for each
// block and owner added more than once. A block that would exceed the bound is refused and counted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kvserver {

class PrefixIndex {
  public:
    static constexpr int kMostOwners = 64;

    // An engine's owners (-1: none). In L1 and L2 only the last block of each chunk is added; a
    // chunk is `chunk_blocks` > 0 blocks, counted from the start of the prompt.
    struct Reader {
        int l0, l1, l2;
        uint32_t chunk_blocks;
    };
    // The blocks at the start of a prompt that each tier has alone, and that all have together.
    struct Match {
        uint64_t l0 = 0, l1 = 0, l2 = 0, best = 0;
    };

    PrefixIndex(uint64_t seed, size_t most_bytes);

    // A new owner, without blocks; -1 if there are kMostOwners.
    int add_owner();
    // The owner has no blocks any more. REQUIRES: no call adds to it or removes from it meanwhile.
    void clear_owner(int owner);
    // The same, and its number is free.
    void remove_owner(int owner);

    // The hashes lie end to end. Returns how many were refused for want of memory.
    // Throws std::invalid_argument unless they are whole hashes of 8 to 32 bytes, of a owner.
    size_t add_blocks(int owner, std::string_view hashes, size_t hash_bytes);
    // Returns how many of them the owner did not have.
    size_t remove_blocks(int owner, std::string_view hashes, size_t hash_bytes);

    // The part of a prompt with these blocks that each reader has.
    std::vector<Match> match(std::string_view hashes, size_t hash_bytes,
                             const std::vector<Reader>& readers) const;

    // Who has the last block of each `every` > 0 blocks of a prompt: bits of owners.
    std::vector<uint64_t> owners_of(std::string_view hashes, size_t hash_bytes, size_t every) const;

    size_t size() const;                   // blocks of any owner
    size_t owned_blocks(int owner) const;  // blocks of this owner
    uint64_t refused() const;              // blocks, since the beginning
    size_t memory_bytes() const;

  private:
    static constexpr size_t kParts = 1024;
    static constexpr size_t kSlice = 128;  // hashes between two looks at the lock

    struct Slot {
        uint64_t hash;
        uint64_t owners;  // a bit each; 0: the slot is empty
    };
    struct Again {
        uint64_t hash;
        int owner;
        bool operator==(const Again&) const = default;
    };
    struct HashAgain {
        uint64_t seed;
        size_t operator()(const Again& again) const;
    };
    using Times = std::unordered_map<Again, uint32_t, HashAgain>;
    // The unit that memory is read by. Hashes are searched for from the first slot of a line on, so
    // that most are found in the line where they belong; behind an empty slot of a line the others
    // are empty.
    static constexpr size_t kLineSlots = 4;
    struct alignas(kLineSlots * sizeof(Slot)) Line {
        std::array<Slot, kLineSlots> slots;
    };
    // A table of its own, with linear probing, which grows alone and so in little time.
    struct Part {
        std::vector<Line> lines;
        size_t used = 0;
        Times again;  // times added beyond the first

        size_t home(uint64_t place) const { return (place & 0xffffffff) * lines.size() >> 32; }
        size_t size() const { return lines.size() * kLineSlots; }
        size_t next(size_t at) const { return at + 1 < size() ? at + 1 : 0; }
        Slot& slot(size_t at) { return lines[at / kLineSlots].slots[at % kLineSlots]; }
        const Slot& slot(size_t at) const { return lines[at / kLineSlots].slots[at % kLineSlots]; }
    };

    static uint64_t bit(int owner) { return owner < 0 ? 0 : uint64_t{1} << owner; }
    void check(int owner) const;
    uint64_t place(uint64_t hash) const;
    static size_t part_of(uint64_t place) { return place >> 54; }
    size_t find(const Part& part, uint64_t hash, uint64_t place) const;
    bool add_one(int owner, uint64_t hash);
    bool remove_one(int owner, uint64_t hash);
    bool room(size_t more_bytes) const { return bytes_ + more_bytes <= most_bytes_; }
    void rebuild(Part& part, size_t lines);
    void erase(Part& part, size_t at);
    void sweep(int owner);
    // The hashes begin every `stride` bytes.
    void look_up(const char* hashes, size_t hash_bytes, size_t stride, size_t count,
                 uint64_t* owners) const;

    const uint64_t seed_;
    const uint64_t factor_;
    const size_t most_bytes_;
    mutable std::mutex mutex_;  // of all below
    uint64_t open_ = 0;         // owners in use
    uint64_t seen_ = 0;         // of these, those that are not being cleared
    std::array<size_t, kMostOwners> owned_{};
    std::vector<Part> parts_;
    size_t size_ = 0;
    size_t bytes_ = 0;
    uint64_t refused_ = 0;
};

}  // namespace kvserver
