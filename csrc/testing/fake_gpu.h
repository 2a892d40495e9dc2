// fake_gpu.h: a simulated GPU for tests and for machines without one.
//
// Its memory is the host's, its streams are threads, its kernels are copy_blocks.cu compiled for
// the host. What gpu.h only REQUIRES of callers is checked, when work is queued and again when it
// runs; faults(), and standard error, report what was broken. Tests may pause its streams, make
// calls fail, and lose it.
//
// Memory of another process is a file: a descriptor (kFd), or a path in the handle's bytes, ended
// by a zero (kIpc).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gpu/gpu.h"
#include "testing/slow_copies.h"

namespace kvserver {

class FakeGpu final : public Gpu {
  public:
    struct Options {
        uint64_t seed = 0;                // not 0: each operation of a stream takes up to 200 us
        SlowCopies slow = {};             // none of these is a copy's first block
        uint64_t memory_bytes = 1 << 30;  // for allocate()
    };
    FakeGpu(std::string uuid, Options options);
    ~FakeGpu() override;

    // ---- for the test
    void pause();   // streams stop before their next operation
    void resume();  // and streams go on
    // The next call of this name, or the one after so many others (a function of Gpu, or
    // "address_range", which open() makes) throws. With `lost`, the GPU is lost by it: dead, so
    // that nothing moves any more, or with `alive` only abandoned, and work queued on its streams
    // still runs.
    void fail_next(const std::string& call, const std::string& what, bool lost, bool alive,
                   unsigned after);
    // The next call of this name, or the one after so many others, takes so much longer.
    void delay_next(const std::string& call, unsigned micros, unsigned after);
    void die(const std::string& what);  // dead without a call: waiters are woken
    std::vector<std::string> faults() const;
    std::map<std::string, uint64_t> calls() const;  // how often each was made
    uint64_t open_memories() const;
    uint64_t allocated_bytes() const;
    uint64_t pinned_bytes() const;

    // ---- Gpu
    std::string uuid() const override { return uuid_; }
    void enter() override;
    uint64_t free_bytes() override;
    std::byte* allocate(uint64_t bytes) override;
    void free(std::byte* memory) override;
    std::byte* allocate_pinned(uint64_t bytes) override;
    void free_pinned(std::byte* memory) override;
    void pin(std::byte* memory, uint64_t bytes) override;
    void unpin(std::byte* memory) override;
    GpuMemory open(const GpuHandle& handle, uint64_t bytes) override;
    void close(std::byte* data) override;
    Stream make_stream() override;
    void free_stream(Stream stream) override;
    Event make_event() override;
    void free_event(Event event) override;
    void record(Event event, Stream stream) override;
    void wait(Event event) override;
    void finish(Stream stream) override;
    uint64_t nanos_between(Event first, Event last) override;
    void copy(Stream stream, const std::vector<Piece>& pieces, bool pinned) override;
    void copy_blocks(Stream stream, Direction direction, const PackedBlocks& blocks) override;

  protected:
    bool alive() override { return !dead_; }  // mutex_ is held by every call that fails

  private:
    struct Mark {  // an event
        bool recorded = false, happened = false;
        uint64_t nanos = 0;
    };
    struct Work {
        std::function<void()> move;  // empty for an event
        Mark* mark = nullptr;        // that happens when all before it was moved
    };
    struct Queue {  // a stream
        std::deque<Work> work;
        bool busy = false, over = false;
        std::mt19937_64 random;
        std::thread thread;
    };
    struct Opened {
        std::string path;  // empty: by a descriptor
        uint64_t size, count;
    };
    struct Failure {
        std::string what;
        bool lost, alive;
        unsigned after;
    };
    struct Delay {
        unsigned micros, after;
    };
    using Ranges = std::map<const std::byte*, uint64_t>;

    void call(const std::string& name, std::unique_lock<std::mutex>& lock);
    void kill(std::unique_lock<std::mutex>& lock);
    void run(Queue& queue);
    void enqueue(Stream stream, std::function<void()> move, Mark* mark = nullptr);
    void wait_for(const std::function<bool()>& happened, std::unique_lock<std::mutex>& lock);
    bool require(bool kept, const std::string& rule);
    bool check(const Piece& piece, bool pinned);
    bool on_gpu(const std::byte* memory, uint64_t bytes) const;
    uint64_t free_now() const;
    static bool within(const Ranges& ranges, const std::byte* memory, uint64_t bytes);
    static bool touches(const Ranges& ranges, const std::byte* memory, uint64_t bytes);

    static std::mutex all_pinned_mutex_;  // the last one taken; guards all_pinned_
    static Ranges all_pinned_;            // host memory that any GPU of this process registered

    const std::string uuid_;
    const Options options_;
    mutable std::mutex mutex_;  // guards what follows; never held while bytes move
    std::condition_variable wake_;
    std::list<Queue> queues_;
    std::list<Mark> marks_;
    Ranges allocated_, rings_;  // GPU memory; host memory allocated pinned
    Ranges pinned_;             // host memory that this GPU registered
    std::map<std::byte*, Opened> opened_;
    std::set<std::thread::id> entered_;
    std::map<std::string, Failure> failures_;
    std::map<std::string, Delay> delays_;
    std::map<std::string, uint64_t> calls_;
    std::vector<std::string> faults_;
    bool paused_ = false, dying_ = false, dead_ = false;
};

}  // namespace kvserver
