// stress_lifetimes.cpp: the lifetimes of blocks under sanitizers. `make sanitize` builds and runs
// it.
//
// Threads feed random records to pools of the same metrics, some of them wrong, and random holds to
// others, while a thread reads. Checked: wrong records are refused, unchecked ones do no harm, and
// when all pools are destroyed every lifetime that began has ended in one way.
#include "stress_lifetimes.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"
#include "tables/block_lifetimes.h"

using namespace kvserver;

namespace {

constexpr uint32_t kPoolBlocks = 300;

template <typename T>
std::string raw(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// How many lifetimes began unseen.
uint64_t feed_records(const std::shared_ptr<LifetimeMetrics>& metrics, uint64_t seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    BlockLifetimes lifetimes(metrics, kPoolBlocks, 0.5, seed);
    uint64_t unseen = 0;
    for (uint64_t round = 1; round <= 1000; ++round) {
        std::vector<uint32_t> records(1 + random() % 100);
        uint64_t present = 0;
        for (uint32_t& record : records) {
            uint32_t operation = random() % 7;
            if (operation == static_cast<uint32_t>(Record::kCleared)) operation = random() % 7;
            const uint32_t block = random() % kPoolBlocks;
            record = operation << kRecordShift | block;
            present += block > 0 && operation == static_cast<uint32_t>(Record::kPresent);
        }
        const bool wrong = random() % 8 == 0;
        if (wrong) records.back() = random() % 2 ? kPoolBlocks : 7u << kRecordShift;
        const std::string what = raw(records), when = raw(std::vector<Mark>{{0, round * 1000000}});
        try {
            check_records(what, when, kPoolBlocks);
            CHECK(!wrong);
            lifetimes.apply(what, when);
            unseen += present;
        } catch (const std::invalid_argument&) {
            CHECK(wrong);
        }
        if (random() % 100 == 0) lifetimes.end_all();
    }
    return unseen;
}

void feed_holds(const std::shared_ptr<LifetimeMetrics>& metrics, uint64_t seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    BlockLifetimes lifetimes(metrics, kPoolBlocks, 0.5, seed);
    for (uint64_t round = 1; round <= 3000; ++round) {
        std::vector<uint32_t> blocks(random() % 20);
        for (uint32_t& block : blocks) block = random() % kPoolBlocks;
        std::vector<uint64_t> contents(random() % (blocks.size() + 1));
        for (size_t i = 0; i < contents.size(); ++i) contents[i] = blocks[i] + random() % 2 * 1000;
        const uint64_t request = random() % 12, now = round * 1000000;
        switch (random() % 8) {
            case 0:
                lifetimes.end_request(request, now);
                break;
            case 1:
                lifetimes.release_blocks(request, raw(blocks), now);
                break;
            default:
                lifetimes.own_blocks(request, random() % 2, raw(blocks), raw(contents), now);
        }
        CHECK(lifetimes.requests() <= 12);
    }
    for (uint64_t request = 0; request < 12; ++request) lifetimes.end_request(request, 1);
    CHECK(lifetimes.requests() == 0);
}

// What no loop hands over, for nothing of it passes a check: it must do no harm.
void feed_anything(uint64_t seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    const auto metrics = std::make_shared<LifetimeMetrics>(std::vector<double>{1});
    const auto bytes = [&](size_t most) {
        std::string found(random() % most, 0);
        for (char& byte : found) byte = static_cast<char>(random() % 3 ? random() % 4 : random());
        return found;
    };
    {
        BlockLifetimes lifetimes(metrics, kPoolBlocks, 0.5, seed);
        for (int round = 0; round < 3000; ++round) {
            lifetimes.apply(bytes(200), bytes(100));
            lifetimes.own_blocks(random() % 12, random(), bytes(100), bytes(200), random());
            lifetimes.release_blocks(random() % 12, bytes(100), random());
        }
    }
    CHECK(metrics->read().active_blocks == 0 && metrics->read().released_blocks == 0);
}

}  // namespace

void stress_lifetimes() {
    feed_anything(1);
    const auto metrics = std::make_shared<LifetimeMetrics>(std::vector<double>{0.01, 1});
    std::atomic<bool> stop{false};
    std::thread reader([&] {
        while (!stop) CHECK(metrics->read().lifetime.counts.size() == 3);
    });
    std::array<uint64_t, 2> unseen{};
    std::vector<std::thread> writers;
    for (size_t i = 0; i < unseen.size(); ++i) {
        writers.emplace_back([&, i] { unseen[i] = feed_records(metrics, i); });
        writers.emplace_back([&, i] { feed_holds(metrics, i); });
    }
    for (auto& writer : writers) writer.join();
    stop = true;
    reader.join();
    const LifetimeSnapshot found = metrics->read();
    CHECK(found.allocations + unseen[0] + unseen[1] ==
          found.evictions + found.recycled + found.cleared + found.lost);
    CHECK(found.active_blocks == 0 && found.released_blocks == 0);
}
