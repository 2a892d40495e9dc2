#include "tables/what_if.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "tables/fold.h"

namespace kvserver {

namespace {

constexpr double kEverything = std::numeric_limits<double>::infinity();
constexpr uint16_t kAnyGroup = 0xffff;

uint64_t fold_key(uint64_t seed, const char* key) {
    std::array<uint64_t, 4> words;
    std::memcpy(words.data(), key, sizeof(words));
    const uint64_t first = fold(words[0] ^ seed, words[1] ^ kGolden);
    const uint64_t second = fold(words[2] ^ ~seed, words[3] ^ (kGolden << 1 | 1));
    return fold(first ^ second ^ seed, kGolden);
}

size_t count_of(std::string_view keys) {
    if (keys.size() % WhatIf::kKeyBytes != 0) {
        throw std::invalid_argument(std::to_string(keys.size()) + " bytes are no whole keys");
    }
    return keys.size() / WhatIf::kKeyBytes;
}

}  // namespace

WhatIf::WhatIf(uint64_t secret, const std::array<uint64_t, kUnlimited>& sizes)
    : secret_(secret), sizes_(sizes) {
    clear();
}

void WhatIf::clear() {
    size_ = now_ = exact_from_ = 0;
    threshold_ = kAll;
    std::vector<Slot>(kFirstSlots).swap(slots_);
    times_.resize(kFirstSlots / 2 * 3);
}

double WhatIf::sample_rate() const {
    return static_cast<double>(threshold_) / static_cast<double>(kAll);
}

size_t WhatIf::memory_bytes() const {
    return slots_.size() * sizeof(Slot) + times_.memory_bytes() +
           looked_.capacity() * sizeof(Looked) + hashes_.capacity() * sizeof(uint64_t) +
           sizeof(*this);
}

// ---- keys -----------------------------------------------------------------------------------

const std::vector<uint64_t>& WhatIf::hashes(uint64_t salt, std::string_view keys) {
    const size_t count = count_of(keys), mask = slots_.size() - 1;
    const uint64_t seed = fold(salt ^ secret_, kGolden);
    hashes_.resize(count);
    for (size_t i = 0; i < count; ++i) {
        hashes_[i] = fold_key(seed, keys.data() + i * kKeyBytes) >> (64 - kHashBits);
        __builtin_prefetch(&slots_[hashes_[i] & mask], 1);
    }
    return hashes_;
}

void WhatIf::count_distinct(uint64_t salt, std::string_view keys) {
    for (size_t at = 0; at < keys.size(); at += kKeyBytes) {
        const uint64_t hash = fold_key(salt, keys.data() + at);
        const uint64_t rest = hash << kRegisterBits | (uint64_t{1} << (kRegisterBits - 1));
        char& most = registers_[hash >> (64 - kRegisterBits)];
        most = std::max(most, static_cast<char>(std::countl_zero(rest) + 1));
    }
}

// The low bits are the place, the high ones decide what is sampled.
size_t WhatIf::find(uint64_t hash) const {
    const size_t mask = slots_.size() - 1;
    size_t at = hash & mask;
    while (slots_[at].pages != 0 && slots_[at].hash != hash) at = (at + 1) & mask;
    return at;
}

// ---- lookups --------------------------------------------------------------------------------

WhatIf::Hits WhatIf::lookup(uint64_t salt, std::string_view keys, const HitRules& rules,
                            size_t found, uint32_t pages) {
    hashes(salt, keys);
    if (rules.distinct) count_distinct(salt, keys);
    look(rules, found);
    Hits hits;
    size_t full = rules.full == 0 ? looked_.size() : 0;  // what a size has, a larger one has
    for (size_t size = 0; size <= kUnlimited; ++size) {
        const double most = size < kUnlimited ? static_cast<double>(sizes_[size]) : kEverything;
        while (full < looked_.size() && has(looked_[full], most, rules.full)) ++full;
        Hit& hit = hits[size];
        hit.boundary = boundary(most, rules, full);
        hit.chunks = hit.boundary == 0 ? 0 : looked_[hit.boundary - 1].counted;
        if (rules.full == 0) hit.chunks = static_cast<double>(hit.boundary);
    }
    for (size_t i = looked_.size(); i-- > 0;) {  // the first chunk last
        const bool resident = i < found && pages != 0;
        use(looked_[i].hash, resident ? rules.full : 0, resident ? pages : 0);
    }
    return hits;
}

void WhatIf::look(const HitRules& rules, size_t found) {
    looked_.clear();
    const Slot* before = nullptr;  // the last one listed
    const uint64_t exact = exact_from_ == 0 ? times_.total() : times_.after(exact_from_ - 1);
    uint64_t younger = 0;
    double counted = 0;
    for (size_t i = 0; i < hashes_.size(); ++i) {
        const uint64_t hash = hashes_[i];
        const Slot& slot = slots_[find(hash)];
        Looked chunk{hash, 0, counted, kAnyGroup};
        if (slot.pages != 0) {
            const bool follows = before != nullptr && before->used == slot.used + 1;
            younger = follows ? younger + before->pages : times_.after(slot.used);
            before = &slot;
            chunk.distance = distance(slot, younger, exact);
            chunk.counted = counted += slot.used >= exact_from_ ? 1 : 1 / sample_rate();
            chunk.groups = static_cast<uint16_t>(slot.groups);
        } else if (i >= found && hash < threshold_) {
            if (rules.full != 0) return;
            chunk.groups = 0;  // without full groups a hit may end behind it
        }
        looked_.push_back(chunk);
    }
}

// `younger`: the listed pages used after it; `exact`: those of the chunks that are listed whatever
// their hashes.
double WhatIf::distance(const Slot& slot, uint64_t younger, uint64_t exact) const {
    if (slot.used >= exact_from_) return static_cast<double>(younger + slot.pages);
    return static_cast<double>(exact) + static_cast<double>(younger - exact) / sample_rate() +
           slot.pages;
}

bool WhatIf::has(const Looked& chunk, double size, uint16_t bits) {
    return chunk.distance <= size && (chunk.groups & bits) == bits;
}

size_t WhatIf::boundary(double size, const HitRules& rules, size_t full) const {
    size_t hit = full;
    for (bool again = true; again;) {  // each boundary above a missing chunk needs it, too
        again = false;
        for (const GroupNeed& need : rules.others) {
            size_t first = hit > need.chunks ? hit - need.chunks : 0;
            if (need.local_tokens != 0) {
                first = hit * rules.chunk_tokens / need.local_tokens * need.local_tokens /
                        rules.chunk_tokens;
            }
            for (size_t i = hit; i-- > first;) {
                if (has(looked_[i], size, need.bit)) continue;
                hit = i;
                again = true;
                break;
            }
        }
    }
    return hit;
}

// ---- uses -----------------------------------------------------------------------------------

void WhatIf::add(uint64_t salt, std::string_view keys, uint16_t bit, uint32_t pages) {
    hashes(salt, keys);
    for (size_t i = hashes_.size(); i-- > 0;) use(hashes_[i], bit, std::max<uint32_t>(1, pages));
}

void WhatIf::use_again(uint64_t salt, std::string_view keys) {
    hashes(salt, keys);
    for (size_t i = hashes_.size(); i-- > 0;) use(hashes_[i], 0, 0);
}

void WhatIf::remove(uint64_t salt, std::string_view keys, uint16_t bit, uint32_t pages) {
    for (const uint64_t hash : hashes(salt, keys)) {
        Slot& slot = slots_[find(hash)];
        if (slot.pages == 0 || (slot.groups & bit) == 0) continue;
        slot.groups = slot.groups & ~uint64_t{bit};
        slot.pages -= std::min(pages, slot.pages - 1);
        times_.set(slot.used, slot.pages);
    }
}

// A chunk becomes the youngest. `bits` that it lacks make it larger by `pages`; without bits only a
// listed chunk is used.
void WhatIf::use(uint64_t hash, uint16_t bits, uint32_t pages) {
    if (now_ == times_.times()) renumber();
    size_t at = find(hash);
    if (slots_[at].pages == 0) {
        if (bits == 0) return;
        if (size_ + 1 > slots_.size() / 4 * 3) {
            make_room();
            at = find(hash);
        }
        ++size_;
        slots_[at] = {hash, 0, 0, 0};
    } else {
        times_.set(slots_[at].used, 0);
    }
    Slot& slot = slots_[at];
    if ((slot.groups & bits) != bits && pages != 0) {
        slot.groups = slot.groups | bits;
        slot.pages += pages;
    }
    slot.used = now_++;
    times_.set(slot.used, slot.pages);
}

void WhatIf::make_room() {
    if (slots_.size() < kMostSlots) {
        grow();
    } else {
        thin_out();
    }
}

void WhatIf::grow() {
    times_.release();
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old) {
        if (slot.pages != 0) slots_[find(slot.hash)] = slot;
    }
    std::vector<Slot>().swap(old);
    renumber();
}

// The times keep their order and become 0, 1, 2 ...
void WhatIf::renumber() {
    times_.release();
    std::vector<uint64_t> taken(now_ / 64 + 1), before(now_ / 64 + 2);
    for (const Slot& slot : slots_) {
        if (slot.pages != 0) taken[slot.used / 64] |= uint64_t{1} << (slot.used % 64);
    }
    for (size_t i = 0; i < taken.size(); ++i) before[i + 1] = before[i] + std::popcount(taken[i]);
    const auto rank = [&](uint32_t used) {
        const uint64_t below = taken[used / 64] & ((uint64_t{1} << (used % 64)) - 1);
        return static_cast<uint32_t>(before[used / 64] + std::popcount(below));
    };
    times_.resize(slots_.size() / 2 * 3);
    for (Slot& slot : slots_) {
        if (slot.pages == 0) continue;
        slot.used = rank(slot.used);
        times_.set(slot.used, slot.pages);
    }
    exact_from_ = rank(exact_from_);
    now_ = static_cast<uint32_t>(before.back());
}

// Keep the youngest, and of the others those below a threshold that leaves space for others.
void WhatIf::thin_out() {
    renumber();
    times_.release();
    exact_from_ = now_ > kExact ? now_ - kExact : 0;
    std::vector<uint64_t> older;
    older.reserve(now_ - kExact);
    for (const Slot& slot : slots_) {
        if (slot.pages != 0 && slot.used < exact_from_ && slot.hash < threshold_) {
            older.push_back(slot.hash);
        }
    }
    if (older.size() > kSampled) {
        const auto last = older.begin() + kSampled;
        std::nth_element(older.begin(), last, older.end());
        threshold_ = *last;
    }
    std::vector<uint64_t>().swap(older);
    for (size_t at = 0; at < slots_.size(); ++at) {
        while (slots_[at].pages != 0 && slots_[at].used < exact_from_ &&
               slots_[at].hash >= threshold_) {
            erase(at);
        }
    }
    renumber();
}

// Those behind it move up as far as their homes allow, so that every search still ends at an empty
// slot only where its hash is not there.
void WhatIf::erase(size_t at) {
    const size_t mask = slots_.size() - 1;
    --size_;
    for (size_t next = (at + 1) & mask; slots_[next].pages != 0; next = (next + 1) & mask) {
        const size_t from_home = (next - (slots_[next].hash & mask)) & mask;
        if (from_home >= ((next - at) & mask)) {
            slots_[at] = slots_[next];
            at = next;
        }
    }
    slots_[at].pages = 0;
}

}  // namespace kvserver
