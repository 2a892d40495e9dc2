// Space for further chunks: more slots, fewer chunks, new times.
#include <algorithm>
#include <bit>
#include <utility>

#include "tables/what_if.h"

namespace kvserver {

void WhatIf::reserve(size_t chunks) {
    while (size_ + chunks > slots_.size() / 4 * 3) {
        if (slots_.size() < kMostSlots) {
            grow();
        } else {
            thin_out();
        }
    }
    if (has_space(chunks)) return;
    close_gaps();
    if (now_ > size_ + size_ / 4 || strips_left() < strips_.size() / 4) renumber();
}

void WhatIf::grow() {
    rebuild(slots_.size() * 2);
    renumber();
    entries_.resize(entries_of(slots_.size()));
    strip_of_.resize(entries_.size());
    if (!others_.empty()) others_.resize(entries_.size());
    strips_.resize(strips_of(slots_.size()));
}

// Slots without a chunk are dropped.
void WhatIf::rebuild(size_t slots) {
    std::vector<Slot> old(slots);
    old.swap(slots_);
    size_ = 0;
    for (const Slot& slot : old) {
        if (slot.spot == 0) continue;
        const size_t at = find(slot.hash);
        slots_[at] = slot;
        Entry& entry = entries_[time(slot)];
        entry = (entry & kState) | Entry{at} << kSlotAt;
        ++size_;
    }
}

// All times but those of chunks, the oldest one first.
std::vector<uint32_t*> WhatIf::limits() {
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
    return times;
}

void WhatIf::change_time(uint32_t from, uint32_t to) {
    entries_[to] = std::exchange(entries_[from], 0);
    if (!others_.empty()) others_[to] = others_[from];
}

// Strips follow each other without times between them, and keep their spots: no slot is touched.
void WhatIf::close_gaps() {
    const std::vector<uint32_t*> times = limits();
    auto next = times.begin();
    uint32_t to = 1, shift = 0;
    uint16_t last = 0;
    for (uint32_t from = 1; from <= now_; ++from) {
        const bool used = from < now_ && entries_[from] != 0;
        if (used && std::exchange(last, strip_of_[from]) != strip_of_[from]) {
            shift = from - to;
            strips_[last].begin -= shift;
        }
        if (used) to = from - shift;
        while (next != times.end() && **next <= from) **next++ = to;
        if (!used) continue;
        change_time(from, to);
        strip_of_[to++] = last;
    }
    now_ = to;
    open_end_ = 0;
}

// The times keep their order and become 1, 2, 3 ...; strip 1 begins at time 0, the next one behind
// it.
void WhatIf::renumber() {
    const std::vector<uint32_t*> times = limits();
    // Of 64 times a bit for each that is used, and what the first one of these becomes.
    struct Times {
        uint64_t used = 0;
        uint32_t to = 0;
    };
    std::vector<Times> renumbered(entries_.size() / 64 + 1);
    auto next = times.begin();
    uint32_t to = 1;
    for (uint32_t from = 1; from <= now_; ++from) {
        while (next != times.end() && **next <= from) **next++ = to;
        if (from == now_ || entries_[from] == 0) continue;
        Times& around = renumbered[from / 64];
        if (around.used == 0) around.to = to;
        around.used |= uint64_t{1} << from % 64;
        change_time(from, to++);
    }
    now_ = to;
    for (Slot& slot : slots_) {  // in the order of memory
        if (slot.spot == 0) continue;
        const uint32_t from = time(slot);
        const Times& around = renumbered[from / 64];
        const uint64_t older = around.used & ((uint64_t{1} << from % 64) - 1);
        slot.spot = kStrip + around.to + static_cast<uint32_t>(std::popcount(older));
    }
    next_strip_ = 1;
    for (uint32_t begin = 0; begin < now_; begin += kStrip) {
        const uint32_t end = std::min<uint32_t>(begin + kStrip, now_);
        std::fill(strip_of_.begin() + begin, strip_of_.begin() + end, next_strip_);
        strips_[next_strip_++] = {begin, end - std::max<uint32_t>(1, begin)};
    }
    open_strip_ = open_end_ = 0;
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
        if (slot.spot == 0) continue;
        Entry& entry = entries_[time(slot)];
        entry = is_whole(time(slot)) ? entry | kWhole : entry & ~kWhole;
        if ((entry & kWhole) == 0 && slot.hash < threshold_) older.push_back(slot.hash);
    }
    if (older.size() > kSampled) {
        const auto last = older.begin() + kSampled;
        std::nth_element(older.begin(), last, older.end());
        threshold_ = *last;
    }
    std::vector<uint64_t>().swap(older);
    for (Slot& slot : slots_) {
        if (slot.spot == 0) continue;
        Entry& entry = entries_[time(slot)];
        if (slot.hash < threshold_) {
            entry |= kSampledFlag;
            continue;
        }
        entry &= ~kSampledFlag;
        if ((entry & kWhole) != 0) continue;
        entry = 0;
        slot.spot = 0;
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
            size.pages += pages_in(std::countr_zero(left), entry, others(time));
            size.protected_chunks += where.keeps >> std::countr_zero(left) & 1;
        }
    }
}

}  // namespace kvserver
