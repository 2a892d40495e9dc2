// What a use costs the sizes: evictions, and space for further chunks.
#include <algorithm>
#include <bit>
#include <utility>

#include "tables/what_if.h"

namespace kvserver {

// ---- evictions ------------------------------------------------------------------------------

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
    for (; pages > most && time < now_; ++time) {
        const Entry entry = entries_[time];
        if (entry == 0 || (entry & sampled) != sampled) continue;
        pages -= entry & kPages;
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
        size.pages -= entries_[(*leaves)++] & kPages;
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

// ---- space ----------------------------------------------------------------------------------

void WhatIf::reserve(size_t chunks) {
    while (size_ + chunks > slots_.size() / 4 * 3) {
        if (slots_.size() < kMostSlots) {
            grow();
        } else {
            thin_out();
        }
    }
    if (now_ + chunks > entries_.size()) renumber();
}

void WhatIf::grow() {
    rebuild(slots_.size() * 2);
    renumber();
    entries_.resize(slots_.size() / 2 * 3);
}

// Slots without a chunk are dropped.
void WhatIf::rebuild(size_t slots) {
    std::vector<Slot> old(slots);
    old.swap(slots_);
    size_ = 0;
    for (const Slot& slot : old) {
        if (slot.used == 0) continue;
        const size_t at = find(slot.hash);
        slots_[at] = slot;
        entries_[slot.used] = (entries_[slot.used] & kState) | Entry{at} << kSlotAt;
        ++size_;
    }
}

// The times keep their order and become 1, 2, 3 ...
void WhatIf::renumber() {
    std::vector<uint32_t*> times{&begin_};
    for (Size& size : sizes_) {
        for (uint32_t* time : {&size.fresh, &size.demoted, &size.kept, &size.old_fresh,
                               &size.old_demoted, &size.young_fresh, &size.young_demoted}) {
            times.push_back(time);
        }
        for (Mark& mark : size.marks) {
            times.push_back(&mark.from);
            times.push_back(&mark.now);
        }
    }
    std::ranges::sort(times, {}, [](const uint32_t* time) { return *time; });
    auto next = times.begin();
    uint32_t to = 1;
    for (uint32_t from = 1; from <= now_; ++from) {
        while (next != times.end() && **next <= from) **next++ = to;
        if (from == now_ || entries_[from] == 0) continue;
        const Entry entry = std::exchange(entries_[from], 0);
        entries_[to] = entry;
        slots_[entry >> kSlotAt].used = to++;
    }
    now_ = to;
}

// Keep what the exact sizes have or remember, the youngest, and of the others those below a
// threshold that leaves space for others.
void WhatIf::thin_out() {
    renumber();
    const uint32_t recent = now_ > kRecent ? now_ - kRecent : 1;
    std::array<size_t, kUnlimited> needed{};  // by the smallest size that needs a chunk
    const auto needs = [&](uint32_t time) -> unsigned {
        const Place where = place(time, entries_[time]);
        return where.has | (protects_ ? where.knows : 0);
    };
    for (uint32_t time = 1; time < recent; ++time) {
        const auto smallest = static_cast<size_t>(std::countr_zero(needs(time)));
        if (smallest < kUnlimited) ++needed[smallest];
    }
    size_t whole = kRecent, exact = 0;
    while (exact < exact_ && whole + needed[exact] <= kExact) whole += needed[exact++];
    exact_ = exact;
    const auto is_whole = [&](uint32_t time) {
        return time >= recent || (needs(time) & ((1U << exact_) - 1)) != 0;
    };
    std::vector<uint64_t> older;
    for (const Slot& slot : slots_) {
        if (slot.used == 0) continue;
        Entry& entry = entries_[slot.used];
        entry = is_whole(slot.used) ? entry | kWhole : entry & ~kWhole;
        if ((entry & kWhole) == 0 && slot.hash < threshold_) older.push_back(slot.hash);
    }
    if (older.size() > kSampled) {
        const auto last = older.begin() + kSampled;
        std::nth_element(older.begin(), last, older.end());
        threshold_ = *last;
    }
    std::vector<uint64_t>().swap(older);
    for (Slot& slot : slots_) {
        if (slot.used == 0) continue;
        Entry& entry = entries_[slot.used];
        if (slot.hash < threshold_) {
            entry |= kSampledFlag;
            continue;
        }
        entry &= ~kSampledFlag;
        if ((entry & kWhole) != 0) continue;
        entry = 0;
        slot.used = 0;
    }
    rebuild(slots_.size());
    renumber();
    count_again();
}

void WhatIf::count_again() {
    for (Size& size : sizes_) size.pages = size.chunks = size.protected_chunks = 0;
    for (uint32_t time = 1; time < now_; ++time) {
        const Entry entry = entries_[time];
        const Place where = place(time, entry);
        const uint8_t counted = counted_in(entry);
        for (uint8_t left = where.has & counted; left != 0; left &= left - 1) {
            Size& size = sizes_[std::countr_zero(left)];
            ++size.chunks;
            size.pages += entry & kPages;
            size.protected_chunks += where.keeps >> std::countr_zero(left) & 1;
        }
    }
}

}  // namespace kvserver
