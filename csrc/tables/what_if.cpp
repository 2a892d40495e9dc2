// Lookups: what is listed, and which sizes have it.
#include "tables/what_if.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "tables/fold.h"

namespace kvserver {

namespace {

constexpr uint16_t kAnyGroup = 0xffff;

uint64_t fold_key(uint64_t seed, const char* key) {
    std::array<uint64_t, 4> words;
    std::memcpy(words.data(), key, sizeof(words));
    const uint64_t first = fold(words[0] ^ seed, words[1] ^ kGolden);
    const uint64_t second = fold(words[2] ^ ~seed, words[3] ^ (kGolden << 1 | 1));
    return fold(first ^ second ^ seed, kGolden);
}

}  // namespace

size_t HitRules::first_needed(const GroupNeed& need, size_t boundary) const {
    if (need.local_tokens != 0) {
        return boundary * chunk_tokens / need.local_tokens * need.local_tokens / chunk_tokens;
    }
    return boundary > need.chunks ? boundary - need.chunks : 0;
}

WhatIf::WhatIf(uint64_t secret, const std::array<uint64_t, kUnlimited>& sizes, bool protects)
    : secret_(secret), protects_(protects) {
    for (size_t size = 0; size < kUnlimited; ++size) sizes_[size].most = sizes[size];
    clear();
}

void WhatIf::clear() {
    for (Size& size : sizes_) {
        const uint64_t most = size.most;
        size = {};
        size.most = most;
    }
    exact_ = kUnlimited;
    threshold_ = kAll;
    now_ = begin_ = 1;
    size_ = 0;
    std::vector<Slot>(kFirstSlots).swap(slots_);
    std::vector<Entry>(entries_of(kFirstSlots)).swap(entries_);
    std::vector<uint16_t>(entries_of(kFirstSlots)).swap(strip_of_);
    std::vector<Others>().swap(others_);
    std::vector<Strip>(strips_of(kFirstSlots)).swap(strips_);
    renumber();
}

double WhatIf::sample_rate() const {
    return static_cast<double>(threshold_) / static_cast<double>(kAll);
}

size_t WhatIf::memory_bytes() const {
    size_t marks = 0;
    for (const Size& size : sizes_) marks += size.marks.size();
    return slots_.size() * sizeof(Slot) + entries_.size() * (sizeof(Entry) + sizeof(uint16_t)) +
           others_.size() * sizeof(Others) + stores_others_.capacity() +
           strips_.size() * sizeof(Strip) + stretches_.capacity() * sizeof(Stretch) +
           looked_.capacity() * sizeof(Looked) + marks * sizeof(Mark) + sizeof(*this);
}

// ---- tokens ---------------------------------------------------------------------------------

std::array<double, WhatIf::kSizes> WhatIf::hit_tokens() const {
    std::array<double, kSizes> tokens;
    std::ranges::transform(hit_tokens_, tokens.begin(), [](const auto& one) { return one.load(); });
    return tokens;
}

void WhatIf::count(const Hits& hits, double tokens_of_a_chunk) {
    for (size_t size = 0; size < kSizes; ++size) {
        hit_tokens_[size] = hit_tokens_[size] + hits.chunks[size] * tokens_of_a_chunk;
    }
}

void WhatIf::count(const Hits& hits, double tokens_of_a_block, const Hits& behind, size_t found) {
    for (size_t size = 0; size < kSizes; ++size) {
        if (behind.boundary[size] != found) continue;
        hit_tokens_[size] = hit_tokens_[size] + hits.chunks[size] * tokens_of_a_block;
    }
}

// ---- keys -----------------------------------------------------------------------------------

uint64_t WhatIf::Keys::hash(size_t at) const {
    return fold_key(seed, raw.data() + at * kKeyBytes) >> (64 - kHashBits);
}

WhatIf::Keys WhatIf::keys_of(uint64_t salt, std::string_view raw) const {
    if (raw.size() % kKeyBytes != 0) {
        throw std::invalid_argument(std::to_string(raw.size()) + " bytes are no whole keys");
    }
    return {fold(salt ^ secret_, kGolden), raw, raw.size() / kKeyBytes};
}

// The low bits are the place, the high ones decide what is sampled.
size_t WhatIf::find(uint64_t hash) const {
    const size_t mask = slots_.size() - 1;
    size_t at = hash & mask;
    while (slots_[at].spot != 0 && slots_[at].hash != hash) at = (at + 1) & mask;
    return at;
}

// How many of the chunks [at, end) were used together, the first one of them at `time`, and not
// again since: a state may be stored of one chunk alone.
size_t WhatIf::stretch(const Keys& keys, size_t at, uint32_t time, size_t end) const {
    const size_t together = used_together(keys, at, time, std::min<size_t>(end - at, time));
    size_t length = 1;
    while (length < together && entries_[time - length] != 0) ++length;
    return length;
}

size_t WhatIf::used_together(const Keys& keys, size_t at, uint32_t time, size_t most) const {
    const auto follows = [&](size_t more) { return time_of(keys, at + more) == time - more; };
    if (most == 1 || follows(most - 1)) return most;
    size_t good = 0, bad = most - 1;
    for (size_t step = 1; good + step < bad; step *= 2) {
        if (!follows(good + step)) {
            bad = good + step;
            break;
        }
        good += step;
    }
    while (bad - good > 1) {
        const size_t middle = (good + bad) / 2;
        (follows(middle) ? good : bad) = middle;
    }
    return good + 1;
}

// ---- lookups --------------------------------------------------------------------------------

WhatIf::Hits WhatIf::lookup(uint64_t salt, std::string_view raw, const HitRules& rules) {
    const Keys keys = keys_of(salt, raw);
    const bool each = rules.full == 0 || !rules.others.empty();
    Hits hits;
    look(keys, rules, hits, each);
    hits.full = hits.boundary;
    for (size_t size = 0; each && size < kSizes; ++size) {
        const size_t at = boundary(size, rules, hits.boundary[size]);
        hits.boundary[size] = static_cast<uint32_t>(at);
        hits.chunks[size] = rules.full == 0 ? static_cast<double>(at)
                            : at == 0       ? 0
                                            : looked_[at - 1].counted;
    }
    return hits;
}

// For each size the chunks up to the first one that lacks a full group, or that is not there;
// `each`: what the rules of other groups need to know of the chunks is in looked_.
void WhatIf::look(const Keys& keys, const HitRules& rules, Hits& hits, bool each) {
    looked_.clear();
    uint8_t going = kAllSizes;
    double counted = 0;
    const bool hybrid = each && !others_.empty();
    const auto lack = [&](size_t at, uint8_t sizes) {
        for (uint8_t end = going & sizes; end != 0; end &= end - 1) {
            hits.boundary[std::countr_zero(end)] = static_cast<uint32_t>(at);
            hits.chunks[std::countr_zero(end)] = counted;
        }
        going &= ~sizes;
    };
    size_t at = 0;
    while (at < keys.count) {
        const uint64_t hash = keys.hash(at);
        const uint32_t time = this->time(slots_[find(hash)]);
        if (time == 0) {
            if (hash < threshold_ && rules.full != 0) break;
            const uint8_t lacking = hash < threshold_ ? kAllSizes : (1 << exact_) - 1;
            if (rules.full != 0) lack(at, lacking);
            if (each) looked_.push_back({static_cast<uint8_t>(~lacking), kAnyGroup, counted});
            ++at;
            continue;
        }
        const size_t end = at + stretch(keys, at, time, keys.count);
        for (uint32_t used = time; at < end;) {
            const Entry state = entries_[used];
            const Others others = this->others(used);
            const Place where = place(used, state);
            const uint8_t sizes = where.has | kOnlyUnlimited;
            const auto groups = static_cast<uint16_t>(state >> kGroupsAt);
            const bool full = (groups & rules.full) == rules.full;
            if (rules.full != 0) lack(at, full ? ~sizes : kAllSizes);
            const double each_counts = (state & kWhole) != 0 ? 1 : 1 / sample_rate();
            for (; at < end && used >= where.floor; ++at, --used) {
                if (((entries_[used] ^ state) & kState) != 0) break;
                if (hybrid && others_[used] != others) break;
                counted += each_counts;
                if (each) {
                    looked_.push_back(
                        {static_cast<uint8_t>(sizes & ~others.lacking), groups, counted});
                }
            }
        }
    }
    lack(at, kAllSizes);
}

// Of the chunks looked up, where the first `full` ones have all that full groups need.
size_t WhatIf::boundary(size_t size, const HitRules& rules, size_t full) const {
    size_t hit = full;
    for (bool again = true; again;) {  // each boundary above a missing chunk needs it, too
        again = false;
        for (const GroupNeed& need : rules.others) {
            const size_t first = rules.first_needed(need, hit);
            for (size_t i = hit; i-- > first;) {
                if ((looked_[i].sizes >> size & 1) != 0 && (looked_[i].groups & need.bit) != 0) {
                    continue;
                }
                hit = i;
                again = true;
                break;
            }
        }
    }
    return hit;
}

WhatIf::Place WhatIf::place(uint32_t time, Entry entry) const {
    Place found;
    const auto since = [&](uint32_t limit) {
        if (time < limit) {
            found.ceiling = std::min(found.ceiling, limit);
            return 0;
        }
        found.floor = std::max(found.floor, limit);
        return 1;
    };
    for (size_t i = 0; i < kUnlimited; ++i) {
        const Size& size = sizes_[i];
        if ((entry >> (kUsedAt + i) & 1) != 0) {
            found.has |= since(size.demoted) << i;
            found.keeps |= since(size.kept) << i;
            found.knows |= since(size.old_demoted) << i;
        } else {
            found.has |= since(size.fresh) << i;
            found.knows |= since(size.old_fresh) << i;
        }
    }
    return found;
}

uint8_t WhatIf::counted_in(Entry entry) const {
    return (entry & kSampledFlag) != 0 ? kOnlyUnlimited - 1 : (1 << exact_) - 1;
}

}  // namespace kvserver
