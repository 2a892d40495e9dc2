// stress_index.cpp: the prefix index under sanitizers. `make sanitize` builds and runs it.
//
// Threads add, remove, clear and remove owners of their own, over hashes that all share, while
// others match prompts. Checked: no match is longer than the prompt, none is shorter in all tiers
// than in one, each thread finds exactly what it holds, and nothing is left at the end. Then random
// changes of the table of keys, against a plain list of which are present.
#include "stress_index.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "tables/key_table.h"
#include "tables/prefix_index.h"

using namespace kvserver;

namespace {

constexpr size_t kPrompt = 700;
constexpr uint32_t kChunkBlocks = 4;

std::string hashes(size_t first, size_t last) {
    std::string raw;
    for (uint64_t i = first; i < last; ++i) {
        raw.append(reinterpret_cast<const char*>(&i), sizeof(i));
    }
    return raw;
}

void own(PrefixIndex& index, uint32_t seed) {
    std::mt19937 random(seed);
    int owner = index.add_owner();
    CHECK(owner >= 0);
    const std::string prompt = hashes(0, kPrompt);
    for (int round = 0; round < 200; ++round) {
        const size_t blocks = random() % kPrompt;
        const std::string part = hashes(0, blocks);
        index.add_blocks(owner, part, 8);
        const bool twice = random() % 2 != 0;
        if (twice) index.add_blocks(owner, part, 8);
        const std::vector<PrefixIndex::Reader> reader{{owner, -1, -1, kChunkBlocks}};
        CHECK(index.match(prompt, 8, reader)[0].l0 == blocks);
        CHECK(index.owned_blocks(owner) == blocks);
        switch (random() % 3) {
            case 0:
                index.clear_owner(owner);
                break;
            case 1:
                index.remove_owner(owner);
                owner = index.add_owner();
                CHECK(owner >= 0);
                break;
            default:
                CHECK(index.remove_blocks(owner, part, 8) == 0);
                if (twice) CHECK(index.remove_blocks(owner, part, 8) == 0);
        }
        CHECK(index.match(prompt, 8, reader)[0].best == 0 || reader[0].l0 != owner);
    }
    index.remove_owner(owner);
}

struct alignas(16) Key {
    char bytes[KeyTable::kKeyBytes] = {};
};

void change_keys(size_t different) {
    std::mt19937 random(static_cast<uint32_t>(different));
    std::vector<Key> keys(different);
    for (size_t i = 0; i < different; ++i) std::memcpy(keys[i].bytes, &i, sizeof(i));
    std::vector<bool> present(different);
    KeyTable table(random());
    size_t count = 0;
    const auto flip = [&](size_t i) {
        present[i] = !present[i];
        count += present[i] ? 1 : -1;
    };
    for (int round = 0; round < 100'000; ++round) {
        const size_t i = random() % different;
        if (random() % 8 == 0 && count != 0) {
            flip(static_cast<Key*>(table.pop().value) - keys.data());
        } else if (present[i]) {
            CHECK(table.remove(keys[i].bytes).value == &keys[i]);
            flip(i);
        } else {
            CHECK(table.remove(keys[i].bytes).key == nullptr);
            table.add({keys[i].bytes, &keys[i]});
            flip(i);
        }
        CHECK(table.size() == count);
        std::vector<void*> values(std::min(different - i, KeyTable::kMostAtOnce));
        table.find(keys[i].bytes, values.size(), values.data());
        for (size_t j = 0; j < values.size(); ++j) {
            CHECK(values[j] == (present[i + j] ? &keys[i + j] : nullptr));
        }
    }
}

}  // namespace

void stress_index() {
    change_keys(30);
    change_keys(20'000);
    PrefixIndex index(1, size_t{1} << 30);
    std::atomic<bool> stop{false};
    std::vector<std::thread> matching, owning;
    for (int i = 0; i < 2; ++i) {
        matching.emplace_back([&] {
            const std::string prompt = hashes(0, kPrompt);
            const std::vector<PrefixIndex::Reader> readers{{0, 1, 2, kChunkBlocks}, {2, 0, 1, 1}};
            while (!stop) {
                for (const auto& match : index.match(prompt, 8, readers)) {
                    CHECK(match.best <= kPrompt);
                    CHECK(match.l0 <= match.best && match.l1 <= match.best &&
                          match.l2 <= match.best);
                }
                CHECK(index.memory_bytes() > 0 && index.size() <= kPrompt);
            }
        });
    }
    for (uint32_t i = 0; i < 4; ++i) owning.emplace_back([&, i] { own(index, i); });
    for (auto& thread : owning) thread.join();
    stop = true;
    for (auto& thread : matching) thread.join();
    CHECK(index.size() == 0);
}
