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
#include <utility>

#include "copy/threads.h"
#include "l2/file_io.h"

namespace kvserver {

ssize_t FileCalls::read(int fd, const iovec* to, int count, off_t offset) {
    return preadv(fd, to, count, offset);
}

ssize_t FileCalls::write(int fd, const iovec* from, int count, off_t offset) {
    return pwritev(fd, from, count, offset);
}

struct FileDevice::Job {
    uint64_t ticket;
    bool put;
    std::shared_ptr<const Record> record;
    std::vector<Extent> extents;
    uint64_t deadline_nanos;
    std::atomic<bool> stop{false};
    uint64_t started_nanos = 0;
};

struct FileDevice::Shared {
    Shared(const DataFile& data_file, unsigned count, std::shared_ptr<FileCalls> file_calls)
        : file(data_file), most_puts(count > 1 ? count - 1 : 1), calls(std::move(file_calls)) {
        file.fd = fcntl(data_file.fd, F_DUPFD_CLOEXEC, 0);
        if (file.fd < 0) throw std::system_error(errno, std::generic_category(), "data file");
    }
    ~Shared() { ::close(file.fd); }

    bool late(const Job& job) const {
        return job.deadline_nanos != 0 && monotonic_nanos() > job.deadline_nanos;
    }
    // REQUIRES: mutex held.
    bool has_work() const { return !gets.empty() || (!puts.empty() && running_puts < most_puts); }

    DataFile file;
    const unsigned most_puts;
    const std::shared_ptr<FileCalls> calls;
    EndQueue<FileEnd> ends;

    std::mutex mutex;  // guards what follows
    std::condition_variable wake;
    std::condition_variable left;  // a thread has ended
    std::deque<std::shared_ptr<Job>> gets, puts;
    std::vector<std::shared_ptr<Job>> running;
    unsigned running_puts = 0;
    unsigned threads = 0;
    bool stopping = false;
};

FileDevice::FileDevice(const DataFile& file, unsigned threads, std::shared_ptr<FileCalls> calls)
    : shared_(std::make_shared<Shared>(file, threads,
                                       calls ? std::move(calls) : std::make_shared<FileCalls>())) {
    if (threads == 0) throw std::invalid_argument("a file device needs at least one thread");
    if (file.page_bytes == 0 || file.page_bytes % kHeaderBytes != 0 || file.pages == 0)
        throw std::invalid_argument("a data file has pages of whole 4 KiB, and at least one");
    try {
        for (unsigned i = 0; i < threads; ++i) {
            std::lock_guard lock(shared_->mutex);
            std::thread([shared = shared_] { run(shared); }).detach();
            ++shared_->threads;
        }
    } catch (...) {
        close(0);
        throw;
    }
}

FileDevice::~FileDevice() { close(0); }

int FileDevice::completion_fd() const { return shared_->ends.fd(); }
std::vector<FileEnd> FileDevice::drain() { return shared_->ends.drain(); }
void FileDevice::notify() { shared_->ends.notify(); }

void FileDevice::submit(uint64_t ticket, bool put, std::shared_ptr<const Record> record,
                        std::vector<Extent> extents, uint64_t deadline_nanos) {
    uint64_t pages = 0;
    for (const Extent& extent : extents) {
        if (extent.count == 0 || uint64_t{extent.first} + extent.count > shared_->file.pages)
            throw std::invalid_argument(std::to_string(extent.count) + " pages from page " +
                                        std::to_string(extent.first) +
                                        " on do not lie in the data file");
        pages += extent.count;
    }
    if (pages * shared_->file.page_bytes < record->file_bytes())
        throw std::invalid_argument("the extents have too few pages for the record");
    for (const auto& slot : record->slots())
        for (const MemoryPiece& piece : slot)
            if (reinterpret_cast<uintptr_t>(piece.data) % kHeaderBytes != 0)
                throw std::invalid_argument("pages of L1 are not whole 4 KiB");
    auto job =
        std::make_shared<Job>(ticket, put, std::move(record), std::move(extents), deadline_nanos);
    {
        std::lock_guard lock(shared_->mutex);
        if (shared_->stopping) throw std::invalid_argument("the file device was closed");
        (put ? shared_->puts : shared_->gets).push_back(std::move(job));
    }
    shared_->wake.notify_one();
}

void FileDevice::cancel(uint64_t ticket) {
    std::lock_guard lock(shared_->mutex);
    for (auto* queue : {&shared_->gets, &shared_->puts}) {
        const auto found = std::ranges::find_if(
            *queue, [ticket](const auto& job) { return job->ticket == ticket; });
        if (found == queue->end()) continue;
        shared_->ends.push({ticket, FileOutcome::kCancelled, 0, 0, ""});
        queue->erase(found);
        return;
    }
    for (const auto& job : shared_->running)
        if (job->ticket == ticket) job->stop = true;
}

void FileDevice::expire() {
    std::lock_guard lock(shared_->mutex);
    for (auto* queue : {&shared_->gets, &shared_->puts})
        std::erase_if(*queue, [this](const auto& job) {
            if (!shared_->late(*job)) return false;
            shared_->ends.push(
                {job->ticket, FileOutcome::kLate, 0, 0, "its deadline passed before it began"});
            return true;
        });
}

uint64_t FileDevice::stalled_nanos() const {
    std::lock_guard lock(shared_->mutex);
    uint64_t oldest = UINT64_MAX;
    for (const auto& job : shared_->running) oldest = std::min(oldest, job->started_nanos);
    const uint64_t now = monotonic_nanos();
    return oldest < now ? now - oldest : 0;
}

bool FileDevice::close(uint64_t wait_nanos) {
    std::unique_lock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->gets.clear();
    shared_->puts.clear();
    for (const auto& job : shared_->running) job->stop = true;
    shared_->wake.notify_all();
    return shared_->left.wait_for(lock, std::chrono::nanoseconds(wait_nanos),
                                  [this] { return shared_->threads == 0; });
}

void FileDevice::run(const std::shared_ptr<Shared>& shared) {
    block_signals();
    give_way();
    std::unique_lock lock(shared->mutex);
    for (;;) {
        shared->wake.wait(lock, [&] { return shared->stopping || shared->has_work(); });
        if (shared->stopping) break;
        auto& queue = shared->gets.empty() ? shared->puts : shared->gets;
        const std::shared_ptr<Job> job = queue.front();
        queue.pop_front();
        if (shared->late(*job)) {
            shared->ends.push(
                {job->ticket, FileOutcome::kLate, 0, 0, "its deadline passed before it began"});
            continue;
        }
        job->started_nanos = monotonic_nanos();
        shared->running.push_back(job);
        shared->running_puts += job->put;
        lock.unlock();
        FileEnd end{job->ticket, FileOutcome::kDone, 0, 0, ""};
        try {
            const auto move = job->put ? write_record : read_record;
            const IoResult result = move(*job->record, shared->file, job->extents, *shared->calls,
                                         job->stop, end.bytes);
            end.outcome = result.outcome;
            end.what = result.what;
        } catch (const std::exception& error) {
            end.outcome = FileOutcome::kFailed;
            end.what = error.what();
        }
        if (!job->put && end.outcome == FileOutcome::kDone && shared->late(*job)) {
            end.outcome = FileOutcome::kLate;
            end.what = "the read ended after its deadline";
        }
        end.nanos = monotonic_nanos() - job->started_nanos;
        lock.lock();
        std::erase(shared->running, job);
        shared->running_puts -= job->put;
        if (job->put && !shared->puts.empty()) shared->wake.notify_one();
        shared->ends.push(std::move(end));
    }
    --shared->threads;
    shared->left.notify_all();
}

}  // namespace kvserver
