// state_word.cpp: state words and their pages.
#include "copy/state_word.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <climits>
#include <ctime>
#include <stdexcept>
#include <system_error>

#include "copy/threads.h"

namespace kvserver {

namespace {

// The kernel compares 32 bits: the state, and the last bits of the sequence.
long futex(const Word& word, int operation, uint32_t value, const timespec* until) {
    static_assert(std::endian::native == std::endian::little);
    return syscall(SYS_futex, &word, operation, value, until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

bool under_way(State state) { return state == State::kPending || state == State::kRunning; }

}  // namespace

bool move_word(Word& word, uint64_t sequence, State from, State to) {
    uint64_t expected = make_word(sequence, from);
    if (!word.compare_exchange_strong(expected, make_word(sequence, to), std::memory_order_acq_rel))
        return false;
    if (!under_way(to)) futex(word, FUTEX_WAKE, INT_MAX, nullptr);
    return true;
}

bool wait_word(const Word& word, uint64_t nanos) {
    const uint64_t end = monotonic_nanos() + nanos;
    const timespec until{static_cast<time_t>(end / 1'000'000'000),
                         static_cast<long>(end % 1'000'000'000)};
    for (;;) {
        const uint64_t now = word.load(std::memory_order_acquire);
        if (!under_way(static_cast<State>(now & 0xff))) return true;
        if (futex(word, FUTEX_WAIT_BITSET, static_cast<uint32_t>(now), &until) != 0 &&
            errno != EAGAIN && errno != EINTR)
            return false;
    }
}

void WordMapping::map() {
    const int seals = fcntl(fd_, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        throw std::runtime_error("the state word page must be a memfd sealed with F_SEAL_SHRINK");
    FileMapping::map();
}

Word* WordMapping::word(uint64_t index) const {
    if (!mapped() || index >= size_ / sizeof(Word)) return nullptr;
    return reinterpret_cast<Word*>(data_) + index;
}

WordPage::WordPage(uint64_t words) : count_(words) {
    if (words > SIZE_MAX / sizeof(Word))
        throw std::system_error(EINVAL, std::generic_category(), "state word page");
    fd_ = memfd_create("kvserver-words", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
    const uint64_t size = words * sizeof(Word);
    void* address = MAP_FAILED;
    if (ftruncate(fd_, static_cast<off_t>(size)) == 0 &&
        fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (address == MAP_FAILED) {
        const int error = errno;
        close(fd_);
        throw std::system_error(error, std::generic_category(), "state word page");
    }
    words_ = static_cast<Word*>(address);
}

WordPage::~WordPage() {
    munmap(words_, count_ * sizeof(Word));
    close(fd_);
}

Word& WordPage::at(uint64_t index) const {
    if (index >= count_) throw std::out_of_range("state word index");
    return words_[index];
}

}  // namespace kvserver
