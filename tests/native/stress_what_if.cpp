// stress_what_if.cpp: the chunks that other sizes would have, under sanitizers. `make sanitize`
// builds and runs it.
//
// Against a plain list in the order of last use, while all chunks are listed; then far more chunks
// than are listed. Checked: hits of each size, that sizes are ordered, and the bounds of memory.
#include "stress_what_if.h"

#include <algorithm>
#include <cstdint>
#include <list>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "tables/what_if.h"

using namespace kvserver;

namespace {

constexpr size_t kMostBytes = size_t{16} << 20;
constexpr std::array<uint64_t, WhatIf::kUnlimited> kSizes{25, 50, 100, 200, 400, 800};

std::string keys(uint64_t first, uint64_t count) {
    std::string raw(count * WhatIf::kKeyBytes, '\0');
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t number = first + i;
        std::copy_n(reinterpret_cast<const char*>(&number), sizeof(number),
                    raw.data() + i * WhatIf::kKeyBytes);
    }
    return raw;
}

// Beginnings of documents of 8 chunks of 1 to 3 pages: the size of a chunk is that of its number.
void follow_a_list() {
    std::mt19937 random(1);
    WhatIf table(7, kSizes);
    std::list<uint64_t> used;  // the youngest first
    const auto pages_of = [](uint64_t key) { return static_cast<uint32_t>(1 + key % 3); };
    for (int round = 0; round < 20'000; ++round) {
        const uint64_t first = random() % 75 * 8, count = 1 + random() % 8;
        std::vector<uint64_t> distances;  // of its chunks up to the first one that is not there
        for (uint64_t key = first; key < first + count; ++key) {
            uint64_t distance = 0;
            const auto at = std::find_if(used.begin(), used.end(), [&](uint64_t other) {
                distance += pages_of(other);
                return other == key;
            });
            if (at == used.end()) break;
            distances.push_back(distance);
        }
        const auto hits = table.lookup(1, keys(first, count), {});
        for (size_t size = 0; size <= WhatIf::kUnlimited; ++size) {
            const auto beyond = std::ranges::find_if(distances, [&](uint64_t distance) {
                return size < WhatIf::kUnlimited && distance > kSizes[size];
            });
            const auto found = static_cast<size_t>(beyond - distances.begin());
            CHECK(hits.boundary[size] == found);
            CHECK(hits.chunks[size] == static_cast<double>(found));
        }
        for (uint64_t key = first + count; key-- > first;) {
            used.remove(key);
            used.push_front(key);
            table.add(1, keys(key, 1), {}, 1, pages_of(key));
        }
        CHECK(table.size() == used.size());
    }
}

void list_too_many(bool protects) {
    std::mt19937 random(2);
    WhatIf table(8, {2'500, 50'000, 100'000, 200'000, 400'000, 800'000}, protects);
    const HitRules hybrid{1, 256, {{2, 3, 0}, {4, 0, 1024}}, 5};
    const auto bit = [](uint64_t first) { return static_cast<uint16_t>(1 << first / 500 % 3); };
    for (uint64_t first = 0; first < 2'000'000; first += 500) {
        table.add(first % 3, keys(first, 500), hybrid, bit(first), 3);
        const uint64_t late = first - std::min<uint64_t>(first, random() % 100 * 500);
        const auto all = table.lookup(late % 3, keys(late, 500), {bit(late), 1, {}});
        CHECK(all.chunks[WhatIf::kUnlimited] == 500);  // of the last 50,000 each is listed
        const std::string again = keys(random() % (first + 1), random() % 100);
        const uint64_t salt = random() % 3;
        const auto hits = table.lookup(salt, again, hybrid);
        for (size_t size = 1; size <= WhatIf::kUnlimited; ++size) {
            CHECK(protects || hits.boundary[size] >= hits.boundary[size - 1]);
            CHECK(hits.boundary[size] <= again.size() / WhatIf::kKeyBytes);
        }
        if (random() % 2 == 0) table.remove(random() % 3, keys(0, 100), 2, 100);
        table.use(salt, again, hybrid, hits, random() % 200, random() % 4);
        CHECK(table.memory_bytes() < kMostBytes);
    }
    CHECK(table.sample_rate() < 1 && table.size() > 100'000);
    table.clear();
    CHECK(table.size() == 0 && table.sample_rate() == 1);
}

// Whatever a client sends as the keys of a prompt: the same ones again and again, in any order.
void repeat_keys(bool protects) {
    std::mt19937 random(3);
    WhatIf table(9, kSizes, protects);
    const HitRules hybrid{1, 256, {{2, 3, 0}, {4, 0, 1024}}, 5};
    for (int round = 0; round < 1'000; ++round) {
        std::string prompt;
        while (random() % 8 != 0) prompt += keys(random() % 40, 1 + random() % 20);
        for (auto times = random() % 40; random() % 4 == 0 && times > 0; --times) {
            prompt += prompt.substr(0, 15 * WhatIf::kKeyBytes);
        }
        const HitRules& rules = random() % 2 == 0 ? hybrid : HitRules{};
        const auto hits = table.lookup(1, prompt, rules);
        for (const uint32_t boundary : hits.boundary) {
            CHECK(boundary <= prompt.size() / WhatIf::kKeyBytes);
        }
        if (random() % 2 == 0) table.add(1, prompt, hybrid, 1 << random() % 3, 1 + random() % 3);
        table.use(1, prompt, rules, hits, random() % 700, random() % 4);
        if (random() % 16 == 0) table.remove(1, prompt, 2, 1);
        CHECK(table.size() <= 60);
    }
    const auto hits = table.lookup(1, keys(0, 10) + keys(0, 10), {7, 1, {}});
    table.add(1, keys(0, 10), {7, 1, {}}, 7, 1);
    CHECK(hits.boundary[WhatIf::kUnlimited] <= 20);
    CHECK(table.lookup(1, keys(0, 10), {7, 1, {}}).boundary[WhatIf::kUnlimited] == 10);
}

}  // namespace

void stress_what_if() {
    repeat_keys(false);
    repeat_keys(true);
    follow_a_list();
    list_too_many(false);
    list_too_many(true);
}
