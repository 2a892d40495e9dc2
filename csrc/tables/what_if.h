// what_if.h: what lookups would have found in L1s of other sizes, from one table for all sizes.
//
// The question: what would a smaller or a larger L1 have found of the same requests? A cache for
// each size would answer it, with the memory and the work of all of them. But of LRU caches the
// larger has all that the smaller has (Mattson et al., 1970). So one table lists the chunks in the
// order of last use: `entries_` has the chunk last used at each time. A size is a few times of that
// order, and evicting moves these times and nothing else:
//   LRU    a size has the chunks used since `fresh`.
//   SLRU   (Karedla et al., 1994) a chunk has a bit for each size where a use found it. Those with
//          the bit are protected since `kept`, on probation since `demoted`; those without it are
//          on probation since `fresh`. All three parts are in the order of last use. When a demoted
//          chunk was demoted is known within a few hundredths of the cache (`marks`).
//
// Work. A key covers all keys before it, and the chunks of a prompt were mostly used one after the
// other. So if the last chunk of a stretch is where it would be had the first and it been used
// together, those between are, too, and their keys are not read. Chunks used together also share a
// strip of times: a slot has a spot in a strip. Where all chunks of a strip are used again, its
// begin moves, and none of their slots, which lie anywhere in memory.
//
// Memory: at most 12 MiB, 15 with hybrid models, in proportion to the chunks listed before that.
// Time, memory and errors beside exact caches: bench/what_if.py.
//
// Sampling (by hash, as SHARDS: Waldspurger et al., 2015) begins above 393,216 chunks. Then are
// listed
//   - the chunks that the exact sizes have or remember as evicted, and the 65,536 used last. A size
//     is exact while these, for it and the smaller sizes, are at most 163,840;
//   - of the others those whose hash is below a threshold. It falls so that they are at most
//     131,072 after each thinning out; each represents 1 / sample_rate() of its kind.
// The larger sizes are caches of the sampled chunks, and smaller by the rate. A chunk that is used
// again is listed whatever its hash, so hot prompts are exact: to sample them errs by tens of
// percent.
//
// Hybrid models store the objects of groups that are not full attention at few chunks, which differ
// by size. A size to which a chunk returns lacks these objects until L1 stores them, or until it
// would have stored them itself where L1 had them. That is at the boundaries of the prompt's end,
// of the end of its own chunks of full attention, and of every `interval` chunks. What only it
// would have stored is not known. What L1 stored counts for the larger sizes that have the chunk,
// too.
//
// Invariants:
//   - No two chunks have the same time. From the first to the last chunk of a strip no time is
//     another strip's.
//   - Clients choose keys, so places and what is sampled depend on a secret.
//   - One thread uses it; any may read hit_tokens().
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>
#include <vector>

namespace kvserver {

// Need of a hit at a boundary, of a group that is not full attention: the chunks
// [max(0, boundary - chunks), boundary). If `local_tokens` is set, the chunks from the last
// multiple of it on.
struct GroupNeed {
    uint16_t bit;
    uint32_t chunks;
    uint32_t local_tokens;
};

// Rules of an engine's hits. `full` has the bits of the groups of which a hit needs every chunk.
struct HitRules {
    uint16_t full = 1;
    uint32_t chunk_tokens = 1;
    std::vector<GroupNeed> others;
    uint32_t interval = 0;  // chunks between boundaries that are kept for the others; 0: none

    // The first chunk before a hit's boundary whose object the hit needs.
    size_t first_needed(const GroupNeed& need, size_t boundary) const;
};

class WhatIf {
  public:
    static constexpr size_t kKeyBytes = 32;
    static constexpr size_t kUnlimited = 6;  // the last size
    static constexpr size_t kSizes = kUnlimited + 1;
    // A lookup's hit in each size: its boundary, and the number of chunks before it. Where older
    // chunks are sampled, a sampled one counts for several and the others for none.
    struct Hits {
        std::array<uint32_t, kSizes> boundary{};
        std::array<double, kSizes> chunks{};
        std::array<uint32_t, kSizes> full{};  // where full attention's chunks ended
    };

    // `sizes`: in pages, ascending. `protects`: they evict by SLRU.
    WhatIf(uint64_t secret, const std::array<uint64_t, kUnlimited>& sizes, bool protects = false);

    // Find the hit of each size. `salt` is the namespace's. Throws std::invalid_argument unless
    // `keys` is whole keys.
    Hits lookup(uint64_t salt, std::string_view keys, const HitRules& rules);

    // The lookup's request ended: use the chunks that a size or the daemon had found, the first one
    // last. A chunk is a hit of the sizes that found it. The daemon had found the first `found`
    // chunks: one that is not listed is added, with `pages` and the groups of the rules.
    void use(uint64_t salt, std::string_view keys, const HitRules& rules, const Hits& hits,
             size_t found, uint32_t pages);

    // Objects of one group became READY, `pages` each: their chunks were stored, the first one
    // last. Of the rules it reads `full`.
    void add(uint64_t salt, std::string_view keys, const HitRules& rules, uint16_t bit,
             uint32_t pages);

    // Objects of one group, which is not full attention, were dropped, and their chunks were not.
    void remove(uint64_t salt, std::string_view keys, uint16_t bit, uint32_t pages);

    void clear();

    // True if so many chunks can be used or added before the next call that moves the whole table.
    bool has_space(size_t chunks) const {
        return size_ + chunks <= slots_.size() / 4 * 3 && now_ + chunks <= entries_.size() &&
               strips_left() >= chunks;
    }

    // The sums of what count() was given, by size.
    std::array<double, kSizes> hit_tokens() const;
    void count(const Hits& hits, double tokens_of_a_chunk);
    // Only for the sizes whose hit ended where the daemon's did: `behind` has them.
    void count(const Hits& hits, double tokens_of_a_block, const Hits& behind, size_t found);

    size_t size() const { return size_; }
    double sample_rate() const;  // of the older chunks
    size_t memory_bytes() const;

  private:
    static constexpr size_t kFirstSlots = 1 << 10, kMostSlots = 1 << 19, kBlock = 512;
    static constexpr size_t kExact = 5 << 15, kRecent = 1 << 16, kSampled = 1 << 17;
    static constexpr uint64_t kHashBits = 44, kAll = uint64_t{1} << kHashBits;
    static constexpr size_t kLeastRemembered = 32768;
    static constexpr size_t kStrip = 32;
    static constexpr uint8_t kAllSizes = (1 << kSizes) - 1, kOnlyUnlimited = 1 << kUnlimited;

    // An empty slot has spot 0.
    struct Slot {
        uint64_t hash : kHashBits;
        uint64_t spot : 64 - kHashBits;  // its place in its strip, and kStrip times the strip
    };
    // The time of a chunk's last use, which no two chunks share, is its place behind `begin`. From
    // the first to the last of the chunks that a strip has, no time is another strip's.
    struct Strip {
        uint32_t begin, chunks;
    };
    // A chunk at its time: pages (none: no chunk), a bit for each size where a use found it, flags,
    // groups, and the place of its slot.
    using Entry = uint64_t;
    static constexpr unsigned kUsedAt = 20, kGroupsAt = 28, kSlotAt = 44;
    static constexpr Entry kPages = (1 << kUsedAt) - 1, kUsed = Entry{0x3f} << kUsedAt;
    static constexpr Entry kSampledFlag = 1 << 26;  // its hash is below the threshold
    static constexpr Entry kWhole = 1 << 27;        // represents itself only
    static constexpr Entry kState = (Entry{1} << kSlotAt) - 1;

    // A chunk's objects of groups that are not full attention: their pages, and a bit for each size
    // that lacks them.
    struct Others {
        uint32_t lacking : 8, pages : 24;
        bool operator==(const Others&) const = default;
    };

    // Chunks with the bit whose times are `from` or later were demoted at `now` or later.
    struct Mark {
        uint32_t from, now;
    };
    struct Size {
        uint64_t most = 0, pages = 0, chunks = 0, protected_chunks = 0;
        uint32_t fresh = 0, demoted = 0, kept = 0;
        // Evicted since then, and remembered: by two generations, the young one has room left.
        uint32_t old_fresh = 0, old_demoted = 0, young_fresh = 0, young_demoted = 0;
        uint64_t room = kLeastRemembered;
        std::deque<Mark> marks;
    };
    // The sizes that have, protect or remember a chunk. They are the same for chunks of an equal
    // state at all times in [floor, ceiling).
    struct Place {
        uint8_t has = 0, keeps = 0, knows = 0;
        uint32_t floor = 0, ceiling = UINT32_MAX;
    };
    // Chunks of a prompt that were used one after the other, or one that is not listed.
    struct Stretch {
        uint32_t first, length, time;
    };
    // A chunk of a lookup: the sizes that have it, and all its objects.
    struct Looked {
        uint8_t sizes;
        uint16_t groups;
        double counted;  // chunks that those up to it represent; it adds 0 if it is not listed
    };
    // Keys of one namespace.
    struct Keys {
        uint64_t seed;
        std::string_view raw;
        size_t count;
        uint64_t hash(size_t at) const;
    };

    Keys keys_of(uint64_t salt, std::string_view raw) const;
    size_t find(uint64_t hash) const;  // its slot, or the empty one where it would be
    uint32_t time(const Slot& slot) const {
        return strips_[slot.spot / kStrip].begin + static_cast<uint32_t>(slot.spot % kStrip);
    }
    uint32_t time_of(const Keys& keys, size_t at) const {
        return time(slots_[find(keys.hash(at))]);
    }
    size_t stretch(const Keys& keys, size_t at, uint32_t time, size_t end) const;
    size_t used_together(const Keys& keys, size_t at, uint32_t time, size_t most) const;
    void look(const Keys& keys, const HitRules& rules, Hits& hits, bool each);
    size_t boundary(size_t size, const HitRules& rules, size_t full) const;
    Place place(uint32_t time, Entry entry) const;
    uint8_t counted_in(Entry entry) const;
    Others others(uint32_t time) const { return others_.empty() ? Others{} : others_[time]; }
    static uint64_t pages_in(size_t size, Entry entry, Others others) {
        return (entry & kPages) - ((others.lacking >> size & 1) != 0 ? others.pages : 0);
    }

    void find_stores(size_t chunks, const HitRules& rules, const Hits& hits);
    void use_block(const Keys& keys, size_t first, size_t end, const Hits& hits, size_t listed,
                   uint16_t bits, uint32_t pages);
    void move(const Stretch& stretch, const Hits& hits);
    uint32_t move_strip(uint32_t time, uint32_t most);
    uint32_t next_spot();
    void count_run(Entry state, const Place& where, Entry used, Others was, Others is,
                   uint64_t chunks);
    void list(uint64_t hash, uint16_t bits, uint32_t pages);
    void add_pages(uint32_t time, uint16_t bits, uint32_t pages);
    void returning(const Hits& hits);
    void shrink();
    void evict_oldest(size_t size, uint64_t most);
    bool evict(size_t size);
    uint32_t next(size_t size, uint32_t from, uint32_t end, bool used) const;
    bool demote(size_t size, uint32_t end);
    uint32_t demoted_at(size_t size, uint32_t time);
    void forget(size_t size);

    // Enough strips for each chunk of a block to begin one, beside those of all times.
    static constexpr size_t entries_of(size_t slots) { return slots / 2 * 3; }
    static constexpr size_t strips_of(size_t slots) {
        return entries_of(slots) / kStrip + 2 + kBlock;
    }
    void reserve(size_t chunks);
    void grow();
    void thin_out();
    void count_again();
    std::vector<uint32_t*> limits();
    void change_time(uint32_t from, uint32_t to);
    void close_gaps();
    void renumber();
    void rebuild(size_t slots);
    size_t strips_left() const { return strips_.size() - next_strip_; }

    const uint64_t secret_;
    const bool protects_;
    std::array<Size, kUnlimited> sizes_;
    size_t exact_ =
        kUnlimited;  // the first so many sizes count every chunk, the others those sampled
    uint64_t threshold_ = kAll;
    uint32_t now_ = 1, begin_ = 1;  // `begin_`: of this call
    size_t size_ = 0;
    std::vector<Slot> slots_;
    std::vector<Entry> entries_;      // 3 for 2 slots
    std::vector<uint16_t> strip_of_;  // of the chunk at each time
    std::vector<Others> others_;      // of the chunk at each time; none before the first ones
    std::vector<Strip> strips_;       // the first one has no chunks
    uint32_t next_strip_ = 1, open_strip_ = 0;
    uint32_t open_end_ = 0;                         // the time of the open strip's next spot
    std::vector<Stretch> stretches_;                // of a block
    std::array<uint32_t, kUnlimited> returning_{};  // chunks before it return soon after eviction
    std::vector<Looked> looked_;
    // State of one call: true if objects of other groups are added; for each chunk, the sizes that
    // store them if it returns (empty while others_ is).
    bool adds_others_ = false;
    std::vector<uint8_t> stores_others_;
    std::array<std::atomic<double>, kSizes> hit_tokens_{};
};

}  // namespace kvserver
