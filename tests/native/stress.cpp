// stress.cpp: the devices under sanitizers, without Python. `make sanitize` builds and runs it.
//
// Threads submit random stores and loads over one worker's memory, workers cancel some by their
// words, the server cancels others, and one worker truncates its memory while it is copied. The
// same over a simulated GPU, by DMA and staged, which is pinned for meanwhile and dies under its
// copies. The fake device is driven by several threads, fails, and is lost while they run its
// tickets. Checked: every ticket completes exactly once, a DONE copy moved every byte, a load
// leaves all other blocks alone.
#include <sys/mman.h>
#include <sys/select.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "copy/cpu_device.h"
#include "copy/host_copy.h"
#include "gpu/gpu_device.h"
#include "gpu/pinner.h"
#include "stress_files.h"
#include "stress_index.h"
#include "stress_lifetimes.h"
#include "stress_what_if.h"
#include "tables/block_runs.h"
#include "testing/fake_device.h"
#include "testing/fake_gpu.h"
#include "testing/slow_copies.h"

using namespace kvserver;

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kBlocks = 64;
constexpr uint32_t kPerSlot = 4;

std::vector<Completion> wait(Device& device, size_t count) {
    std::vector<Completion> found;
    while (found.size() < count) {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(device.completion_fd(), &set);
        timeval limit{20, 0};
        CHECK(select(device.completion_fd() + 1, &set, nullptr, nullptr, &limit) == 1);
        for (auto& completion : device.drain()) found.push_back(std::move(completion));
    }
    CHECK(found.size() == count);
    return found;
}

void release_if_fake(Device& device) {
    if (auto* fake = dynamic_cast<FakeDevice*>(&device)) fake->release_all();
}

// A worker's memory as the server maps it, and as the worker itself sees it.
struct Worker {
    int fd;
    std::byte* own;
    uint64_t size;
    std::shared_ptr<Mapping> memory;
    std::shared_ptr<WordMapping> words;
    std::unique_ptr<WordPage> page;
    std::shared_ptr<PlaneTable> table;

    Worker(Device& device, const std::vector<PlaneTable::Row>& rows, uint64_t bytes) : size(bytes) {
        fd = memfd_create("stress", 0);
        CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0);
        void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(address != MAP_FAILED);
        own = static_cast<std::byte*>(address);
        page = std::make_unique<WordPage>(256);
        if (auto* gpu = dynamic_cast<GpuDevice*>(&device))
            memory = std::make_shared<GpuMapping>(
                gpu->gpu(), GpuHandle{.kind = GpuHandle::Kind::kFd, .fd = dup(fd)}, 0, size);
        else
            memory = std::make_shared<FileMapping>(dup(fd), size);
        words = std::make_shared<WordMapping>(dup(page->fd()), 256 * 8);
        device.submit_map(1, {memory, words});
        release_if_fake(device);
        CHECK(wait(device, 1)[0].outcome == Outcome::kDone);
        table = std::make_shared<PlaneTable>(std::vector<std::shared_ptr<Mapping>>{memory}, rows,
                                             kBlocks);
    }
    void close(Device& device) {
        device.submit_unmap(2, {memory, words});
        release_if_fake(device);
        wait(device, 1);
        munmap(own, size);
        ::close(fd);
    }
};

std::vector<PlaneTable::Row> awkward_planes(uint64_t& size) {
    // Runs of several lengths, odd offsets, one plane with gaps between its blocks.
    std::vector<PlaneTable::Row> rows;
    uint64_t offset = 3;
    for (uint64_t run :
         {uint64_t{1}, uint64_t{64}, uint64_t{4095}, uint64_t{4097}, uint64_t{9000}}) {
        const uint64_t stride = run + (run == 64 ? 32 : 0);
        rows.push_back({0, offset, stride, run});
        offset += stride * kBlocks + 5;
    }
    size = offset;
    return rows;
}

std::shared_ptr<CopyJob> job_of(uint64_t ticket, Direction direction, const Worker& worker,
                                const std::vector<uint32_t>& blocks,
                                const std::vector<uint32_t>& pages, uint32_t word,
                                uint64_t sequence) {
    const BlockIds ids(worker.table, direction, pack_blocks(blocks), 1, blocks.size(), kNoBlock);
    auto job = std::make_shared<CopyJob>(ids, kPerSlot);
    job->ticket = ticket;
    job->pages_per_slot =
        static_cast<uint32_t>((kPerSlot * worker.table->block_bytes() + kPage - 1) / kPage);
    for (uint32_t page : pages) {
        const bool next =
            !job->extents.empty() && job->extents.back().first + job->extents.back().count == page;
        if (next)
            ++job->extents.back().count;
        else
            job->extents.push_back({page, 1});
    }
    job->word_memory = worker.words;
    job->word = worker.words->word(word);
    job->sequence = sequence;
    return job;
}

void random_copies(Device& device, unsigned threads) {
    uint64_t size = 0;
    const auto rows = awkward_planes(size);
    Worker worker(device, rows, size);
    const auto pages_per_slot =
        static_cast<uint32_t>((kPerSlot * worker.table->block_bytes() + kPage - 1) / kPage);
    std::mt19937 random(threads);
    uint64_t sequence = 0;
    for (int round = 0; round < 60; ++round) {
        for (uint64_t i = 0; i < size; ++i) worker.own[i] = static_cast<std::byte>(random());
        std::vector<uint32_t> ids(kBlocks);
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random);
        const std::vector<uint32_t> from(ids.begin(), ids.begin() + 8);
        const std::vector<uint32_t> to(ids.begin() + 8, ids.begin() + 16);
        std::vector<uint32_t> pages(1024);
        std::iota(pages.begin(), pages.end(), 0);
        std::shuffle(pages.begin(), pages.end(), random);
        pages.resize(2 * pages_per_slot);

        const std::vector<std::byte> before(worker.own, worker.own + size);
        worker.page->at(0).store(make_word(++sequence, State::kPending));
        device.submit_copy(job_of(10, Direction::kStore, worker, from, pages, 0, sequence));
        CHECK(wait(device, 1)[0].outcome == Outcome::kDone);
        CHECK(worker.page->at(0) == make_word(sequence, State::kDone));
        worker.page->at(1).store(make_word(++sequence, State::kPending));
        device.submit_copy(job_of(11, Direction::kLoad, worker, to, pages, 1, sequence));
        CHECK(wait(device, 1)[0].outcome == Outcome::kDone);

        // Each target block equals its source; every byte that belongs to no target is as before.
        std::vector<std::byte> expected = before;
        for (size_t i = 0; i < to.size(); ++i)
            for (const auto& row : rows)
                std::memcpy(expected.data() + row.offset + to[i] * row.stride,
                            before.data() + row.offset + from[i] * row.stride, row.run);
        CHECK(std::memcmp(expected.data(), worker.own, size) == 0);
    }
    worker.close(device);
}

constexpr uint32_t kJobs = 6;                                           // of one round
using OpenTickets = std::map<uint64_t, std::pair<uint32_t, uint64_t>>;  // -> word, its sequence

// Stores and loads in turn, each with blocks, pages and a word of its own; tickets from 100 on.
OpenTickets submit_round(Device& device, Worker& worker, uint32_t pages_per_slot,
                         uint64_t& sequence) {
    OpenTickets open;
    for (uint32_t n = 0; n < kJobs; ++n) {
        std::vector<uint32_t> ids(8), pages(2 * pages_per_slot);
        std::iota(ids.begin(), ids.end(), n * 8);
        std::iota(pages.begin(), pages.end(), n * 2 * pages_per_slot);
        worker.page->at(n).store(make_word(++sequence, State::kPending));
        open[100 + n] = {n, sequence};
        const auto direction = n % 2 ? Direction::kStore : Direction::kLoad;
        device.submit_copy(job_of(100 + n, direction, worker, ids, pages, n, sequence));
    }
    return open;
}

void cancelled_copies(Device& device, unsigned threads) {
    uint64_t size = 0;
    const auto rows = awkward_planes(size);
    Worker worker(device, rows, size);
    const auto pages_per_slot =
        static_cast<uint32_t>((kPerSlot * worker.table->block_bytes() + kPage - 1) / kPage);
    std::mt19937 random(threads);
    uint64_t sequence = 0;
    for (int round = 0; round < 40; ++round) {
        const OpenTickets open = submit_round(device, worker, pages_per_slot, sequence);
        std::thread worker_side([&, seed = random()] {
            std::mt19937 choice(seed);
            for (const auto& [ticket, word] : open) {
                if (choice() % 2) continue;
                std::this_thread::sleep_for(std::chrono::microseconds(choice() % 300));
                Word& state = worker.page->at(word.first);
                if (move_word(state, word.second, State::kPending, State::kCancelled)) continue;
                const bool store = word.first % 2 != 0;
                move_word(state, word.second, State::kRunning,
                          store ? State::kCancelled : State::kCancelling);
            }
        });
        std::thread server_side([&, seed = random()] {
            std::mt19937 choice(seed);
            for (const auto& [ticket, word] : open)
                if (choice() % 4 == 0) device.cancel(ticket);
        });
        std::set<uint64_t> ended;
        for (const Completion& completion : wait(device, kJobs)) {
            CHECK(ended.insert(completion.ticket).second);
            const auto [word, number] = open.at(completion.ticket);
            const uint64_t state = worker.page->at(word);
            const bool done = completion.outcome == Outcome::kDone;
            CHECK(done == (state == make_word(number, State::kDone)));
            CHECK(state != make_word(number, State::kRunning));
            CHECK(state != make_word(number, State::kPending));
        }
        worker_side.join();
        server_side.join();
        CHECK(device.drain().empty());
        for (const Part& part : device.drain_parts())
            CHECK(open.at(part.ticket).first % 2 != 0 && part.slots == 1);
        for (uint32_t n = 0; n < kJobs; ++n)
            CHECK((worker.page->at(n) & 0xff) != static_cast<uint64_t>(State::kCancelling));
    }
    worker.close(device);
}

void truncated_memory(unsigned threads) {
    auto region = std::make_shared<HostRegion>(4096 * kPage);
    CpuDevice device(region, kPage, threads, SlowCopies{50});
    for (int round = 0; round < 20; ++round) {
        uint64_t size = 0;
        const auto rows = awkward_planes(size);
        Worker worker(device, rows, size);
        const auto pages_per_slot =
            static_cast<uint32_t>((kPerSlot * worker.table->block_bytes() + kPage - 1) / kPage);
        std::vector<uint32_t> ids(kBlocks), pages(kBlocks / kPerSlot * pages_per_slot);
        std::iota(ids.begin(), ids.end(), 0);
        std::iota(pages.begin(), pages.end(), 0);
        worker.page->at(0).store(make_word(1, State::kPending));
        const auto direction = round % 2 ? Direction::kStore : Direction::kLoad;
        device.submit_copy(job_of(7, direction, worker, ids, pages, 0, 1));
        std::this_thread::sleep_for(std::chrono::microseconds(100 * (round % 10)));
        CHECK(ftruncate(worker.fd, 0) == 0);
        const Completion end = wait(device, 1)[0];
        CHECK(end.outcome == Outcome::kMemoryLost || end.outcome == Outcome::kDone);
        worker.close(device);
    }
}

// Tickets are run by several threads at once while one cancels, fails some and loses the device.
void fake_copies(unsigned threads) {
    auto region = std::make_shared<HostRegion>(1024 * kPage);
    FakeDevice device(region, kPage, {.seed = threads, .trouble = 0.02});
    uint64_t size = 0;
    const auto rows = awkward_planes(size);
    Worker worker(device, rows, size);
    const auto pages_per_slot =
        static_cast<uint32_t>((kPerSlot * worker.table->block_bytes() + kPage - 1) / kPage);
    std::mt19937 random(threads);
    uint64_t sequence = 0;
    for (int round = 0; round < 40; ++round) {
        const OpenTickets open = submit_round(device, worker, pages_per_slot, sequence);
        std::vector<std::thread> runners;
        for (unsigned i = 0; i < threads; ++i)
            runners.emplace_back([&] {
                while (!device.open().empty()) device.step();
            });
        device.cancel(100 + random() % kJobs);
        try {
            device.fail(100 + random() % kJobs, 1 + random() % 4, "half way");
        } catch (const std::invalid_argument&) {  // it runs, or has ended
        }
        const bool lost = random() % 3 == 0;
        if (lost) device.lose("off the bus");
        for (auto& runner : runners) runner.join();
        std::set<uint64_t> ended;
        for (const Completion& completion : wait(device, kJobs)) {
            CHECK(ended.insert(completion.ticket).second);
            const auto [word, number] = open.at(completion.ticket);
            const bool done = completion.outcome == Outcome::kDone;
            CHECK(worker.page->at(word) == make_word(number, done ? State::kDone : State::kFailed));
            CHECK(lost || completion.outcome != Outcome::kDeviceLost);
        }
        CHECK(device.drain().empty());
        device.recover();
    }
    worker.close(device);
}

std::shared_ptr<HostRegion> new_region() { return std::make_shared<HostRegion>(4096 * kPage); }

void cpu_copies(unsigned threads) {
    CpuDevice quick(new_region(), kPage, threads);
    // Batches of a block, and parts of a slot.
    CpuDevice slow(new_region(), kPage, threads, SlowCopies{20},
                   {.batch_bytes = 1, .part_bytes = 1});
    random_copies(quick, threads);
    cancelled_copies(slow, threads);
}

void gpu_copies(unsigned seed) {
    for (const Way way : {Way::kDma, Way::kStaged}) {
        auto gpu = std::make_shared<FakeGpu>("GPU-0", FakeGpu::Options{.seed = seed});
        const auto region = new_region();
        {
            GpuDevice device(region, kPage, gpu, {.batch_bytes = 40'000, .way = way});
            Pinner pinner(region, gpu, 2, {});
            random_copies(device, seed);
            cancelled_copies(device, seed);
        }
        for (const std::string& fault : gpu->faults()) std::fprintf(stderr, "%s\n", fault.c_str());
        CHECK(gpu->faults().empty());
        CHECK(gpu->open_memories() == 0 && gpu->pinned_bytes() == 0);
    }
}

// The GPU dies, or is given up and runs on, while copies are queued, under way and cancelled.
// Nothing lands in the worker's memory after the last end.
void lost_gpu(unsigned seed, bool alive) {
    std::mt19937 random(seed);
    for (int round = 0; round < 20; ++round) {
        auto gpu = std::make_shared<FakeGpu>("GPU-0", FakeGpu::Options{.seed = random()});
        GpuDevice device(new_region(), kPage, gpu, {.batch_bytes = 40'000});
        uint64_t size = 0, sequence = 0;
        const auto rows = awkward_planes(size);
        Worker worker(device, rows, size);
        const auto pages_per_slot =
            static_cast<uint32_t>((kPerSlot * worker.table->block_bytes() + kPage - 1) / kPage);
        const OpenTickets open = submit_round(device, worker, pages_per_slot, sequence);
        std::thread killer([&, micros = random() % 3000] {
            std::this_thread::sleep_for(std::chrono::microseconds(micros));
            alive ? gpu->lose("off the bus") : gpu->die("off the bus");
        });
        device.cancel(100 + random() % kJobs);
        std::set<uint64_t> ended;
        for (const Completion& completion : wait(device, kJobs)) {
            CHECK(ended.insert(completion.ticket).second);
            const auto [word, number] = open.at(completion.ticket);
            const bool done = completion.outcome == Outcome::kDone;
            CHECK(worker.page->at(word) == make_word(number, done ? State::kDone : State::kFailed));
        }
        std::memset(worker.own, 0x5a, worker.size);
        killer.join();
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        CHECK(std::all_of(worker.own, worker.own + worker.size,
                          [](std::byte byte) { return byte == std::byte{0x5a}; }));
        CHECK(device.lost() == "off the bus");
        worker.close(device);
    }
}

}  // namespace

int main() {
    for (unsigned threads : {1u, 2u, 4u}) {
        cpu_copies(threads);
        truncated_memory(threads);
        fake_copies(threads);
    }
    gpu_copies(1);
    lost_gpu(1, false);
    lost_gpu(2, true);
    stress_files();
    stress_index();
    stress_lifetimes();
    stress_what_if();
    std::puts("stress: all checks passed");
}
