// file_device.h: the device that moves records between L1 and one data file.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy/completion.h"
#include "copy/job.h"
#include "l2/file_calls.h"
#include "l2/record.h"

namespace kvserver {

enum class FileOutcome : uint8_t {
    kDone,
    kOther,    // of a get: the record there has another coverage, generation or lengths
    kCorrupt,  // of a get: no such record, or its bytes have changed
    kFull,     // of a put: the file system has no space
    kLate,
    kFailed,
    kCancelled,
};

struct FileEnd {
    uint64_t ticket;
    FileOutcome outcome;
    uint64_t bytes;    // of the slots that were moved; all of them if it is done
    uint64_t nanos;    // from the first byte to the end
    std::string what;  // why it failed; empty otherwise
};

// The data file: equal pages. A record lies in extents of them, in their order.
struct DataFile {
    int fd;  // its owner keeps it open until the device was closed; see FileDevice
    uint64_t page_bytes;
    uint64_t pages;
};

// Threads that read and write records, straight between L1 and the file: addresses, lengths and
// offsets are whole kHeaderBytes, as O_DIRECT requires; headers and the ends of slots go by a
// buffer.
//
// Tickets. Every ticket that submit() accepted ends exactly once, by one FileEnd, in any order;
//   submit() accepted none if it throws. Those that are open at close() do not end.
// Memory. Until a ticket ends the device may read (a put) or write (a get) the memory of its
//   record. A get writes it before it is verified: what did not end as kDone is garbage.
// Verification. A get ends as kDone only if each field of the header is the record's and the
//   digest is that of the bytes that are in L1.
// Order. Gets and puts have threads and a queue each. Copies of L1 and lookups come first, then
//   gets, for which a request waits; puts run at the lowest priority. No caller waits for a thread,
//   however long a busy machine suspends it.
// Cancel. cancel() ends a waiting ticket at once, a running one at its next piece. An unknown one
//   has ended.
// Deadline. A ticket whose deadline has passed does not begin: expire() ends those that wait. A get
//   that ends later than its deadline ends as kLate. A call of the file system that hangs keeps
//   its ticket open, and so its memory: stalled_nanos() is how long the longest has been running.
// Time. No function but close() waits for the file system.
class FileDevice {
  public:
    // A copy of file.fd belongs to the device. `threads`: that read, and as many that write.
    // `calls` null: the system's.
    FileDevice(const DataFile& file, unsigned threads, std::shared_ptr<FileCalls> calls = nullptr);
    ~FileDevice();  // close(0)

    int completion_fd() const;  // readable while drain() would return something
    std::vector<FileEnd> drain();
    void notify();  // make completion_fd readable although drain() will return nothing

    // A put may be of several records: each has an equal share of the pages, in their order, and
    // all are written or none counts. Throws std::invalid_argument unless the extents lie in the
    // file and have room for the records, and their memory is aligned.
    void submit(uint64_t ticket, bool put, std::vector<std::shared_ptr<const Record>> records,
                std::vector<Extent> extents, uint64_t deadline_nanos);
    void cancel(uint64_t ticket);
    void expire();
    uint64_t stalled_nanos() const;

    // No ticket begins any more. Waits until no thread uses L1 or the file, at most so long; false
    // if one still does: it ends by itself, and keeps L1 and the file until then.
    bool close(uint64_t wait_nanos);

  private:
    struct Job;
    class JobStack;
    struct Lane;
    struct Shared;  // what a thread that hangs keeps
    static void run(const std::shared_ptr<Shared>& shared, Lane& lane);

    const std::shared_ptr<Shared> shared_;
};

}  // namespace kvserver
