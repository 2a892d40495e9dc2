// state_word.h: one word per copy, shared by the worker and the server, and the pages of such
// words.
#pragma once

#include <atomic>
#include <cstdint>

#include "copy/mapping.h"

namespace kvserver {

// One 64-bit word per operation in a page that worker and server share: sequence << 8 | state.
// It is moved only by compare-and-swap, so exactly one side decides each step:
//   worker  PENDING -> CANCELLED                      the server will not touch a byte
//   worker  RUNNING -> CANCELLED   (store)            what the server copies now is not published
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

// A move to another state than kPending and kRunning wakes the threads in wait_word(), of any
// process.
bool move_word(Word& word, uint64_t sequence, State from, State to);

// Waits until the word is neither pending nor running, `nanos` at most; true if it is neither. The
// server may still write after a wait in vain, and while a load is kCancelling: a wait ends
// nothing.
bool wait_word(const Word& word, uint64_t nanos);

// A page of state words. They are read without a guard, so it must be sealed against shrinking.
class WordMapping final : public FileMapping {
  public:
    using FileMapping::FileMapping;
    void map() override;
    Word* word(uint64_t index) const;  // null unless it is mapped and has that word
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

}  // namespace kvserver
