// core.h: the contract of kvserver's native part.
//
// What it is: the memory that KV blocks are copied between, the copy jobs, and how their end is
// told. Nothing here knows tensors, layers, messages or namespaces: addresses and integers only.
//
// Two kinds of memory:
//   L0  an engine's KV cache, seen as planes. Block `id` of plane p is the `run` bytes at
//       p.base + id * p.stride.
//   L1  one region of equal pages. A slot is a list of extents, runs of neighbouring pages; inside
//       a slot, bytes are laid out [block][plane][run], so the bytes of one block are contiguous
//       but where an extent ends.
//
// Who may write what: a store reads L0 and writes the pages of its slots; a load reads the pages
// and writes L0. The caller (the server loop) keeps slots alive and unshared until the job's
// Completion was drained; it keeps mappings alive likewise. The copier never allocates L1.
//
// Threads: every public function may be called from any thread. Jobs are run by the copier's own
// threads, which never touch Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace kvserver {

// ---- the state word -------------------------------------------------------------------------
// One 64-bit word per operation in a page that worker and server share: sequence << 8 | state.
// It is moved only by compare-and-swap, so exactly one side decides each step:
//   worker  PENDING -> CANCELLED                      the server will not touch a byte
//   worker  RUNNING -> CANCELLED   (store)            the server will not publish
//   worker  RUNNING -> CANCELLING  (load)             a request; blocks stay the server's until
//   server  CANCELLING -> CANCELLED (load)            ... this acknowledgement
//   server  PENDING -> RUNNING                        before the first byte
//   server  RUNNING -> DONE | FAILED                  after the last byte
//   server  PENDING -> FAILED                         refused or too late, nothing was copied
// The sequence makes a word that was reused for a later operation unequal to the one a late
// server remembers.
enum class State : uint8_t { kIdle, kPending, kRunning, kDone, kFailed, kCancelled, kCancelling };

using Word = std::atomic<uint64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

constexpr uint64_t make_word(uint64_t sequence, State state) {
    return sequence << 8 | static_cast<uint64_t>(state);
}

bool move_word(Word& word, uint64_t sequence, State from, State to);

// ---- memory ---------------------------------------------------------------------------------
// A file descriptor of another process, mapped shared. map() and unmap() may be slow: they are
// run as jobs. The owner may truncate the file at any time, so every access must be guarded.
// enable_shared_from_this, here and in PlaneTable: then a shared_ptr that comes from Python does
// not hold the Python object, and a copier thread that drops the last one needs no GIL.
class Mapping : public std::enable_shared_from_this<Mapping> {
  public:
    Mapping(int fd, uint64_t size);  // takes over fd
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    void map(bool must_be_sealed);  // throws std::runtime_error with the reason
    void unmap();                   // also closes the fd; idempotent
    bool intact() const;            // false once the file is shorter than what was mapped

    std::byte* data() const { return data_; }
    uint64_t size() const { return size_; }
    bool mapped() const { return data_ != nullptr; }
    Word* word(uint64_t index) const;  // null unless it is mapped and holds that word

  private:
    int fd_;
    uint64_t size_;
    std::byte* data_ = nullptr;
};

struct Plane {
    std::byte* base;
    uint64_t stride;       // bytes from one block to the next
    uint64_t run;          // contiguous bytes of one block
    uint64_t slot_offset;  // where the run lies within a block's bytes in a slot
    uint64_t group;        // which of a position's block ids names the block
};

// Where one group of a load has no block: its planes are left alone there.
constexpr uint32_t kNoBlock = UINT32_MAX;
constexpr uint64_t kMaxGroups = 64;

// The planes of one registration, bounds-checked against the mappings once, here.
// Keeps its mappings alive; whoever unmaps one must have settled every job on the table first.
//
// Planes belong to KV cache groups 0..groups()-1. Every group has a block of its own at each
// position, and their planes may share memory. In a slot, a position's bytes are those of all
// planes in order, whatever their group.
class PlaneTable : public std::enable_shared_from_this<PlaneTable> {
  public:
    // One row per plane: index into `memories`, byte offset, stride, run, group.
    struct Row {
        uint64_t memory, offset, stride, run, group = 0;
    };
    // Throws std::invalid_argument naming the plane and the numbers.
    PlaneTable(std::vector<std::shared_ptr<Mapping>> memories, const std::vector<Row>& rows,
               uint64_t num_blocks);

    const std::vector<Plane>& planes() const { return planes_; }
    uint64_t num_blocks() const { return num_blocks_; }
    uint64_t block_bytes() const { return block_bytes_; }  // of one position, over all groups
    uint64_t groups() const { return group_bytes_.size(); }
    uint64_t group_bytes(uint64_t group) const { return group_bytes_[group]; }
    bool intact() const;

  private:
    std::vector<std::shared_ptr<Mapping>> memories_;
    std::vector<Plane> planes_;
    uint64_t num_blocks_;
    uint64_t block_bytes_ = 0;
    std::vector<uint64_t> group_bytes_;
};

// The L1 region: private memory, touched lazily. Lives as long as the process serves.
class HostRegion {
  public:
    explicit HostRegion(uint64_t size);  // throws std::runtime_error
    ~HostRegion();
    HostRegion(const HostRegion&) = delete;
    HostRegion& operator=(const HostRegion&) = delete;
    std::byte* data() const { return data_; }
    uint64_t size() const { return size_; }

  private:
    std::byte* data_;
    uint64_t size_;
};

// ---- completion -----------------------------------------------------------------------------
enum class Outcome : uint8_t { kDone, kFailed, kCancelled, kLate, kMemoryLost };

struct Completion {
    uint64_t ticket;
    Outcome outcome;
    uint64_t bytes;    // bytes moved, also by an unfinished job
    uint64_t nanos;    // from the first byte (or the start of the call) to the end
    std::string what;  // why it failed; empty otherwise
};

// A mailbox with an eventfd that is readable while it holds something.
class CompletionQueue {
  public:
    CompletionQueue();
    ~CompletionQueue();
    int fd() const { return fd_; }
    void push(Completion completion);
    std::vector<Completion> drain();

  private:
    int fd_;
    std::mutex mutex_;
    std::vector<Completion> items_;
};

// ---- jobs -----------------------------------------------------------------------------------
enum class Direction : uint8_t { kStore, kLoad };  // store: L0 -> L1, load: L1 -> L0

struct Extent {
    uint32_t first, count;  // pages
};

// One ticket's copy. `blocks` names one block per group for each position; the i-th of these belong
// to position skip + i of the slots laid end to end, `blocks_per_slot` positions each: a load that
// leaves the first n blocks alone sets skip = n. A load of several groups may have kNoBlock for
// some. REQUIRES: ids < planes->num_blocks(), none twice; extents lie in the region; word outlives
// it.
struct CopyJob {
    uint64_t ticket = 0;
    Direction direction = Direction::kStore;
    std::shared_ptr<PlaneTable> planes;
    std::vector<uint32_t> blocks;
    std::vector<Extent> extents;        // pages_per_slot for each slot, slots in order
    std::vector<uint64_t> extent_ends;  // pages up to the end of each extent; set by submit()
    uint32_t pages_per_slot = 0;
    uint32_t blocks_per_slot = 0;
    uint32_t skip = 0;
    std::shared_ptr<Mapping> word_memory;  // keeps `word` mapped
    Word* word = nullptr;
    uint64_t sequence = 0;
    uint64_t deadline_nanos = 0;  // CLOCK_MONOTONIC; not started after it; 0 = none

    // Progress, written by copier threads only.
    std::atomic<uint64_t> next{0};     // first position nobody took yet
    std::atomic<uint64_t> settled{0};  // positions copied or given up
    std::atomic<uint64_t> bytes{0};
    std::atomic<bool> stop{false};  // set by cancel() or by a failing thread
    std::atomic<bool> memory_lost{false};
    uint64_t started_nanos = 0;

    uint64_t positions() const { return blocks.size() / planes->groups(); }
    uint64_t bytes_at(uint64_t position) const;  // what is copied there
};

// The worker's side of the state words: a sealed memfd that is handed to the server.
class WordPage {
  public:
    explicit WordPage(uint64_t words);  // throws std::system_error
    ~WordPage();
    WordPage(const WordPage&) = delete;
    WordPage& operator=(const WordPage&) = delete;
    int fd() const { return fd_; }
    uint64_t count() const { return count_; }
    Word& at(uint64_t index) const;  // throws std::out_of_range

  private:
    int fd_;
    uint64_t count_;
    Word* words_;
};

// Threads that copy. All of them help the job in front, loads before stores, so one large job
// uses the whole machine and a small load never waits behind a large store for more than a batch.
class Copier {
  public:
    // delay_micros: pause before each block, so that tests can act in the middle of a copy.
    Copier(std::shared_ptr<HostRegion> region, uint64_t page_bytes, unsigned threads,
           unsigned delay_micros);
    ~Copier();  // stops; jobs not begun are dropped, running ones end at their next block

    int completion_fd() const { return completions_.fd(); }
    std::vector<Completion> drain() { return completions_.drain(); }

    void submit(std::shared_ptr<CopyJob> job);
    void cancel(uint64_t ticket);  // ends at the next block; its completion still comes
    // Map all (the last one is the sealed word page), or unmap all; one completion each.
    void submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings);
    void submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings);

  private:
    struct MapJob {
        uint64_t ticket;
        bool unmap;
        std::vector<std::shared_ptr<Mapping>> mappings;
    };

    void run_copies();
    void run_maps();
    std::shared_ptr<CopyJob> front_job();
    bool begin(CopyJob& job);
    void copy_batch(CopyJob& job, uint64_t first, uint64_t last);
    void copy_block(const CopyJob& job, uint64_t index) const;
    void finish(CopyJob& job);

    std::shared_ptr<HostRegion> region_;
    const uint64_t page_bytes_;
    const unsigned delay_micros_;
    CompletionQueue completions_;

    std::mutex mutex_;  // guards the queues below
    std::condition_variable wake_;
    std::condition_variable wake_maps_;
    std::deque<std::shared_ptr<CopyJob>> loads_;
    std::deque<std::shared_ptr<CopyJob>> stores_;
    std::vector<std::shared_ptr<CopyJob>> busy_;  // all blocks taken, not all settled
    std::deque<MapJob> maps_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

uint64_t monotonic_nanos();

}  // namespace kvserver
