// what_if.h: the chunks that caches of several sizes would have, all at once, as LRU orders them.
//
// A cache of S pages has a chunk if the chunks used after it, and it itself, need at most S pages
// (Mattson et al., 1970). So one list of chunks in the order of last use answers for every size:
// `times_` has the pages of the chunk last used at each time. The chunks of a prompt were mostly
// used one after the other, so the distance of one follows from that of the one before it.
//
// All chunks are listed while they are at most 393,216. Of more, the 131,072 used last are listed,
// and of the older ones those whose hash is below a threshold, which falls so that they are at most
// 196,608 after each thinning out: each represents 1 / sample_rate() of its kind. A chunk that is
// used again is listed whatever its hash. Hot prompts are therefore exact; to sample them errs by
// tens of percent.
//
// Keys are chosen by clients: places and what is sampled depend on a secret. `distinct()` does not,
// so that the sketches of several daemons can be merged.
//
// One thread uses it. Memory: at most 12 MiB, in proportion to the chunks listed before that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tables/time_sums.h"

namespace kvserver {

// What a hit at a boundary needs of a group that is not full attention: the chunks
// [max(0, boundary - chunks), boundary); if `local_tokens` is set, those from the last multiple of
// it on.
struct GroupNeed {
    uint16_t bit;
    uint32_t chunks;
    uint32_t local_tokens;
};

// How an engine's lookups hit. `full` has the bits of the groups of which a hit needs every chunk.
struct HitRules {
    uint16_t full = 1;
    uint32_t chunk_tokens = 1;
    bool distinct = true;  // chunks of lookups are in distinct()
    std::vector<GroupNeed> others;
};

class WhatIf {
  public:
    static constexpr size_t kKeyBytes = 32;
    static constexpr size_t kUnlimited = 6;  // the last size
    // Of one size: where a hit would have ended, and the chunks up to there as counted: where older
    // chunks are sampled each of those counts for several, or for none.
    struct Hit {
        size_t boundary = 0;
        double chunks = 0;
    };
    using Hits = std::array<Hit, kUnlimited + 1>;

    // `sizes`: in pages, ascending.
    WhatIf(uint64_t secret, const std::array<uint64_t, kUnlimited>& sizes);

    // What each size would have found, then use what was found: the first chunk is the
    // youngest. `salt` is the namespace's. The daemon has found the first `found` chunks: one that
    // is not listed is added, with `pages` and the groups of the rules. Throws
    // std::invalid_argument unless `keys` is whole keys.
    Hits lookup(uint64_t salt, std::string_view keys, const HitRules& rules, size_t found,
                uint32_t pages);

    // Objects of one group became READY, `pages` each: their chunks were used, the first one last.
    void add(uint64_t salt, std::string_view keys, uint16_t bit, uint32_t pages);

    // A request ended: what is listed of its chunks is used again, as L1 does when a lease ends.
    void use_again(uint64_t salt, std::string_view keys);

    // Objects of one group were dropped, and their chunks were not.
    void remove(uint64_t salt, std::string_view keys, uint16_t bit, uint32_t pages);

    void clear();

    // HyperLogLog (Flajolet et al., 2007) of all chunks looked up: one byte a register.
    std::string distinct() const { return {registers_.begin(), registers_.end()}; }

    size_t size() const { return size_; }
    double sample_rate() const;  // of the older chunks
    size_t memory_bytes() const;

  private:
    static constexpr size_t kFirstSlots = 1 << 10, kMostSlots = 1 << 19;
    static constexpr size_t kExact = 1 << 17, kSampled = 3 << 16;
    static constexpr uint64_t kHashBits = 48, kAll = uint64_t{1} << kHashBits;
    static constexpr size_t kRegisterBits = 12;

    // An empty slot has no pages: a chunk has at least one.
    struct Slot {
        uint64_t hash : 48;
        uint64_t groups : 16;
        uint32_t used;  // the time of its last use: no two chunks have the same
        uint32_t pages;
    };
    // Of a chunk of a lookup, before anything of the lookup is used.
    struct Looked {
        uint64_t hash;
        double distance;  // pages that a cache needs to have it
        double counted;   // chunks that those up to it represent; it adds 0 if it is not listed
        uint16_t groups;
    };

    // Their slots are prefetched.
    const std::vector<uint64_t>& hashes(uint64_t salt, std::string_view keys);
    void count_distinct(uint64_t salt, std::string_view keys);
    size_t find(uint64_t hash) const;                // its slot, or the empty one where it would be
    void look(const HitRules& rules, size_t found);  // for those of hashes_
    // Of the chunks looked up, where the first `full` ones have all that full groups need.
    size_t boundary(double size, const HitRules& rules, size_t full) const;
    static bool has(const Looked& chunk, double size, uint16_t bits);
    double distance(const Slot& slot, uint64_t younger, uint64_t exact) const;
    void use(uint64_t hash, uint16_t bits, uint32_t pages);
    void make_room();
    void grow();
    void thin_out();
    void renumber();
    void erase(size_t at);

    const uint64_t secret_;
    const std::array<uint64_t, kUnlimited> sizes_;
    uint64_t threshold_ = kAll;
    uint32_t exact_from_ = 0;  // chunks used since then are listed whatever their hashes
    uint32_t now_ = 0;
    size_t size_ = 0;
    std::vector<Slot> slots_;
    TimeSums times_;                // 3 for 2 slots
    std::vector<uint64_t> hashes_;  // of the last call
    std::vector<Looked> looked_;    // those of a lookup that any size may have
    std::array<char, 1 << kRegisterBits> registers_{};
};

}  // namespace kvserver
