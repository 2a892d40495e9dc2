// gpu_lane.h: all copies of one direction between L1 and one GPU.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu/gpu_device.h"

namespace kvserver {

// Three threads. One receives jobs, cuts them into batches and queues these on the slots' streams;
// another waits for each batch's event, in the same order, and ends the jobs; the third makes more
// slots. A job of one batch goes before the next batch of a longer one, every other time.
//
// On a lost GPU nothing more is queued. Jobs that have not begun end at once; the others when the
// waiting thread has seen that no stream of the lane moves anything any more, which on a dead
// context is at once. There is no deadline: a stream that never reports it keeps its jobs open, as
// it may still write into their blocks and pages until the process ends.
class Lane {
  public:
    // Throws std::system_error if the system makes no more threads.
    Lane(const L1& l1, std::shared_ptr<Gpu> gpu, CompletionQueue& completions, GpuOptions options);
    ~Lane();                                    // waits for batches in flight, drops the rest
    void submit(std::shared_ptr<CopyJob> job);  // REQUIRES: check_job() passed
    void cancel(uint64_t ticket);
    void gpu_lost();  // the GPU may be lost: look
    const LaneCounts& counts() const { return counts_; }

  private:
    // A job in progress. REQUIRES of all its members: mutex_ held.
    struct Flight {
        std::shared_ptr<CopyJob> job;
        unsigned in_flight = 0;  // batches
        bool begun = false;
        bool submitted = false;  // no batch follows
        std::string fault;       // why it failed, if it did
        Gpu::Event began = nullptr;
        uint64_t gpu_nanos = 0;
    };
    using Shared = std::shared_ptr<Flight>;

    // Resources of one batch at a time.
    struct Slot {
        Gpu::Stream stream = nullptr;
        Gpu::Event done = nullptr;
        std::byte* staging = nullptr;  // batch_bytes, or null: DMA only
        std::byte* table = nullptr;    // kTableBytes, pinned: planes and block ids for the kernel
        std::byte* gpu_table = nullptr;
    };
    struct Batch {
        Shared flight;
        uint64_t first, last;  // positions of the job, from its own first one on
        Slot* slot;
        bool of_long;
    };
    struct Queued {
        bool in_flight;     // some of it may move until its slot's event
        std::string fault;  // why not all of it was queued
    };

    void end_threads();
    void run_submits();
    void run_ends();
    std::deque<Shared>* next_queue();
    uint64_t waiting(uint64_t most) const;
    Batch next_batch(const Shared& flight, bool of_long);
    void free_slot(const Batch& batch);
    void ask_for_growth();
    void run_growth();
    bool make_more(Slot& slot);
    void make(Slot& slot);
    void free(Slot& slot);
    bool advance(const Shared& flight);
    uint64_t batch_end(const CopyJob& job) const;
    bool wants_staging(const CopyJob& job, uint64_t positions) const;
    bool stage(const Batch& batch);
    Queued try_queue(const Batch& batch);
    void queue_batch(const Batch& batch);
    void queue_staged(const Batch& batch);
    void finish(const Slot& slot);
    void complete_batch(const Batch& batch);
    void give_up(const Shared& flight, const std::string& fault);
    std::string wait_for(const Batch& batch, bool& entered);
    uint64_t nanos_of(const Batch& batch);
    void end_if_over(const Shared& flight);
    void end_after_loss(std::unique_lock<std::mutex>& lock);
    void end_as_lost(bool begun);
    bool all_quiet();
    void prepare();
    void prepare_staging();
    void tear_down();
    Gpu::Event take_event();

    const L1 l1_;
    const std::shared_ptr<Gpu> gpu_;
    CompletionQueue& completions_;
    const GpuOptions options_;
    LaneCounts counts_;

    // The submitting thread's; the other's while nothing is queued any more.
    bool prepared_ = false;
    bool no_staging_ = false;

    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_;
    std::deque<Shared> short_, long_;  // not wholly submitted
    bool short_had_turn_ = false;
    std::deque<Slot> slots_;           // they never move; each is used by one batch, or none
    std::deque<Slot*> idle_;           // used by none
    unsigned long_ones_ = 0;           // slots that batches of long_ use
    bool growing_ = false;             // one more slot is requested, or being made
    uint64_t grow_after_ = 0;          // not before
    std::map<uint64_t, Shared> open_;  // by ticket
    std::deque<Batch> running_;        // in flight, oldest first
    std::vector<Gpu::Event> events_;   // spare ones
    bool stopping_ = false;
    bool queuing_ = false;  // the submitting thread is giving the GPU a batch
    bool submits_over_ = false;
    bool loss_over_ = false;  // the GPU is lost, and what could end has
    std::vector<std::thread> threads_;
};

}  // namespace kvserver
