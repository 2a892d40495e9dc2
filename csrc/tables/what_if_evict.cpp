// What a use costs the sizes: evictions.
#include <algorithm>
#include <bit>
#include <utility>

#include "tables/what_if.h"

namespace kvserver {

void WhatIf::shrink() {
    for (size_t i = 0; i < kUnlimited; ++i) {
        Size& size = sizes_[i];
        const double rate = i < exact_ ? 1 : sample_rate();
        const auto most = static_cast<uint64_t>(static_cast<double>(size.most) * rate);
        if (size.pages <= most) continue;
        if (protects_) {
            while (size.pages > most && evict(i)) {
            }
        } else {
            evict_oldest(i, most);
        }
    }
}

void WhatIf::evict_oldest(size_t at, uint64_t most) {
    Size& size = sizes_[at];
    const Entry sampled = at < exact_ ? 0 : kSampledFlag;
    uint64_t pages = size.pages, chunks = size.chunks;
    uint32_t time = size.fresh;
    const bool hybrid = !others_.empty();
    for (; pages > most && time < now_; ++time) {
        const Entry entry = entries_[time];
        if (entry == 0 || (entry & sampled) != sampled) continue;
        pages -= hybrid ? pages_in(at, entry, others_[time]) : entry & kPages;
        --chunks;
    }
    size.pages = pages;
    size.chunks = chunks;
    size.fresh = time;
}

// The next chunk of the size with or without its bit; `end` if there is none before it.
uint32_t WhatIf::next(size_t size, uint32_t from, uint32_t end, bool used) const {
    const Entry bit = Entry{1} << (kUsedAt + size), sampled = size < exact_ ? 0 : kSampledFlag;
    const Entry wanted = (used ? bit : 0) | sampled;
    while (from < end && ((entries_[from] & (bit | sampled)) != wanted || entries_[from] == 0)) {
        ++from;
    }
    return from;
}

// What this call has used leaves after all else. False if the size has no chunk.
bool WhatIf::evict(size_t at) {
    Size& size = sizes_[at];
    if (size.room == 0) forget(at);
    for (int i = 0; i < 2 && size.protected_chunks * 5 >= size.chunks * 2 + 5; ++i) {
        demote(at, now_);
    }
    for (const uint32_t end : {begin_, now_}) {
        size.fresh = std::max(size.fresh, next(at, size.fresh, end, false));
        size.demoted = next(at, size.demoted, size.kept, true);
        const bool any_demoted = size.demoted < size.kept;
        uint32_t* leaves = nullptr;
        if (size.fresh < end) {
            const bool older = any_demoted && demoted_at(at, size.demoted) <= size.fresh;
            leaves = older ? &size.demoted : &size.fresh;
        } else if (any_demoted || demote(at, end)) {
            size.demoted = next(at, size.demoted, size.kept, true);
            leaves = &size.demoted;
        }
        if (leaves == nullptr) continue;
        size.pages -= pages_in(at, entries_[*leaves], others(*leaves));
        ++*leaves;
        --size.chunks;
        --size.room;
        return true;
    }
    return false;
}

// What was evicted before the young generation began is forgotten.
void WhatIf::forget(size_t at) {
    Size& size = sizes_[at];
    const double least = kLeastRemembered * (at < exact_ ? 1 : sample_rate());
    size.old_fresh = std::exchange(size.young_fresh, size.fresh);
    size.old_demoted = std::exchange(size.young_demoted, size.demoted);
    size.room = std::max<uint64_t>({size.chunks, static_cast<uint64_t>(least), 1});
}

// The least recently used protected chunk goes back to probation, as the youngest there. False if
// none was used before `end`.
bool WhatIf::demote(size_t at, uint32_t end) {
    Size& size = sizes_[at];
    const uint32_t oldest = next(at, size.kept, end, true);
    if (oldest >= end) return false;
    size.kept = oldest;
    const auto gap = static_cast<uint32_t>(size.chunks / 64);
    if (size.marks.empty() || now_ >= size.marks.back().now + gap) {
        size.marks.push_back({size.kept, now_});
    }
    ++size.kept;
    --size.protected_chunks;
    return true;
}

// When a demoted chunk was: between two marks.
uint32_t WhatIf::demoted_at(size_t at, uint32_t time) {
    Size& size = sizes_[at];
    while (size.marks.size() > 1 && size.marks[1].from <= size.demoted) size.marks.pop_front();
    const Mark from = size.marks.front();
    const Mark to = size.marks.size() > 1 ? size.marks[1] : Mark{size.kept, now_};
    if (time <= from.from || to.from <= from.from) return from.now;
    const double part = double(time - from.from) / double(to.from - from.from);
    return from.now + static_cast<uint32_t>(part * double(to.now - from.now));
}

}  // namespace kvserver
