// core.h: the contract of kvserver's native part.
//
// What it is: the memory that KV blocks are copied between, the copy jobs, and how their end is
// reported. Nothing here knows tensors, layers, messages or namespaces: addresses and integers
// only.
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
// Completion was drained; it keeps mappings alive as long. A device never allocates L1.
//
// Threads: every public function may be called from any thread. Jobs are run by a device's own
// threads, which never touch Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "copy/plane_series.h"

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
// Memory that another process owns, mapped here: into the host's address space or a GPU's. map()
// and unmap() may be slow: they are run as jobs, by the device that copies to it.
// enable_shared_from_this, here and in every class that Python passes to native code: a shared_ptr
// that comes from Python then does not own the Python object, and a copying thread that drops the
// last one needs no GIL.
class Mapping : public std::enable_shared_from_this<Mapping> {
  public:
    explicit Mapping(uint64_t size) : size_(size) {}
    virtual ~Mapping() = default;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    virtual void map() = 0;  // throws std::runtime_error with the reason
    // Also closes the descriptor or handle that it was made from; idempotent. Throws
    // std::runtime_error if something stays mapped, which then does so for good.
    virtual void unmap() = 0;
    virtual bool intact() const = 0;   // false once the memory is smaller than what was mapped
    virtual bool on_host() const = 0;  // whether a host thread may touch data()
    // The allocation that this mapping is a part of; no copy may span two. REQUIRES: mapped().
    virtual const void* allocation() const { return this; }

    std::byte* data() const { return data_; }
    uint64_t size() const { return size_; }
    bool mapped() const { return data_ != nullptr; }

  protected:
    uint64_t size_;
    std::byte* data_ = nullptr;
};

// A file descriptor, mapped shared. The owner of the file may truncate it at any time, so every
// access must be guarded.
class FileMapping : public Mapping {
  public:
    FileMapping(int fd, uint64_t size);  // takes over fd
    ~FileMapping() override;
    void map() override;
    void unmap() override;
    bool intact() const override;
    bool on_host() const override { return true; }

  protected:
    int fd_;
};

// A page of state words. They are read without a guard, so it must be sealed against shrinking.
class WordMapping final : public FileMapping {
  public:
    using FileMapping::FileMapping;
    void map() override;
    Word* word(uint64_t index) const;  // null unless it is mapped and has that word
};

constexpr uint64_t kMaxGroups = 64;

// The planes of one registration, bounds-checked against the mappings once, here.
// Keeps its mappings alive. REQUIRES of an unmap: every job on the table has ended.
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
    const std::vector<PlaneSeries>& series() const { return series_; }  // the same planes
    uint64_t num_blocks() const { return num_blocks_; }
    uint64_t block_bytes() const { return block_bytes_; }  // of one position, over all groups
    uint64_t groups() const { return group_bytes_.size(); }
    uint64_t group_bytes(uint64_t group) const { return group_bytes_[group]; }
    bool intact() const;
    bool on_host() const;  // all of it
    const std::vector<std::shared_ptr<Mapping>>& memories() const { return memories_; }

  private:
    std::vector<std::shared_ptr<Mapping>> memories_;
    std::vector<Plane> planes_;
    std::vector<PlaneSeries> series_;
    uint64_t num_blocks_;
    uint64_t block_bytes_ = 0;
    std::vector<uint64_t> group_bytes_;
};

// Where L1 lies. Explicit huge pages are reserved when L1 is mapped, or mapping fails: one that is
// missing at the first touch would be a SIGBUS. Nodes are a wish: numa_error() is why it failed.
struct Placement {
    uint64_t huge_page_bytes = 0;  // of explicit ones; 0: none
    bool transparent = true;       // if there are none, advise transparent ones or against them
    std::vector<unsigned> nodes;   // interleave over several, stay on a single one; none: no policy
    bool bound = false;
};

// A memory policy as the kernel reports it; mode is "unknown" where the query is forbidden.
struct NumaPolicy {
    std::string mode;
    std::vector<unsigned> nodes;
};
NumaPolicy numa_policy_at(const void* address);  // of that memory; of this thread for null

// The L1 region: private memory, touched lazily. It exists as long as the process serves.
class HostRegion : public std::enable_shared_from_this<HostRegion> {
  public:
    explicit HostRegion(uint64_t size, const Placement& placement = {});  // std::runtime_error
    ~HostRegion();
    HostRegion(const HostRegion&) = delete;
    HostRegion& operator=(const HostRegion&) = delete;
    std::byte* data() const { return data_; }
    uint64_t size() const { return size_; }
    const std::string& numa_error() const { return numa_error_; }

    // The first `pinned_bytes` bytes are pinned for GPUs, in registrations of kPinBytes; no copy
    // may span two of them. Only a Pinner changes it.
    static constexpr uint64_t kPinBytes = 256ull << 20;
    std::atomic<uint64_t> pinned_bytes{0};

  private:
    std::byte* data_;
    uint64_t size_;
    uint64_t mapped_bytes_;  // whole huge pages
    std::string numa_error_;
};

// ---- completion -----------------------------------------------------------------------------
enum class Outcome : uint8_t { kDone, kFailed, kCancelled, kLate, kMemoryLost, kDeviceLost };

struct Completion {
    uint64_t ticket;
    Outcome outcome;
    uint64_t bytes;    // bytes moved, also by an unfinished job
    uint64_t nanos;    // from the first byte (or the start of the call) to the end
    std::string what;  // why it failed; empty otherwise
};

// A mailbox with an eventfd that is readable while the mailbox is not empty.
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
    std::vector<uint64_t> extent_ends;  // pages up to the end of each extent; set by check_job()
    uint32_t pages_per_slot = 0;
    uint32_t blocks_per_slot = 0;
    uint32_t skip = 0;
    std::shared_ptr<WordMapping> word_memory;  // keeps `word` mapped
    Word* word = nullptr;
    uint64_t sequence = 0;
    uint64_t deadline_nanos = 0;  // CLOCK_MONOTONIC; not started after it; 0 = none

    // Progress, written by the device only.
    std::atomic<uint64_t> next{0};       // first position that no thread has begun
    std::atomic<uint64_t> processed{0};  // positions copied or given up
    std::atomic<uint64_t> bytes{0};
    std::atomic<bool> stop{false};  // set by cancel() or by a failing thread
    std::atomic<bool> memory_lost{false};
    uint64_t started_nanos = 0;

    uint64_t positions() const { return blocks.size() / planes->groups(); }
    uint64_t bytes_at(uint64_t position) const;  // what is copied there
};

// One ticket's mappings: all are mapped, or all unmapped.
struct MapJob {
    uint64_t ticket;
    bool unmap;
    std::vector<std::shared_ptr<Mapping>> mappings;
};

// ---- devices --------------------------------------------------------------------------------
// What moves the bytes. Each backend is one: the CPU's threads, a GPU's streams, a test's stand-in.
//
// Tickets. Every ticket that a submit_ function accepted ends exactly once, by one Completion, also
//   after cancel() and after the device was lost. A submit_ function that throws accepted nothing
//   and moved no word. Ends come in any order: a device may run, finish and report tickets in
//   whatever order suits it, loads and stores never wait for each other, and no caller may rely on
//   a ticket that was submitted earlier. Tickets that are open when a device is destroyed do not
//   end; from then on it writes nothing.
// Words. By begin_job() before the first byte and by end_job() after the last one, nowhere else.
//   The Completion is pushed after the word was moved. A word in PENDING that cannot begin is
//   FAILED.
// Cancel. cancel(), or the worker by the word, requests it. Until the ticket ends the device may go
//   on reading (a store) or writing (a load) the ticket's blocks and pages; it must look at least
//   once a block, or as often as its hardware lets it, and end the ticket as kCancelled, unless the
//   whole copy had counted by then. Once the ticket ended it touches neither. An unknown ticket is
//   ignored: it has ended.
// Failure. A ticket that ends as anything but kDone may have moved any part of its bytes:
//   `bytes` is how many; its pages, and for a load its blocks, contain garbage.
// Loss. When the hardware is lost for good, every open ticket ends as kDeviceLost, after the
//   device made sure that none of its bytes still moves; where the device cannot, the ticket stays
//   open until the process ends. Later copies and maps end as kDeviceLost at once. Unmaps are still
//   carried out, and end as kDone. lost() is the reason from then on.
// Time. No function waits for a copy, a map or the hardware: all return at once and may be called
//   by the loop. Only the destructor waits, until each running copy is at its next block.
class Device {
  public:
    virtual ~Device() = default;

    virtual int completion_fd() const = 0;  // readable while drain() would return something
    virtual std::vector<Completion> drain() = 0;
    virtual std::string lost() const = 0;  // why no copy can succeed any more; empty while it can

    // Throws std::invalid_argument by check_job().
    virtual void submit_copy(std::shared_ptr<CopyJob> job) = 0;
    virtual void cancel(uint64_t ticket) = 0;
    // A map that fails leaves nothing mapped. An unmap that fails has ended as well: see Mapping.
    // REQUIRES of an unmap: no open copy uses the mappings.
    virtual void submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) = 0;
    virtual void submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) = 0;
};

// What backends share. L1 as jobs address it:
struct L1 {
    std::shared_ptr<HostRegion> region;
    uint64_t page_bytes;
};

void check_l1(const L1& l1);                 // throws std::invalid_argument
void check_job(CopyJob& job, const L1& l1);  // likewise, naming the numbers; sets extent_ends
bool cancelled(const CopyJob& job);          // by the worker
// Claim the operation: PENDING -> RUNNING. If it may not begin, how it ended; not a byte moves
// then.
std::optional<Completion> begin_job(CopyJob& job);
// End a job that did not begin. Its word becomes FAILED unless the worker cancelled it.
Completion refuse_job(const CopyJob& job, Outcome outcome, std::string what);
// End a job that began, once, after its last byte. `fault` is what broke it, if anything did.
// Moving the word to DONE is what makes a copy count: after a worker's cancel that fails.
Completion end_job(const CopyJob& job, Outcome fault = Outcome::kDone, std::string what = "");
Completion run_map_job(const MapJob& job);
// End a map that was not run because the device is lost: its descriptors are closed.
Completion refuse_map_job(const MapJob& job, std::string what);

// Copying by this thread (host_copy.cpp). False if the engine's memory was truncated.
// REQUIRES: install_sigbus_guard() was called, begin_job() let it begin.
bool copy_block_guarded(const CopyJob& job, uint64_t index, const L1& l1);
void finish_copies();  // before the end of this thread's copies is reported
void install_sigbus_guard();

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

// The CPU as a device: threads that copy. All of them help the job in front, loads before stores,
// so one large job uses the whole machine and a small load never waits behind a large store for
// more than a batch. A CPU is never lost.
class CpuDevice final : public Device {
  public:
    // delay_micros: pause before each block. For tests, which act in the middle of a copy; the
    // daemon leaves it 0.
    CpuDevice(std::shared_ptr<HostRegion> region, uint64_t page_bytes, unsigned threads,
              unsigned delay_micros);
    ~CpuDevice()
        override;  // stops; jobs not begun are dropped, running ones end at their next block

    int completion_fd() const override { return completions_.fd(); }
    std::vector<Completion> drain() override { return completions_.drain(); }
    std::string lost() const override { return {}; }
    void submit_copy(std::shared_ptr<CopyJob> job) override;
    void cancel(uint64_t ticket) override;
    void submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) override;
    void submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) override;

  private:
    void queue_map(MapJob job);
    void run_copies();
    void run_maps();
    std::shared_ptr<CopyJob> front_job();
    void copy_batch(CopyJob& job, uint64_t first, uint64_t last);

    const L1 l1_;
    const unsigned delay_micros_;
    CompletionQueue completions_;

    std::mutex mutex_;  // guards the queues below
    std::condition_variable wake_;
    std::condition_variable wake_maps_;
    std::deque<std::shared_ptr<CopyJob>> loads_;
    std::deque<std::shared_ptr<CopyJob>> stores_;
    std::vector<std::shared_ptr<CopyJob>> busy_;  // all positions begun, not all processed
    std::deque<MapJob> maps_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

uint64_t monotonic_nanos();
// Of a copying thread: signals are the main thread's. SIGBUS is synchronous and must stay ours.
void block_signals();

}  // namespace kvserver
