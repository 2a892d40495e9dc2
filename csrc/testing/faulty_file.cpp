// faulty_file.cpp: see faulty_file.h.
#include "testing/faulty_file.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

namespace kvserver {

namespace {

constexpr size_t kAligned = 4096;

// At least `most` bytes, in whole ones of direct I/O: a call may report less than it moved.
std::vector<iovec> cut(const iovec* vectors, int count, size_t most) {
    std::vector<iovec> result;
    size_t left = most == 0 ? SIZE_MAX : (most + kAligned - 1) / kAligned * kAligned;
    for (int i = 0; i < count && left != 0; ++i) {
        const size_t part = std::min(left, vectors[i].iov_len);
        result.push_back({vectors[i].iov_base, part});
        left -= part;
    }
    return result;
}

ssize_t reported(ssize_t moved, size_t most) {
    return most != 0 && moved > static_cast<ssize_t>(most) ? static_cast<ssize_t>(most) : moved;
}

bool flips(Faults& faults) {
    const size_t every = faults.flip_every;
    return every != 0 && faults.calls % every == 0;
}

}  // namespace

void FaultyFile::hang(bool on) {
    std::lock_guard lock(mutex_);
    hangs_ = on;
    woken_.notify_all();
}

void FaultyFile::wait() {
    std::unique_lock lock(mutex_);
    ++hanging_;
    woken_.wait(lock, [this] { return !hangs_; });
    --hanging_;
}

bool FaultyFile::fails(Faults& faults) {
    ++faults.calls;
    if (const unsigned micros = faults.delay_micros; micros != 0)
        std::this_thread::sleep_for(std::chrono::microseconds(micros));
    wait();
    errno = faults.error;
    return errno != 0;
}

ssize_t FaultyFile::read(int fd, const iovec* to, int count, off_t offset) {
    if (fails(reads)) return -1;
    const auto vectors = cut(to, count, reads.most_bytes);
    const ssize_t moved =
        FileCalls::read(fd, vectors.data(), static_cast<int>(vectors.size()), offset);
    if (moved > 0 && flips(reads))
        static_cast<std::byte*>(
            to[0].iov_base)[std::min<size_t>(static_cast<size_t>(moved), to[0].iov_len) / 2] ^=
            std::byte{1};
    return reported(moved, reads.most_bytes);
}

ssize_t FaultyFile::write(int fd, const iovec* from, int count, off_t offset) {
    if (fails(writes)) return -1;
    auto vectors = cut(from, count, writes.most_bytes);
    if (!flips(writes))
        return reported(
            FileCalls::write(fd, vectors.data(), static_cast<int>(vectors.size()), offset),
            writes.most_bytes);
    const size_t bytes = vectors[0].iov_len;
    auto* copy = static_cast<std::byte*>(
        std::aligned_alloc(kAligned, (bytes + kAligned - 1) / kAligned * kAligned));
    std::memcpy(copy, vectors[0].iov_base, bytes);
    copy[bytes / 2] ^= std::byte{1};
    vectors[0].iov_base = copy;
    const ssize_t moved =
        FileCalls::write(fd, vectors.data(), static_cast<int>(vectors.size()), offset);
    std::free(copy);
    return reported(moved, writes.most_bytes);
}

}  // namespace kvserver
