// file_device.cpp: threads, and the queues of their records.
#include "l2/file_device.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "copy/threads.h"
#include "l2/extents.h"
#include "l2/file_io.h"

namespace kvserver {

ssize_t FileCalls::read(int fd, const iovec* to, int count, off_t offset) {
    return preadv(fd, to, count, offset);
}

ssize_t FileCalls::write(int fd, const iovec* from, int count, off_t offset) {
    return pwritev(fd, from, count, offset);
}

// A request waits for a get: 64 MiB of them beside twice as many busy processes as processors took
// 500 ms at nice 19, 58 at 5, 40 at 0, where L1's copies waited for them. bench/results/answered.md
constexpr int kGetNice = 5, kPutNice = 19;

enum class JobState : uint8_t { kWaits, kRuns, kEnded };  // kEnded: before it ran

struct FileDevice::Job {
    uint64_t ticket;
    bool put;
    std::vector<std::shared_ptr<const Record>> records;  // of a get one
    std::vector<Extent> extents;
    uint64_t deadline_nanos;
    std::atomic<JobState> state{JobState::kWaits};
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> started_nanos{0};
    FileEnd end{};          // the thread's until it pushes the job to `ended`
    bool reported = false;  // the callers': the end was drained, or will not be
    Job* next = nullptr;    // on the stack where it is

    bool late() const { return deadline_nanos != 0 && monotonic_nanos() > deadline_nanos; }
    bool leave(JobState from, JobState to) { return state.compare_exchange_strong(from, to); }
    IoResult move(const DataFile& file, FileCalls& calls) {
        if (put) return write_records(records, file, extents, calls, stop, end.bytes);
        return read_record(*records.front(), file, extents, calls, stop, end.bytes);
    }
};

// Jobs that callers and threads hand to each other. Neither ever waits here.
class FileDevice::JobStack {
  public:
    void push(Job* job) {
        job->next = top_.load(std::memory_order_relaxed);
        while (!top_.compare_exchange_weak(job->next, job, std::memory_order_release,
                                           std::memory_order_relaxed)) {
        }
    }
    // All of them: the first that was pushed, and its `next` the one after it.
    Job* drain() {
        Job* first = nullptr;
        for (Job* job = top_.exchange(nullptr, std::memory_order_acquire); job != nullptr;) {
            Job* const before = job->next;
            job->next = std::exchange(first, job);
            job = before;
        }
        return first;
    }

  private:
    std::atomic<Job*> top_{nullptr};
};

// The threads of one kind of job, and its queue.
struct FileDevice::Lane {
    explicit Lane(int its_nice) : nice(its_nice) {}

    void submit(Job* job) {
        submitted.push(job);
        ++signal;
        signal.notify_one();
    }
    void wake_all() {
        ++signal;
        signal.notify_all();
    }

    const int nice;  // of its threads
    JobStack submitted;
    std::atomic<uint32_t> signal{0};  // a thread that finds no job waits until this changes

    std::mutex threads;  // guards:
    std::deque<Job*> queue;
};

// Callers and threads have no mutex in common, nor have gets and puts, and no thread frees a job: a
// thread of the lowest priority that a busy machine suspends while it has a lock holds up who
// wants it for a second.
struct FileDevice::Shared {
    Shared(const DataFile& data_file, std::shared_ptr<FileCalls> file_calls)
        : file(data_file), calls(std::move(file_calls)) {
        file.fd = fcntl(data_file.fd, F_DUPFD_CLOEXEC, 0);
        if (file.fd < 0) throw std::system_error(errno, std::generic_category(), "data file");
    }
    ~Shared() { ::close(file.fd); }

    // Of a thread: its next job, which runs from now on; null when it should end.
    Job* wait_for_job(Lane& lane);
    // Of callers, with their mutex: the end of a job that has not begun, and those of others.
    bool end_early(Job& job, FileOutcome outcome, const char* what);
    void collect_ends();

    DataFile file;
    const std::shared_ptr<FileCalls> calls;
    Lane gets{kGetNice}, puts{kPutNice};
    JobStack ended;
    EventFd completion;
    std::atomic<bool> stopping{false};

    std::mutex callers;  // guards:
    std::unordered_map<const Job*, std::unique_ptr<Job>> open;
    std::vector<FileEnd> ends;

    std::mutex counting;  // guards:
    unsigned alive = 0;
    std::condition_variable left;  // a thread has ended
};

FileDevice::Job* FileDevice::Shared::wait_for_job(Lane& lane) {
    std::unique_lock lock(lane.threads);
    for (;;) {
        const uint32_t seen = lane.signal;
        if (stopping) return nullptr;
        for (Job* job = lane.submitted.drain(); job != nullptr; job = job->next)
            lane.queue.push_back(job);
        while (!lane.queue.empty()) {
            Job* const job = lane.queue.front();
            lane.queue.pop_front();
            job->started_nanos = monotonic_nanos();
            if (job->leave(JobState::kWaits, JobState::kRuns)) return job;
            ended.push(job);
        }
        lock.unlock();
        lane.signal.wait(seen);
        lock.lock();
    }
}

bool FileDevice::Shared::end_early(Job& job, FileOutcome outcome, const char* what) {
    if (!job.leave(JobState::kWaits, JobState::kEnded)) return false;
    job.reported = true;  // freed when a thread has seen that it need not run
    ends.push_back({job.ticket, outcome, 0, 0, what});
    completion.notify();
    return true;
}

void FileDevice::Shared::collect_ends() {
    for (Job* job = ended.drain(); job != nullptr;) {
        if (!job->reported) ends.push_back(std::move(job->end));
        open.erase(std::exchange(job, job->next));
    }
}

FileDevice::FileDevice(const DataFile& file, unsigned threads, std::shared_ptr<FileCalls> calls)
    : shared_(std::make_shared<Shared>(file,
                                       calls ? std::move(calls) : std::make_shared<FileCalls>())) {
    if (threads == 0) throw std::invalid_argument("a file device needs at least one thread");
    if (file.page_bytes == 0 || file.page_bytes % kHeaderBytes != 0 || file.pages == 0)
        throw std::invalid_argument("a data file has pages of whole 4 KiB, and at least one");
    try {
        for (unsigned i = 0; i < 2 * threads; ++i) {
            Lane& lane = i % 2 != 0 ? shared_->puts : shared_->gets;
            std::lock_guard lock(shared_->counting);
            std::thread([shared = shared_, &lane] { run(shared, lane); }).detach();
            ++shared_->alive;
        }
    } catch (...) {
        close(0);
        throw;
    }
}

FileDevice::~FileDevice() { close(0); }

int FileDevice::completion_fd() const { return shared_->completion.fd(); }
void FileDevice::notify() { shared_->completion.notify(); }

std::vector<FileEnd> FileDevice::drain() {
    shared_->completion.reset();
    std::lock_guard lock(shared_->callers);
    shared_->collect_ends();
    return std::exchange(shared_->ends, {});
}

void FileDevice::submit(uint64_t ticket, bool put,
                        std::vector<std::shared_ptr<const Record>> records,
                        std::vector<Extent> extents, uint64_t deadline_nanos) {
    if (records.empty() || (!put && records.size() > 1))
        throw std::invalid_argument("a ticket has one record, that of a put at least one");
    for (const Extent& extent : extents)
        if (extent.count == 0 || uint64_t{extent.first} + extent.count > shared_->file.pages)
            throw std::invalid_argument(std::to_string(extent.count) + " pages from page " +
                                        std::to_string(extent.first) +
                                        " on do not lie in the data file");
    const uint64_t share = page_count(extents) / records.size();
    for (const auto& record : records) {
        if (share * shared_->file.page_bytes < record->file_bytes())
            throw std::invalid_argument("the extents have too few pages for the record");
        for (const auto& slot : record->slots())
            for (const MemoryPiece& piece : slot)
                if (reinterpret_cast<uintptr_t>(piece.data) % kHeaderBytes != 0)
                    throw std::invalid_argument("pages of L1 are not whole 4 KiB");
    }
    auto job =
        std::make_unique<Job>(ticket, put, std::move(records), std::move(extents), deadline_nanos);
    {
        std::lock_guard lock(shared_->callers);
        if (shared_->stopping) throw std::invalid_argument("the file device was closed");
        Job* const submitted = job.get();
        shared_->open.emplace(submitted, std::move(job));
        (put ? shared_->puts : shared_->gets).submit(submitted);
    }
}

void FileDevice::cancel(uint64_t ticket) {
    std::lock_guard lock(shared_->callers);
    for (const auto& [_, job] : shared_->open)
        if (job->ticket == ticket && !shared_->end_early(*job, FileOutcome::kCancelled, ""))
            job->stop = true;
}

void FileDevice::expire() {
    std::lock_guard lock(shared_->callers);
    for (const auto& [_, job] : shared_->open)
        if (job->late())
            shared_->end_early(*job, FileOutcome::kLate, "its deadline passed before it began");
}

uint64_t FileDevice::stalled_nanos() const {
    std::lock_guard lock(shared_->callers);
    uint64_t oldest = UINT64_MAX;
    for (const auto& [_, job] : shared_->open)
        if (job->state == JobState::kRuns) oldest = std::min<uint64_t>(oldest, job->started_nanos);
    const uint64_t now = monotonic_nanos();
    return oldest < now ? now - oldest : 0;
}

bool FileDevice::close(uint64_t wait_nanos) {
    {
        std::lock_guard lock(shared_->callers);
        shared_->stopping = true;
        for (const auto& [_, job] : shared_->open) {
            if (job->leave(JobState::kWaits, JobState::kEnded)) job->reported = true;
            job->stop = true;
        }
    }
    shared_->gets.wake_all();
    shared_->puts.wake_all();
    {
        std::unique_lock lock(shared_->counting);
        if (!shared_->left.wait_for(lock, std::chrono::nanoseconds(wait_nanos),
                                    [this] { return shared_->alive == 0; }))
            return false;
    }
    std::lock_guard lock(shared_->callers);
    shared_->collect_ends();
    shared_->open.clear();
    return true;
}

void FileDevice::run(const std::shared_ptr<Shared>& shared, Lane& lane) {
    block_signals();
    give_way(lane.nice);
    while (Job* const job = shared->wait_for_job(lane)) {
        const bool put = job->put;
        FileEnd& end = job->end;
        end = {job->ticket, FileOutcome::kDone, 0, 0, ""};
        if (job->late()) {
            end.outcome = FileOutcome::kLate;
            end.what = "its deadline passed before it began";
        } else {
            try {
                const IoResult result = job->move(shared->file, *shared->calls);
                end.outcome = result.outcome;
                end.what = result.what;
            } catch (const std::exception& error) {
                end.outcome = FileOutcome::kFailed;
                end.what = error.what();
            }
            if (!put && end.outcome == FileOutcome::kDone && job->late()) {
                end.outcome = FileOutcome::kLate;
                end.what = "the read ended after its deadline";
            }
            end.nanos = monotonic_nanos() - job->started_nanos;
        }
        shared->ended.push(job);  // from now on it is the callers'
        shared->completion.notify();
    }
    std::lock_guard lock(shared->counting);
    --shared->alive;
    shared->left.notify_all();
}

}  // namespace kvserver
