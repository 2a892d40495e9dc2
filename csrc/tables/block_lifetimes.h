// block_lifetimes.h: the lifetimes of an engine's L0 blocks.
//
// A lifetime is one stay of one content in one block. It begins when the block is allocated and
// ends when that content can no longer be found: evicted (it was cached), recycled (it never was,
// and the block was allocated again), cleared (all of the pool at once) or lost (its end was not
// seen). A block is alive during a lifetime. The owners of a block are the requests that use it
// now. A live block without owners is released, and may be found again (a reuse) until its lifetime
// ends.
//
// Observations of lifetimes in the sample, each with its time and its span:
//   reuse_gap           at each access: from the access before it, the first from the allocation
//   lifetime            at the end by eviction or recycling: from the allocation
//   idle_before_evict   at the same end: since the last owner left; 0 if a request still owns it
//   since_last_access   at the same end: since the last access or the allocation
// A lifetime that began unseen has no `lifetime`, no gap and no time since an access until one was
// seen, and no idle time until a release was seen. Counters and gauges are exact.
//
// Two sources; REQUIRES: one pool is watched by one of them only:
//   exact      apply(): what the engine's block pool did, in order
//   reported   own_blocks(), release_blocks(), end_request(): which request owns which block with
//              what content
//
// REQUIRES of both: what is applied was checked. Unchecked input does no harm: a record of a block
// that the pool does not have is skipped.
//
// Times are CLOCK_MONOTONIC nanoseconds, 0: not known. Where a time is before an earlier one, the
// span is 0. Block 0 is the engine's null block and is skipped.
//
// Threads: every function may be called from any thread; all pools of one LifetimeMetrics share its
// mutex, for one call each, and readers of the metrics do not wait for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kvserver {

// A record is a little-endian u32: operation << kRecordShift | block.
constexpr uint32_t kRecordShift = 29;
enum class Record : uint32_t {
    kAllocated,  // one owner; the content before is recycled unless it was evicted
    kAccessed,   // one owner more, of the same content
    kReleased,   // one owner less
    kEvicted,    // its content can no longer be found; owners may remain
    kCleared,    // all lifetimes of the pool end; the record's block is ignored, owners remain
    kPresent,    // state: it has content, since an unknown time, and no owner
    kOwned,      // state: one owner more
};

// The time of all records from this one up to the next mark's.
struct Mark {
    uint64_t record, time_ns;
};

// Throws std::invalid_argument, naming what and where, unless
// - `records` are known operations on blocks below num_blocks;
// - `marks` (16 bytes each, little-endian) name records in ascending order, the first one record 0;
// - their times do not descend.
void check_records(std::string_view records, std::string_view marks, uint64_t num_blocks);

// counts[i] is of (bounds[i-1], bounds[i]], the last one of everything above every bound.
struct LifetimeHistogram {
    std::vector<uint64_t> counts;
    double sum = 0;  // seconds
};

struct LifetimeSnapshot {
    uint64_t allocations = 0;
    uint64_t reuses = 0;           // accesses of blocks without owners
    uint64_t shared_accesses = 0;  // accesses of blocks with owners
    uint64_t evictions = 0, recycled = 0, cleared = 0, lost = 0;  // how lifetimes ended
    uint64_t active_blocks = 0;                                   // with owners
    uint64_t released_blocks = 0;                                 // alive, without owners
    LifetimeHistogram lifetime, idle_before_evict, since_last_access, reuse_gap;
};

// The metrics of all pools of one instance and model, also of pools that were destroyed.
class LifetimeMetrics : public std::enable_shared_from_this<LifetimeMetrics> {
  public:
    // Seconds, ascending; throws std::invalid_argument.
    explicit LifetimeMetrics(std::vector<double> bounds);
    // All of one moment: between two calls of any pool. Never waits for a call.
    LifetimeSnapshot read() const;

  private:
    friend class BlockLifetimes;
    // One call of a pool; at its end readers see what it did.
    struct Writing {
        explicit Writing(LifetimeMetrics& of) : metrics(of), lock(of.mutex_) {}
        ~Writing();
        LifetimeMetrics& metrics;
        std::lock_guard<std::mutex> lock;
    };
    void observe(LifetimeHistogram& histogram, uint64_t nanos);

    const std::vector<double> bounds_;
    std::mutex mutex_;  // of the pools
    LifetimeSnapshot metrics_;
    mutable std::mutex published_mutex_;  // the last one taken, for a copy only
    LifetimeSnapshot published_;
};

// One pool. A pool that is destroyed ends as by end_all().
class BlockLifetimes {
  public:
    // Each lifetime is in the sample with probability sample_rate, decided at its start by a hash
    // of seed, block and the number of the block's lifetime. Memory is touched as blocks are first
    // used. Throws std::invalid_argument, or std::bad_alloc.
    BlockLifetimes(std::shared_ptr<LifetimeMetrics> metrics, uint64_t num_blocks,
                   double sample_rate, uint64_t seed);
    ~BlockLifetimes();
    BlockLifetimes(const BlockLifetimes&) = delete;
    BlockLifetimes& operator=(const BlockLifetimes&) = delete;

    // REQUIRES: check_records() with the pool's num_blocks.
    void apply(std::string_view records, std::string_view marks);

    // `blocks` are u32, `contents` u64 names of the content of the first ones: the others are
    // partial. 0 names nothing either. Of a block that
    //   is not alive           a lifetime begins
    //   the request owns       a partial block may fill, in the same lifetime; the same content, or
    //                          none, changes nothing
    //   has the same content   the request becomes an owner: a shared access, or a reuse if the
    //                          block had none; contents of two groups are never the same
    //   else                   its lifetime ends, evicted if it had a content, else recycled; a new
    //                          one begins, with this owner only
    // With `watched` false this is state, as of Record::kPresent and kOwned: lifetimes begin unseen
    // and owners are no accesses.
    void own_blocks(uint64_t request, uint32_t group, std::string_view blocks,
                    std::string_view contents, uint64_t time_ns, bool watched = true);
    // The request no longer owns these; those that it does not own are ignored.
    void release_blocks(uint64_t request, std::string_view blocks, uint64_t time_ns);
    // The request no longer owns any block.
    void end_request(uint64_t request, uint64_t time_ns);

    // The state of the pool is unknown from here on: all lifetimes are lost, no block has owners.
    void end_all();

    size_t requests() const;  // that own blocks

    static size_t bytes_per_block() { return sizeof(Block); }

  private:
    struct Block {
        uint64_t born_ns;
        uint64_t accessed_ns;  // or born
        uint64_t released_ns;  // means nothing while it is owned
        uint64_t content;      // reported: 0 while partial
        uint64_t owner;        // reported: one of them, the others are in others_
        uint32_t owners;
        uint32_t births : 30;  // lifetimes so far
        uint32_t alive : 1;
        uint32_t sampled : 1;
    };
    static_assert(sizeof(Block) <= 64);
    struct Free {
        void operator()(Block* blocks) const;
    };
    struct RequestBlocks {
        std::vector<uint32_t> blocks;  // also some that the request owns no longer, or twice
        size_t owned = 0;
    };
    using End = uint64_t LifetimeSnapshot::*;

    Block& touch(uint32_t id);
    uint64_t& gauge(const Block& block);
    void step(Record operation, uint32_t id, uint64_t now);
    void begin(Block& block, uint32_t id, uint64_t now);
    void access(Block& block, uint64_t now);
    void observe_end(const Block& block, uint64_t now);
    void end(Block& block, End how, uint64_t now);
    void forget(Block& block, End how);
    void forget_all(End how, bool owners_too);

    void own_one(uint64_t request, uint32_t id, uint64_t content, uint64_t now, bool watched);
    bool owned_by(const Block& block, uint32_t id, uint64_t request) const;
    void own(Block& block, uint32_t id, uint64_t request);
    void disown(Block& block, uint32_t id, uint64_t request, uint64_t now);
    void disown_all(Block& block, uint32_t id, uint64_t now);
    void disown_if_owned(uint32_t id, uint64_t request, uint64_t now);
    void count_disowned(uint64_t request);

    const std::shared_ptr<LifetimeMetrics> shared_;
    LifetimeSnapshot& metrics_;  // shared_'s, under its mutex, as all that follows
    const uint64_t num_blocks_;
    const uint64_t sample_below_;  // of 2^53
    const uint64_t seed_;
    std::unique_ptr<Block[], Free> blocks_;
    uint64_t touched_ = 0;  // blocks from here on are not alive and have no owner
    uint64_t nowhere_ = 0;  // counts blocks neither alive nor owned; never read
    std::unordered_map<uint32_t, std::vector<uint64_t>> others_;  // by block
    std::unordered_map<uint64_t, RequestBlocks> requests_;
};

}  // namespace kvserver
