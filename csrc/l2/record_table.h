// record_table.h: the index of a file tier: its records, their places, the order of eviction, and
// the journal's entries of each change.
//
// A space is one namespace in one generation and one group. A record's name in the table is its
// space and its key. A space that was dropped is not found any more, at once; its records leave
// slice by slice (sweep()).
//
// A unit is up to kMostInUnit records that were added together, neighbours of one chain: each is
// the parent of the next one. They share meaning, age, and equal parts of the unit's pages. Each is
// found and removed by itself; the unit ends with its last one.
//
// Eviction: the last record of the oldest leaf. A unit is a leaf while no unit in the table was
// added with one of its records as its parent; so a chain loses its end first. What remove() takes
// from the middle of a unit leaves those behind it, until they are evicted as the unit's end.
//
// One thread uses it. Memory: about 110 bytes a record that is a unit of its own, 48 in units of
// 16, with one extent each.
//
// Steps. steps() counts the records, buckets and leaves that calls looked at. The steps of a call
// depend on its keys or on `most`, and on the logarithm of the number of records. This does not
// hold for what a start needs: replay(), link_orphans(), check_extents(). spaces() looks at spaces.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "copy/job.h"
#include "l2/journal.h"
#include "tables/slabs.h"

namespace kvserver {

struct SpaceName {
    std::string_view ns;
    uint64_t generation;
    uint32_t group;
};

class RecordTable {
  public:
    static constexpr size_t kKeyBytes = 32;

    struct Found {
        uint64_t meaning;
        std::vector<Extent> extents;
        bool recovered;  // by replay()
    };
    struct Evicted {
        std::string ns;
        uint32_t group;
        std::string key;
        std::vector<Extent> extents;
    };
    struct Space {
        std::string ns;
        uint64_t generation;
        uint32_t group;
        uint64_t records;
    };

    explicit RecordTable(uint64_t seed);

    // `keys` of kKeyBytes lie end to end everywhere.
    std::vector<uint8_t> holds(const SpaceName& space, std::string_view keys) const;  // bit i of it
    std::optional<Found> find(const SpaceName& space, std::string_view key) const;
    // Add a unit. `parent`: of its first record. REQUIRES: no such records, no key twice.
    void add(const SpaceName& space, std::string_view keys, std::string_view parent,
             uint64_t meaning, const std::vector<Extent>& extents);
    std::optional<std::vector<Extent>> remove(const SpaceName& space, std::string_view key);
    void touch(const SpaceName& space,
               std::string_view keys);  // the first key becomes the youngest
    // Removes the last record of the oldest leaf. None while !swept(): the oldest ones are of
    // dropped spaces, try again.
    std::optional<Evicted> evict();

    std::vector<Space> spaces() const;
    struct Keys {
        const Space* space;
        std::string keys;
    };
    // The keys of up to `most` places for records, from place `at` on; `at` moves on, to SIZE_MAX
    // behind the last one. A record that is added meanwhile may have any place. `space` is valid
    // until the next call that is not const.
    std::vector<Keys> walk(size_t& at, size_t most) const;
    bool drop_space(const SpaceName& space);  // without entries in the journal; false: no such
    // Remove up to `most` records of dropped spaces, among some more; their extents.
    std::vector<Extent> sweep(size_t most);
    bool swept() const { return dead_records_ == 0; }

    // ---- the journal -------------------------------------------------------------------------
    // Entries of add(), remove() and evict() go to the log, and to the next log while there is one.
    void begin_log(uint64_t file_id, uint64_t sequence);
    std::string drain_log() { return std::exchange(log_.pending, {}); }
    size_t log_bytes() const { return log_.pending.size(); }  // that drain_log() would return
    // Compaction: a next log, puts of all records to it in slices, and then it is the log.
    void begin_next_log(uint64_t file_id);
    bool fill_next_log(size_t most);  // looks at about `most` records; true: all were
    std::string drain_next_log() { return std::exchange(next_.pending, {}); }
    void switch_logs();
    void drop_next_log() { next_ = {}; }
    uint64_t live_journal_bytes() const { return live_journal_bytes_; }

    // Apply entries from the first byte of `data` on; the bytes applied, and the next sequence.
    std::pair<size_t, uint64_t> replay(std::string_view data, uint64_t file_id, uint64_t sequence);
    // At the end of a replay: find the parents whose entries follow those of their children.
    void link_orphans();
    // Drop records outside pages [first, pages) or on pages of others; how many. `gaps`: the pages
    // of none. REQUIRES: swept().
    size_t check_extents(uint32_t first, uint32_t pages, std::vector<Extent>& gaps);

    size_t size() const { return records_ - dead_records_; }
    uint64_t memory_bytes() const;
    uint64_t steps() const { return steps_; }  // of all calls so far

  private:
    static constexpr uint32_t kNone = UINT32_MAX;

    struct Node {  // a record
        std::array<char, kKeyBytes> key;
        uint32_t unit = kNone;  // kNone: the node is free
        uint32_t next;          // in its bucket, or of the free nodes
    };
    struct Several {
        std::vector<Extent> extents;  // empty: one, the unit's `extent`
        std::vector<uint32_t> nodes;  // empty: the unit's `node` and those behind it
    };
    struct Unit {
        uint64_t meaning;
        uint64_t age;
        Extent extent;
        std::unique_ptr<Several> several;  // null: neither is
        uint32_t space = kNone;            // kNone: the unit is free
        uint32_t node;                     // of its first record; of a free unit the next free one
        uint32_t parent;  // kNone: none; it is there while its serial is parent_serial
        uint32_t parent_serial;
        uint32_t serial = 0;  // of the unit's use
        uint32_t children;
        uint32_t leaf = kNone;      // its place in leaves_; kNone: it has none
        uint16_t living;            // bit i: its record i, of those that were added, is there
        uint16_t records : 5;       // that were added
        uint16_t parent_place : 4;  // of the parent record in its unit
        uint16_t recovered : 1;
    };
    static_assert(kMostInUnit <= 16, "bits of `living`");
    struct SpaceSlot {
        std::string name;  // the key in numbers_
        Space space;
        bool dead;
    };
    struct Leaf {
        uint64_t age;
        uint32_t unit;
    };
    struct Orphan {
        uint32_t unit, serial;
        std::array<char, kKeyBytes> parent;
    };
    struct Log {
        bool on = false;
        uint64_t file_id = 0, sequence = 0;
        std::string pending;
    };

    static std::string joined(const SpaceName& space);
    uint32_t space_number(const SpaceName& space) const;
    uint32_t make_space(const SpaceName& space);
    void leave_space(uint32_t number);
    uint64_t place(uint32_t space, const char* key) const;
    size_t bucket_of(uint32_t space, const char* key) const;
    void add_bucket();
    uint32_t find_node(uint32_t space, const char* key) const;
    uint32_t insert(uint32_t space, const JournalEntry& entry);
    std::vector<Extent> erase(uint32_t at);  // without the journal
    void unlink(uint32_t at);
    void end_unit(uint32_t number);
    void add_leaf(uint32_t number);
    void drop_leaf(uint32_t number);
    void place_leaf(size_t hole, Leaf leaf);
    void adopt(Unit& unit, uint32_t parent);           // `parent`: a node
    uint32_t living_ancestor(const Unit& unit) const;  // the nearest node; kNone: none
    uint32_t living_parent(const Unit& unit) const;
    static uint32_t node_at(const Unit& unit, uint32_t place);
    static uint32_t last_node(const Unit& unit);
    uint32_t place_of(uint32_t at) const;  // in its unit
    std::vector<Extent> extents_of(uint32_t at) const;
    static std::vector<Extent> all_extents(const Unit& unit);
    static std::vector<Extent> living_extents(const Unit& unit);
    uint64_t journal_bytes_of(const Unit& unit) const;
    void log_put(Log& log, uint32_t number) const;
    void log_drop(uint32_t at);

    const uint64_t seed_;
    mutable uint64_t steps_ = 0;
    Slabs<Node> nodes_;
    Slabs<Unit> units_;
    uint32_t free_nodes_ = kNone, free_units_ = kNone;
    Slabs<uint32_t> buckets_;  // first nodes; linear hashing: one bucket is split at a time
    std::vector<SpaceSlot> spaces_;
    std::vector<uint32_t> free_spaces_;
    std::unordered_map<std::string, uint32_t> numbers_;  // of spaces that were not dropped
    Slabs<Leaf> leaves_;  // of spaces that were not dropped: a heap of kWays ways, the oldest first
    uint64_t clock_ = 0;  // the greatest age
    std::vector<Orphan> orphans_;  // of a replay
    size_t records_ = 0, dead_records_ = 0;
    size_t swept_to_ = 0, filled_to_ = 0;
    uint64_t live_journal_bytes_ = 0;
    Log log_, next_;
};

}  // namespace kvserver
