// fake_gpu.cpp: see fake_gpu.h.
#include "testing/fake_gpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "copy/threads.h"
#include "testing/copy_blocks_host.h"

namespace kvserver {

namespace {

constexpr std::byte kPoison{0xdb};

int descriptor_of(const GpuHandle& handle) {
    if (handle.kind == GpuHandle::Kind::kFd) return dup(handle.fd);
    if (handle.bytes.back() != std::byte{0}) return -1;
    return ::open(reinterpret_cast<const char*>(handle.bytes.data()), O_RDWR | O_CLOEXEC);
}

std::string path_of(const GpuHandle& handle) {
    if (handle.kind == GpuHandle::Kind::kFd) return "";
    return reinterpret_cast<const char*>(handle.bytes.data());
}

}  // namespace

std::mutex FakeGpu::all_pinned_mutex_;
FakeGpu::Ranges FakeGpu::all_pinned_;

FakeGpu::FakeGpu(std::string uuid, Options options)
    : uuid_(std::move(uuid)), options_(std::move(options)) {}

FakeGpu::~FakeGpu() {
    {
        std::lock_guard lock(mutex_);
        for (Queue& queue : queues_) queue.over = true;
        paused_ = false;
    }
    wake_.notify_all();
    for (Queue& queue : queues_)
        if (queue.thread.joinable()) queue.thread.join();
    {
        std::lock_guard lock(all_pinned_mutex_);
        for (auto& [data, bytes] : pinned_) all_pinned_.erase(data);
    }
    for (auto& [data, opened] : opened_) munmap(data, opened.size);
    for (auto& [data, bytes] : allocated_) ::operator delete(const_cast<std::byte*>(data));
    for (auto& [data, bytes] : rings_) ::operator delete(const_cast<std::byte*>(data));
}

// ---- for the test ---------------------------------------------------------------------------

void FakeGpu::pause() {
    std::lock_guard lock(mutex_);
    paused_ = true;
}

void FakeGpu::resume() {
    {
        std::lock_guard lock(mutex_);
        paused_ = false;
    }
    wake_.notify_all();
}

void FakeGpu::fail_next(const std::string& call, const std::string& what, bool lost, bool alive,
                        unsigned after) {
    std::lock_guard lock(mutex_);
    failures_[call] = {what, lost, alive, after};
}

void FakeGpu::delay_next(const std::string& call, unsigned micros, unsigned after) {
    std::lock_guard lock(mutex_);
    delays_[call] = {micros, after};
}

void FakeGpu::die(const std::string& what) {
    std::unique_lock lock(mutex_);
    kill(lock);
    lose(what);
}

// What is dead moves nothing any more, so memory may go: what moves ends first.
void FakeGpu::kill(std::unique_lock<std::mutex>& lock) {
    dying_ = true;
    wake_.wait(lock, [&] {
        return std::none_of(queues_.begin(), queues_.end(), [](const Queue& q) { return q.busy; });
    });
    dead_ = true;
}

std::vector<std::string> FakeGpu::faults() const {
    std::lock_guard lock(mutex_);
    return faults_;
}

std::map<std::string, uint64_t> FakeGpu::calls() const {
    std::lock_guard lock(mutex_);
    return calls_;
}

uint64_t FakeGpu::open_memories() const {
    std::lock_guard lock(mutex_);
    return opened_.size();
}

uint64_t FakeGpu::allocated_bytes() const {
    std::lock_guard lock(mutex_);
    uint64_t sum = 0;
    for (const auto& [data, bytes] : allocated_) sum += bytes;
    return sum;
}

uint64_t FakeGpu::pinned_bytes() const {
    std::lock_guard lock(mutex_);
    uint64_t sum = 0;
    for (const auto& [data, bytes] : pinned_) sum += bytes;
    return sum;
}

// ---- rules ----------------------------------------------------------------------------------

// What every call begins with.
void FakeGpu::call(const std::string& name, std::unique_lock<std::mutex>& lock) {
    ++calls_[name];
    if (const auto delay = delays_.find(name);
        delay != delays_.end() && delay->second.after-- == 0) {
        const std::chrono::microseconds pause(delay->second.micros);
        delays_.erase(delay);
        lock.unlock();
        std::this_thread::sleep_for(pause);
        lock.lock();
    }
    if (dead_) fail(name + ": the GPU is dead: " + lost());
    require(name == "enter" || name == "finish" || entered_.contains(std::this_thread::get_id()),
            name + " by a thread that did not enter");
    const auto failure = failures_.find(name);
    if (failure == failures_.end() || failure->second.after-- > 0) return;
    const Failure planned = failure->second;
    failures_.erase(failure);
    if (planned.alive) lose(planned.what);
    if (planned.lost && !planned.alive) kill(lock);
    fail(planned.what, planned.what == "out of memory");
}

// Until then, or until the GPU is dead, which wakes no waiter.
void FakeGpu::wait_for(const std::function<bool()>& happened, std::unique_lock<std::mutex>& lock) {
    while (!happened() && !dead_) wake_.wait_for(lock, std::chrono::milliseconds(10));
}

// REQUIRES: mutex_ held.
bool FakeGpu::require(bool kept, const std::string& rule) {
    if (kept) return true;
    faults_.push_back(rule);
    std::fprintf(stderr, "a simulated GPU was misused: %s\n", rule.c_str());
    return false;
}

bool FakeGpu::within(const Ranges& ranges, const std::byte* memory, uint64_t bytes) {
    const auto next = ranges.upper_bound(memory);
    if (next == ranges.begin()) return false;
    const auto& [start, size] = *std::prev(next);
    return memory + bytes <= start + size;
}

bool FakeGpu::touches(const Ranges& ranges, const std::byte* memory, uint64_t bytes) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const auto& range) {
        return memory < range.first + range.second && range.first < memory + bytes;
    });
}

bool FakeGpu::on_gpu(const std::byte* memory, uint64_t bytes) const {
    return within(allocated_, memory, bytes) ||
           std::any_of(opened_.begin(), opened_.end(), [&](const auto& opened) {
               return memory >= opened.first && memory + bytes <= opened.first + opened.second.size;
           });
}

// Between the host and this GPU. REQUIRES: mutex_ held.
bool FakeGpu::check(const Piece& piece, bool pinned) {
    if (!require(piece.bytes > 0 && piece.rows > 0, "a piece of no bytes")) return false;
    const auto pitched = [&](uint64_t pitch) {
        return piece.rows == 1 || (pitch >= piece.bytes && pitch <= kMaxPitch);
    };
    if (!require(pitched(piece.to_pitch) && pitched(piece.from_pitch), "a pitch out of range"))
        return false;
    const uint64_t to_bytes = (piece.rows - 1) * piece.to_pitch + piece.bytes;
    const uint64_t from_bytes = (piece.rows - 1) * piece.from_pitch + piece.bytes;
    const bool to_gpu = on_gpu(piece.to, to_bytes);
    const std::byte* host = to_gpu ? piece.from : piece.to;
    const uint64_t bytes = to_gpu ? from_bytes : to_bytes;
    std::lock_guard lock(all_pinned_mutex_);
    const bool whole = within(all_pinned_, host, bytes) || within(rings_, host, bytes);
    return require(to_gpu != on_gpu(piece.from, from_bytes),
                   "a piece that is not between the host and memory of this GPU") &&
           require(whole || !touches(all_pinned_, host, bytes),
                   "a piece that spans two registrations") &&
           require(whole || !pinned, "a piece passed as pinned");
}

// ---- memory ---------------------------------------------------------------------------------

void FakeGpu::enter() {
    std::unique_lock lock(mutex_);
    call("enter", lock);
    entered_.insert(std::this_thread::get_id());
}

uint64_t FakeGpu::free_bytes() {
    std::unique_lock lock(mutex_);
    call("free_bytes", lock);
    return free_now();
}

// REQUIRES: mutex_ held.
uint64_t FakeGpu::free_now() const {
    uint64_t left = options_.memory_bytes;
    for (const auto& [data, size] : allocated_) left -= size;
    return left;
}

std::byte* FakeGpu::allocate(uint64_t bytes) {
    std::unique_lock lock(mutex_);
    call("allocate", lock);
    if (bytes > free_now()) fail("out of memory", true);
    auto* memory = static_cast<std::byte*>(::operator new(bytes));
    std::fill_n(memory, bytes, kPoison);
    allocated_[memory] = bytes;
    return memory;
}

void FakeGpu::free(std::byte* memory) {
    std::unique_lock lock(mutex_);
    call("free", lock);
    if (require(allocated_.erase(memory) == 1, "what was freed was not allocated"))
        ::operator delete(memory);
}

std::byte* FakeGpu::allocate_pinned(uint64_t bytes) {
    std::unique_lock lock(mutex_);
    call("allocate_pinned", lock);
    auto* memory = static_cast<std::byte*>(::operator new(bytes));
    rings_[memory] = bytes;
    return memory;
}

void FakeGpu::free_pinned(std::byte* memory) {
    std::unique_lock lock(mutex_);
    call("free_pinned", lock);
    if (require(rings_.erase(memory) == 1, "pinned memory that was freed was not allocated"))
        ::operator delete(memory);
}

void FakeGpu::pin(std::byte* memory, uint64_t bytes) {
    std::unique_lock lock(mutex_);
    call("pin", lock);
    require(bytes <= 1ull << 30, "more than 1 GiB was pinned at once");
    std::lock_guard all_lock(all_pinned_mutex_);
    if (require(!touches(all_pinned_, memory, bytes), "memory was pinned twice"))
        pinned_[memory] = all_pinned_[memory] = bytes;
}

void FakeGpu::unpin(std::byte* memory) {
    std::unique_lock lock(mutex_);
    call("unpin", lock);
    std::lock_guard all_lock(all_pinned_mutex_);
    if (require(pinned_.erase(memory) == 1, "what was unpinned was not pinned"))
        all_pinned_.erase(memory);
}

GpuMemory FakeGpu::open(const GpuHandle& handle, uint64_t) {
    std::unique_lock lock(mutex_);
    call("open", lock);
    const std::string path = path_of(handle);
    for (auto& [data, opened] : opened_)
        if (!path.empty() && opened.path == path) {
            ++opened.count;
            return {data, opened.size};
        }
    const int fd = descriptor_of(handle);
    struct stat info{};
    void* address = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &info) == 0 && info.st_size > 0)
        address = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ | PROT_WRITE,
                       MAP_SHARED, fd, 0);
    if (fd >= 0) ::close(fd);
    if (address == MAP_FAILED) fail("cannot open this handle");
    const auto size = static_cast<uint64_t>(info.st_size);
    opened_[static_cast<std::byte*>(address)] = {path, size, 1};
    try {
        call("address_range", lock);
    } catch (const GpuError&) {
        if (dead_) throw;
        return {static_cast<std::byte*>(address), std::nullopt};
    }
    return {static_cast<std::byte*>(address), size};
}

void FakeGpu::close(std::byte* data) {
    std::unique_lock lock(mutex_);
    call("close", lock);
    const auto found = opened_.find(data);
    if (!require(found != opened_.end(), "what was closed was not open")) return;
    if (--found->second.count > 0) return;
    munmap(data, found->second.size);
    opened_.erase(found);
}

// ---- streams --------------------------------------------------------------------------------

Gpu::Stream FakeGpu::make_stream() {
    std::unique_lock lock(mutex_);
    call("make_stream", lock);
    Queue& queue = queues_.emplace_back();
    queue.random.seed(options_.seed + queues_.size());
    queue.thread = std::thread([this, &queue] { run(queue); });
    return &queue;
}

void FakeGpu::free_stream(Stream stream) {
    auto& queue = *static_cast<Queue*>(stream);
    {
        std::unique_lock lock(mutex_);
        call("free_stream", lock);
        require(queue.work.empty() && !queue.busy, "a stream was freed with work in it");
        queue.over = true;
    }
    wake_.notify_all();
    queue.thread.join();
    std::lock_guard lock(mutex_);
    queues_.remove_if([&](const Queue& other) { return &other == &queue; });
}

void FakeGpu::run(Queue& queue) {
    block_signals();
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock,
                   [&] { return queue.over || (!queue.work.empty() && !paused_ && !dying_); });
        if (queue.over) return;
        const Work work = std::move(queue.work.front());
        queue.work.pop_front();
        queue.busy = true;
        const uint64_t micros = options_.seed != 0 ? queue.random() % 200 : 0;
        lock.unlock();
        options_.slow(1);
        if (micros != 0) std::this_thread::sleep_for(std::chrono::microseconds(micros));
        if (work.move) work.move();
        lock.lock();
        queue.busy = false;
        if (work.mark != nullptr) {
            work.mark->happened = true;
            work.mark->nanos = monotonic_nanos();
        }
        wake_.notify_all();
    }
}

// REQUIRES: mutex_ held.
void FakeGpu::enqueue(Stream stream, std::function<void()> move, Mark* mark) {
    static_cast<Queue*>(stream)->work.push_back({std::move(move), mark});
    wake_.notify_all();
}

Gpu::Event FakeGpu::make_event() {
    std::unique_lock lock(mutex_);
    call("make_event", lock);
    return &marks_.emplace_back();
}

void FakeGpu::free_event(Event event) {
    std::unique_lock lock(mutex_);
    call("free_event", lock);
    marks_.remove_if([&](const Mark& mark) { return &mark == event; });
}

void FakeGpu::record(Event event, Stream stream) {
    std::unique_lock lock(mutex_);
    call("record", lock);
    auto* mark = static_cast<Mark*>(event);
    mark->recorded = true;
    mark->happened = false;
    enqueue(stream, nullptr, mark);
}

void FakeGpu::wait(Event event) {
    std::unique_lock lock(mutex_);
    call("wait", lock);
    auto* mark = static_cast<Mark*>(event);
    require(mark->recorded, "a wait for an event that was not recorded");
    wait_for([&] { return mark->happened; }, lock);
    if (dead_) fail("wait: the GPU is dead: " + lost());
}

void FakeGpu::finish(Stream stream) {
    std::unique_lock lock(mutex_);
    if (dead_) return;
    call("finish", lock);
    const auto& queue = *static_cast<Queue*>(stream);
    wait_for([&] { return queue.work.empty() && !queue.busy; }, lock);
}

uint64_t FakeGpu::nanos_between(Event first, Event last) {
    std::unique_lock lock(mutex_);
    call("nanos_between", lock);
    const auto *begin = static_cast<Mark*>(first), *end = static_cast<Mark*>(last);
    require(begin->happened && end->happened, "the time to an event that has not happened");
    return end->nanos > begin->nanos ? end->nanos - begin->nanos : 0;
}

void FakeGpu::copy(Stream stream, const std::vector<Piece>& pieces, bool pinned) {
    std::unique_lock lock(mutex_);
    call("copy", lock);
    for (const Piece& piece : pieces)
        if (!check(piece, pinned)) return;
    enqueue(stream, [this, pieces, pinned] {
        for (const Piece& piece : pieces) {
            {
                std::lock_guard inner(mutex_);
                if (!check(piece, pinned)) return;
            }
            for (uint64_t row = 0; row < piece.rows; ++row)
                std::memcpy(piece.to + row * piece.to_pitch, piece.from + row * piece.from_pitch,
                            piece.bytes);
        }
    });
    // As the driver does it: such a copy has left, or reached, host memory when the call returns.
    auto& queue = *static_cast<Queue*>(stream);
    if (!pinned) wait_for([&] { return queue.work.empty() && !queue.busy; }, lock);
}

void FakeGpu::copy_blocks(Stream stream, Direction direction, const PackedBlocks& blocks) {
    std::unique_lock lock(mutex_);
    call("copy_blocks", lock);
    require(on_gpu(reinterpret_cast<const std::byte*>(blocks.planes),
                   blocks.num_planes * sizeof(Plane)) &&
                on_gpu(reinterpret_cast<const std::byte*>(blocks.blocks),
                       uint64_t{blocks.positions} * blocks.groups * sizeof(uint32_t)) &&
                on_gpu(blocks.packed, blocks.positions * blocks.position_bytes),
            "a kernel was given memory that is not this GPU's");
    enqueue(stream, [direction, blocks] { host_copy_blocks(direction, blocks); });
}

}  // namespace kvserver
