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
    size_ = total_ = now_ = exact_from_ = 0;
    threshold_ = kAll;
    std::vector<Slot>(kFirstSlots).swap(slots_);
    std::vector<uint64_t>(kFirstSlots * 3 / 2).swap(tree_);
}

double WhatIf::sample_rate() const {
    return static_cast<double>(threshold_) / static_cast<double>(kAll);
}

size_t WhatIf::memory_bytes() const {
    return slots_.size() * sizeof(Slot) + tree_.size() * sizeof(uint64_t) +
           looked_.capacity() * sizeof(Looked) + sizeof(*this);
}

// ---- keys -----------------------------------------------------------------------------------

uint64_t WhatIf::hash_of(uint64_t salt, const char* key) const {
    return fold_key(fold(salt ^ secret_, kGolden), key) >> (64 - kHashBits);
}

void WhatIf::count_distinct(uint64_t salt, const char* key) {
    const uint64_t hash = fold_key(salt, key);
    const uint64_t rest = hash << kRegisterBits | (uint64_t{1} << (kRegisterBits - 1));
    char& most = registers_[hash >> (64 - kRegisterBits)];
    most = std::max(most, static_cast<char>(std::countl_zero(rest) + 1));
}

// The low bits are the place, the high ones decide what is sampled.
size_t WhatIf::find(uint64_t hash) const {
    const size_t mask = slots_.size() - 1;
    size_t at = hash & mask;
    while (slots_[at].pages != 0 && slots_[at].hash != hash) at = (at + 1) & mask;
    return at;
}

// ---- pages by time of last use --------------------------------------------------------------

void WhatIf::add_pages(uint32_t used, uint64_t pages) {
    total_ += pages;
    for (size_t at = used + 1; at <= tree_.size(); at += at & -at) tree_[at - 1] += pages;
}

// Of the chunks last used at `used` or before.
uint64_t WhatIf::pages_until(uint32_t used) const {
    uint64_t pages = 0;
    for (size_t at = used + 1; at > 0; at -= at & -at) pages += tree_[at - 1];
    return pages;
}

double WhatIf::distance(const Slot& slot) const {
    const auto younger = static_cast<double>(total_ - pages_until(slot.used));
    if (slot.used >= exact_from_) return younger + slot.pages;
    const auto exact =
        static_cast<double>(total_ - (exact_from_ == 0 ? 0 : pages_until(exact_from_ - 1)));
    return exact + (younger - exact) / sample_rate() + slot.pages;
}

// ---- lookups --------------------------------------------------------------------------------

WhatIf::Hits WhatIf::lookup(uint64_t salt, std::string_view keys, const HitRules& rules,
                            size_t found, uint32_t pages) {
    const size_t count = count_of(keys);
    for (size_t i = 0; rules.distinct && i < count; ++i) {
        count_distinct(salt, keys.data() + i * kKeyBytes);
    }
    look(salt, keys, rules, found);
    Hits hits;
    for (size_t size = 0; size <= kUnlimited; ++size) {
        const double most = size < kUnlimited ? static_cast<double>(sizes_[size]) : kEverything;
        Hit& hit = hits[size];
        hit.boundary = boundary(most, rules);
        for (size_t i = 0; i < hit.boundary; ++i) hit.chunks += looked_[i].weight;
        if (rules.full == 0) hit.chunks = static_cast<double>(hit.boundary);
    }
    for (size_t i = looked_.size(); i-- > 0;) {  // the first chunk last
        const bool resident = i < found && pages != 0;
        use(looked_[i].hash, resident ? rules.full : 0, resident ? pages : 0);
    }
    return hits;
}

void WhatIf::look(uint64_t salt, std::string_view keys, const HitRules& rules, size_t found) {
    const size_t count = keys.size() / kKeyBytes;
    looked_.clear();
    for (size_t i = 0; i < count; ++i) {
        const uint64_t hash = hash_of(salt, keys.data() + i * kKeyBytes);
        const Slot& slot = slots_[find(hash)];
        Looked chunk{hash, 0, 0, kAnyGroup};
        if (slot.pages != 0) {
            chunk.distance = distance(slot);
            chunk.weight = slot.used >= exact_from_ ? 1 : 1 / sample_rate();
            chunk.groups = static_cast<uint16_t>(slot.groups);
        } else if (i >= found && hash < threshold_) {
            if (rules.full != 0) return;
            chunk.groups = 0;  // without full groups a hit may end behind it
        }
        looked_.push_back(chunk);
    }
}

size_t WhatIf::boundary(double size, const HitRules& rules) const {
    const std::vector<Looked>& chunks = looked_;
    size_t hit = 0;
    const auto has = [&](const Looked& chunk, uint16_t bits) {
        return chunk.distance <= size && (chunk.groups & bits) == bits;
    };
    if (rules.full == 0) {
        hit = chunks.size();
    } else {
        while (hit < chunks.size() && has(chunks[hit], rules.full)) ++hit;
    }
    for (bool again = true; again;) {  // each boundary above a missing chunk needs it, too
        again = false;
        for (const GroupNeed& need : rules.others) {
            size_t first = hit > need.chunks ? hit - need.chunks : 0;
            if (need.local_tokens != 0) {
                first = hit * rules.chunk_tokens / need.local_tokens * need.local_tokens /
                        rules.chunk_tokens;
            }
            for (size_t i = hit; i-- > first;) {
                if (has(chunks[i], need.bit)) continue;
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
    for (size_t i = count_of(keys); i-- > 0;) {
        use(hash_of(salt, keys.data() + i * kKeyBytes), bit, std::max<uint32_t>(1, pages));
    }
}

void WhatIf::use_again(uint64_t salt, std::string_view keys) {
    for (size_t i = count_of(keys); i-- > 0;) use(hash_of(salt, keys.data() + i * kKeyBytes), 0, 0);
}

void WhatIf::remove(uint64_t salt, std::string_view keys, uint16_t bit, uint32_t pages) {
    const size_t count = count_of(keys);
    for (size_t i = 0; i < count; ++i) {
        Slot& slot = slots_[find(hash_of(salt, keys.data() + i * kKeyBytes))];
        if (slot.pages == 0 || (slot.groups & bit) == 0) continue;
        const uint32_t fewer = std::min(pages, slot.pages - 1);
        slot.groups = slot.groups & ~uint64_t{bit};
        slot.pages -= fewer;
        add_pages(slot.used, -uint64_t{fewer});
    }
}

// A chunk becomes the youngest. `bits` that it lacks make it larger by `pages`; without bits only a
// listed chunk is used.
void WhatIf::use(uint64_t hash, uint16_t bits, uint32_t pages) {
    if (now_ == tree_.size()) renumber();
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
        add_pages(slots_[at].used, -uint64_t{slots_[at].pages});
    }
    Slot& slot = slots_[at];
    if ((slot.groups & bits) != bits && pages != 0) {
        slot.groups = slot.groups | bits;
        slot.pages += pages;
    }
    slot.used = now_++;
    add_pages(slot.used, slot.pages);
}

void WhatIf::make_room() {
    if (slots_.size() < kMostSlots) {
        grow();
    } else {
        thin_out();
    }
}

void WhatIf::grow() {
    std::vector<uint64_t>().swap(tree_);
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
    std::vector<uint64_t>().swap(tree_);
    std::vector<uint64_t> taken(now_ / 64 + 1), before(now_ / 64 + 2);
    for (const Slot& slot : slots_) {
        if (slot.pages != 0) taken[slot.used / 64] |= uint64_t{1} << (slot.used % 64);
    }
    for (size_t i = 0; i < taken.size(); ++i) before[i + 1] = before[i] + std::popcount(taken[i]);
    const auto rank = [&](uint32_t used) {
        const uint64_t below = taken[used / 64] & ((uint64_t{1} << (used % 64)) - 1);
        return static_cast<uint32_t>(before[used / 64] + std::popcount(below));
    };
    tree_.resize(slots_.size() / 2 * 3);
    total_ = 0;
    for (Slot& slot : slots_) {
        if (slot.pages == 0) continue;
        slot.used = rank(slot.used);
        tree_[slot.used] = slot.pages;
        total_ += slot.pages;
    }
    exact_from_ = rank(exact_from_);
    now_ = static_cast<uint32_t>(before.back());
    for (size_t at = 1; at <= tree_.size(); ++at) {
        const size_t parent = at + (at & -at);
        if (parent <= tree_.size()) tree_[parent - 1] += tree_[at - 1];
    }
}

// Keep the youngest, and of the others those below a threshold that leaves space for others.
void WhatIf::thin_out() {
    renumber();
    std::vector<uint64_t>().swap(tree_);
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
