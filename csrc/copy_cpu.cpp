// copy_cpu.cpp: the copier: threads that move blocks between planes and pages.
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <csetjmp>
#include <csignal>
#include <cstring>
#include <stdexcept>

#include "core.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvserver {

namespace {

// Bytes a thread takes from a job at a time: large enough that the queue lock is cheap, small
// enough that a load queued behind a store starts within a fraction of a millisecond.
constexpr uint64_t kBatchBytes = 1 << 20;

// A peer may truncate the memory it shares while we copy. The kernel then sends SIGBUS to the
// thread that touches it; the handler jumps back to the guard of that thread.
thread_local sigjmp_buf guard_return;
thread_local volatile sig_atomic_t guard_active = 0;
struct sigaction previous_sigbus;

void on_sigbus(int signal, siginfo_t* info, void* context) {
    if (guard_active) {
        guard_active = 0;
        siglongjmp(guard_return, 1);
    }
    // Not ours: behave as if we were not here.
    if (previous_sigbus.sa_flags & SA_SIGINFO) {
        previous_sigbus.sa_sigaction(signal, info, context);
        return;
    }
    sigaction(SIGBUS, &previous_sigbus, nullptr);
    raise(signal);
}

void install_sigbus_guard() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action{};
        action.sa_sigaction = on_sigbus;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;  // the jump leaves the handler: do not mask
        sigemptyset(&action.sa_mask);
        sigaction(SIGBUS, &action, &previous_sigbus);
    });
}

// SA_NODEFER leaves the signal mask alone, so that the guard need not save it (a system call a
// block). ThreadSanitizer's handler fills the mask all the same.
#ifdef __SANITIZE_THREAD__
constexpr int kSaveMask = 1;
#else
constexpr int kSaveMask = 0;
#endif

// Run f; false if the memory it touched is gone. f must hold nothing that needs a destructor.
template <typename F>
bool guarded(F&& f) {
    if (sigsetjmp(guard_return, kSaveMask) != 0) return false;
    guard_active = 1;
    f();
    guard_active = 0;
    return true;
}

void block_all_signals() {
    // Signals of the process are the main thread's; SIGBUS is synchronous and must stay ours.
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

// Pieces shorter than this go through the cache: the head and tail of a streamed copy would weigh
// more.
constexpr uint64_t kStreamBytes = 2048;

#if defined(__x86_64__)
// KV that was just copied is not read again soon, and a plain store first reads the line it
// overwrites. Non-temporal stores save that third of the memory traffic; libc does so only for far
// larger pieces.
__attribute__((target("avx2"))) void stream_copy(std::byte* to, const std::byte* from,
                                                 uint64_t size) {
    const uint64_t head = -reinterpret_cast<uintptr_t>(to) & 31;
    std::memcpy(to, from, head);
    to += head;
    from += head;
    size -= head;
    for (; size >= 128; to += 128, from += 128, size -= 128) {
        const auto* source = reinterpret_cast<const __m256i*>(from);
        auto* target = reinterpret_cast<__m256i*>(to);
        _mm_prefetch(reinterpret_cast<const char*>(from + 1024), _MM_HINT_NTA);
        _mm_prefetch(reinterpret_cast<const char*>(from + 1088), _MM_HINT_NTA);
        const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
        const __m256i c = _mm256_loadu_si256(source + 2), d = _mm256_loadu_si256(source + 3);
        _mm256_stream_si256(target, a);
        _mm256_stream_si256(target + 1, b);
        _mm256_stream_si256(target + 2, c);
        _mm256_stream_si256(target + 3, d);
    }
    std::memcpy(to, from, size);
}

const bool can_stream = __builtin_cpu_supports("avx2") != 0;

void copy_bytes(std::byte* to, const std::byte* from, uint64_t size) {
    if (can_stream && size >= kStreamBytes)
        stream_copy(to, from, size);
    else
        std::memcpy(to, from, size);
}

// Streamed stores are not ordered with others: before anyone is told that they happened.
void finish_copies() { _mm_sfence(); }
#else
void copy_bytes(std::byte* to, const std::byte* from, uint64_t size) {
    std::memcpy(to, from, size);
}
void finish_copies() {}
#endif

bool cancelled(const CopyJob& job) {
    if (job.word == nullptr) return false;
    return job.word->load(std::memory_order_acquire) != make_word(job.sequence, State::kRunning);
}

}  // namespace

uint64_t CopyJob::bytes_at(uint64_t position) const {
    const uint64_t groups = planes->groups();
    uint64_t sum = 0;
    for (uint64_t group = 0; group < groups; ++group)
        if (blocks[position * groups + group] != kNoBlock) sum += planes->group_bytes(group);
    return sum;
}

Copier::Copier(std::shared_ptr<HostRegion> region, uint64_t page_bytes, unsigned threads,
               unsigned delay_micros)
    : region_(std::move(region)), page_bytes_(page_bytes), delay_micros_(delay_micros) {
    if (threads == 0) throw std::invalid_argument("the copier needs at least one thread");
    if (page_bytes == 0 || page_bytes > region_->size())
        throw std::invalid_argument("a page needs at least one byte, and L1 at least one page");
    install_sigbus_guard();
    for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { run_copies(); });
    threads_.emplace_back([this] { run_maps(); });
}

Copier::~Copier() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        for (auto* queue : {&loads_, &stores_}) {
            for (auto& job : *queue) job->stop = true;
        }
        for (auto& job : busy_) job->stop = true;
    }
    wake_.notify_all();
    wake_maps_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Copier::submit(std::shared_ptr<CopyJob> job) {
    if (!job->planes || job->blocks.empty() || job->blocks_per_slot == 0)
        throw std::invalid_argument("a copy job needs planes, blocks and a slot size");
    const uint64_t groups = job->planes->groups();
    if (job->blocks.size() % groups != 0)
        throw std::invalid_argument("a copy job names blocks for a part of the groups");
    uint64_t pages = 0;
    job->extent_ends.clear();
    for (const Extent& extent : job->extents) {
        if (extent.count == 0 ||
            uint64_t{extent.first} + extent.count > region_->size() / page_bytes_)
            throw std::invalid_argument(std::to_string(extent.count) + " pages from page " +
                                        std::to_string(extent.first) + " on do not lie in L1");
        job->extent_ends.push_back(pages += extent.count);
    }
    if (job->pages_per_slot == 0 || pages % job->pages_per_slot != 0)
        throw std::invalid_argument("the extents of a copy job make no whole slots");
    const uint64_t slots = pages / job->pages_per_slot;
    if (job->skip + job->positions() > slots * job->blocks_per_slot)
        throw std::invalid_argument("a copy job names more blocks than its slots hold");
    const auto slot_bytes =
        static_cast<unsigned __int128>(job->blocks_per_slot) * job->planes->block_bytes();
    if (slot_bytes > static_cast<unsigned __int128>(job->pages_per_slot) * page_bytes_)
        throw std::invalid_argument("a slot has too few pages for its blocks");
    const bool may_have_holes = groups > 1 && job->direction == Direction::kLoad;
    for (uint32_t id : job->blocks)
        if (id == kNoBlock ? !may_have_holes : id >= job->planes->num_blocks())
            throw std::invalid_argument("block id " + std::to_string(id) + " of " +
                                        std::to_string(job->planes->num_blocks()));
    {
        std::lock_guard lock(mutex_);
        (job->direction == Direction::kLoad ? loads_ : stores_).push_back(std::move(job));
    }
    wake_.notify_all();
}

void Copier::cancel(uint64_t ticket) {
    std::lock_guard lock(mutex_);
    auto stop = [ticket](const std::shared_ptr<CopyJob>& job) {
        if (job->ticket == ticket) job->stop = true;
    };
    std::for_each(loads_.begin(), loads_.end(), stop);
    std::for_each(stores_.begin(), stores_.end(), stop);
    std::for_each(busy_.begin(), busy_.end(), stop);
}

// REQUIRES: mutex_ held. The job whose blocks should be copied next, or null.
std::shared_ptr<CopyJob> Copier::front_job() {
    if (!loads_.empty()) return loads_.front();
    if (!stores_.empty()) return stores_.front();
    return nullptr;
}

// REQUIRES: mutex_ held, nobody took a block yet. Claims the operation by its state word; if that
// fails, or it is late or was cancelled, completes it without touching a byte.
bool Copier::begin(CopyJob& job) {
    job.started_nanos = monotonic_nanos();
    Completion refused{job.ticket, Outcome::kCancelled, 0, 0, ""};
    if (job.deadline_nanos != 0 && job.started_nanos > job.deadline_nanos) {
        refused.outcome = Outcome::kLate;
        refused.what = "its deadline had passed before the copy could start";
    } else if (job.stop) {
        refused.what = "the server ended it before the copy started";
    } else if (job.word == nullptr ||
               move_word(*job.word, job.sequence, State::kPending, State::kRunning)) {
        return true;
    } else {
        refused.what = "the worker cancelled it before the copy started";
    }
    if (job.word != nullptr) move_word(*job.word, job.sequence, State::kPending, State::kFailed);
    completions_.push(std::move(refused));
    return false;
}

void Copier::run_copies() {
    block_all_signals();
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return stopping_ || !loads_.empty() || !stores_.empty(); });
        if (stopping_) return;
        std::shared_ptr<CopyJob> job = front_job();
        auto& queue = job->direction == Direction::kLoad ? loads_ : stores_;
        const uint64_t total = job->positions();
        const uint64_t first = job->next;
        if (first == 0 && !begin(*job)) {
            queue.pop_front();
            continue;
        }
        const uint64_t batch = std::max<uint64_t>(1, kBatchBytes / job->planes->block_bytes());
        const uint64_t last = job->stop ? total : std::min(total, first + batch);
        job->next = last;
        if (last == total) {
            queue.pop_front();
            busy_.push_back(job);
        }
        lock.unlock();
        copy_batch(*job, first, last);
        finish_copies();
        const bool settled = job->settled.fetch_add(last - first) + (last - first) == total;
        if (settled) finish(*job);
        lock.lock();
        if (settled) std::erase(busy_, job);
    }
}

void Copier::copy_batch(CopyJob& job, uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
        if (job.stop || cancelled(job)) {
            job.stop = true;
            return;
        }
        if (delay_micros_ != 0)
            std::this_thread::sleep_for(std::chrono::microseconds(delay_micros_));
        if (!guarded([&] { copy_block(job, i); })) {
            job.memory_lost = true;
            job.stop = true;
            return;
        }
        job.bytes += job.bytes_at(i);
    }
}

void Copier::copy_block(const CopyJob& job, uint64_t index) const {
    const uint64_t position = job.skip + index;
    const uint64_t slot = position / job.blocks_per_slot;
    // Where the block begins if the slots lay end to end, and the extent that holds its first byte.
    const uint64_t begin = slot * job.pages_per_slot * page_bytes_ +
                           position % job.blocks_per_slot * job.planes->block_bytes();
    const auto ends = job.extent_ends.begin();
    auto extent = static_cast<size_t>(
        std::upper_bound(ends, job.extent_ends.end(), begin / page_bytes_) - ends);
    const uint32_t* ids = job.blocks.data() + index * job.planes->groups();
    for (const Plane& plane : job.planes->planes()) {
        if (ids[plane.group] == kNoBlock) continue;
        std::byte* l0 = plane.base + ids[plane.group] * plane.stride;
        uint64_t offset = begin + plane.slot_offset;
        for (uint64_t left = plane.run; left > 0;) {
            while (job.extent_ends[extent] * page_bytes_ <= offset) ++extent;
            const uint64_t in_extent = job.extent_ends[extent] * page_bytes_ - offset;  // still
            const uint64_t piece = std::min(left, in_extent);
            const uint64_t last = uint64_t{job.extents[extent].first} + job.extents[extent].count;
            std::byte* l1 = region_->data() + last * page_bytes_ - in_extent;
            if (job.direction == Direction::kStore)
                copy_bytes(l1, l0, piece);
            else
                copy_bytes(l0, l1, piece);
            l0 += piece;
            offset += piece;
            left -= piece;
        }
    }
}

// Called once, by the thread that settled the last block. Moving the word to DONE is what makes
// the copy count: after a worker's cancel it fails, and the result is a cancelled job.
void Copier::finish(CopyJob& job) {
    Completion done{job.ticket, Outcome::kDone, job.bytes, monotonic_nanos() - job.started_nanos,
                    ""};
    const bool memory_lost = job.memory_lost || !job.planes->intact();
    const bool whole = !memory_lost && !job.stop;
    if (whole && (job.word == nullptr ||
                  move_word(*job.word, job.sequence, State::kRunning, State::kDone))) {
        completions_.push(std::move(done));
        return;
    }
    bool by_worker = false;
    if (job.word != nullptr) {
        const bool acknowledged =
            move_word(*job.word, job.sequence, State::kCancelling, State::kCancelled);
        by_worker =
            acknowledged || !move_word(*job.word, job.sequence, State::kRunning, State::kFailed);
        // A load's cancel may have come between the two attempts; it must be answered too.
        if (by_worker && !acknowledged)
            move_word(*job.word, job.sequence, State::kCancelling, State::kCancelled);
    }
    if (memory_lost) {
        done.outcome = Outcome::kMemoryLost;
        done.what = "the engine's memory was truncated while it was copied";
    } else {
        done.outcome = Outcome::kCancelled;
        done.what = by_worker ? "the worker cancelled it" : "the server ended it";
    }
    completions_.push(std::move(done));
}

void Copier::submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) {
    {
        std::lock_guard lock(mutex_);
        maps_.push_back({ticket, false, std::move(mappings)});
    }
    wake_maps_.notify_all();
}

void Copier::submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) {
    {
        std::lock_guard lock(mutex_);
        maps_.push_back({ticket, true, std::move(mappings)});
    }
    wake_maps_.notify_all();
}

void Copier::run_maps() {
    block_all_signals();
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_maps_.wait(lock, [this] { return stopping_ || !maps_.empty(); });
        if (maps_.empty()) return;  // stopping, and everything was unmapped
        MapJob job = std::move(maps_.front());
        maps_.pop_front();
        lock.unlock();
        Completion done{job.ticket, Outcome::kDone, 0, monotonic_nanos(), ""};
        try {
            for (size_t i = 0; i < job.mappings.size(); ++i) {
                if (job.unmap)
                    job.mappings[i]->unmap();
                else
                    job.mappings[i]->map(i + 1 == job.mappings.size());
                done.bytes += job.mappings[i]->size();
            }
        } catch (const std::exception& error) {
            for (auto& mapping : job.mappings) mapping->unmap();
            done.outcome = Outcome::kFailed;
            done.what = error.what();
        }
        done.nanos = monotonic_nanos() - done.nanos;
        completions_.push(std::move(done));
        lock.lock();
    }
}

}  // namespace kvserver
