// host_copy.cpp: the bytes of one block, moved by this thread between mapped memory and pages.
#include "copy/host_copy.h"

#include <csetjmp>
#include <csignal>
#include <cstring>
#include <mutex>

#include "copy/slot_cursor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvserver {

namespace {

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

}  // namespace

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

namespace {

// SA_NODEFER leaves the signal mask alone, so that the guard need not save it (a system call a
// block). ThreadSanitizer's handler fills the mask all the same.
#ifdef __SANITIZE_THREAD__
constexpr int kSaveMask = 1;
#else
constexpr int kSaveMask = 0;
#endif

// Run f; false if the memory it touched was truncated. f must have nothing that needs a destructor.
template <typename F>
bool guarded(F&& f) {
    if (sigsetjmp(guard_return, kSaveMask) != 0) return false;
    guard_active = 1;
    f();
    guard_active = 0;
    return true;
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

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, uint64_t size) {
    if (can_stream && size >= kStreamBytes)
        stream_copy(to, from, size);
    else
        std::memcpy(to, from, size);
}

#else

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, uint64_t size) {
    std::memcpy(to, from, size);
}
#endif

namespace {

void copy_block(const CopyJob& job, uint64_t index, const L1& l1) {
    SlotCursor cursor(job, l1, job.skip + index);
    const uint64_t begin = cursor.start_of(job.skip + index);
    const uint32_t* ids = job.blocks.data() + index * job.planes->groups();
    for (const Plane& plane : job.planes->planes()) {
        if (ids[plane.group] == kNoBlock) continue;
        std::byte* l0 = plane.base + ids[plane.group] * plane.stride;
        cursor.visit(begin + plane.slot_offset, plane.run, [&](std::byte* at, uint64_t piece) {
            if (job.direction == Direction::kStore)
                copy_bytes(at, l0, piece);
            else
                copy_bytes(l0, at, piece);
            l0 += piece;
        });
    }
}

}  // namespace

bool copy_block_guarded(const CopyJob& job, uint64_t index, const L1& l1) {
    return guarded([&] { copy_block(job, index, l1); });
}

// Streamed stores are not ordered with others.
void finish_copies() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace kvserver
