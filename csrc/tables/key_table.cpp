#include "tables/key_table.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "tables/fold.h"

namespace kvserver {

KeyTable::KeyTable(uint64_t seed) : seed_(seed), factor_(fold(seed ^ kGolden, kGolden) | 1) {}

uint64_t KeyTable::place(const char* key) const {
    std::array<uint64_t, kKeyBytes / sizeof(uint64_t)> words;
    std::memcpy(words.data(), key, kKeyBytes);
    uint64_t bits = seed_;
    for (const uint64_t word : words) bits = fold(bits ^ word, factor_);
    return fold(bits ^ seed_, kGolden);
}

// The slot of the key, or the empty one where it would be. REQUIRES: the part has lines.
size_t KeyTable::find(const Part& part, const char* key, uint64_t place) {
    size_t at = part.home(place);
    for (;; at = part.next(at)) {
        const Slot& slot = part.slot(at);
        if (slot.key == 0) return at;
        if ((slot.key & kTag) == tag(place) && std::memcmp(slot.entry().key, key, kKeyBytes) == 0) {
            return at;
        }
    }
}

// Lines, keys and values of all keys are prefetched before they are read.
void KeyTable::find(const char* keys, size_t count, void** values) const {
    if (size_ == 0) {
        std::fill_n(values, count, nullptr);
        return;
    }
    std::array<uint64_t, kMostAtOnce> places;
    for (size_t i = 0; i < count; ++i) {
        places[i] = place(keys + i * kKeyBytes);
        const Part& part = parts_[part_of(places[i])];
        if (!part.lines.empty()) __builtin_prefetch(&part.slot(part.home(places[i])));
    }
    for (size_t i = 0; i < count; ++i) {
        const Part& part = parts_[part_of(places[i])];
        if (part.lines.empty()) continue;
        for (const Slot& slot : part.lines[part.home(places[i]) / kLineSlots]) {
            if (slot.key == 0 || (slot.key & kTag) != tag(places[i])) continue;
            __builtin_prefetch(slot.entry().key);
            __builtin_prefetch(slot.value, 1);
            break;
        }
    }
    for (size_t i = 0; i < count; ++i) {
        const Part& part = parts_[part_of(places[i])];
        values[i] = part.lines.empty()
                        ? nullptr
                        : part.slot(find(part, keys + i * kKeyBytes, places[i])).value;
    }
}

void KeyTable::add(const Entry& entry) {
    if (!add_absent(entry)) throw std::invalid_argument("the key is in the table");
}

bool KeyTable::add_absent(const Entry& entry) {
    const auto address = reinterpret_cast<uintptr_t>(entry.key);
    if ((address & kTag) != 0) throw std::invalid_argument("a key that is not at a multiple of 16");
    if (parts_.empty()) parts_.resize(kParts);
    const uint64_t where = place(entry.key);
    Part& part = parts_[part_of(where)];
    if ((part.used + 1) * 4 > part.size() * 3) {
        rebuild(part, part.lines.size() + std::max<size_t>(1, part.lines.size() / 4));
    }
    Slot& slot = part.slot(find(part, entry.key, where));
    if (slot.key != 0) return false;
    slot = {address | tag(where), entry.value};
    ++part.used;
    ++size_;
    return true;
}

KeyTable::Entry KeyTable::remove(const char* key) {
    if (size_ == 0) return {};
    const uint64_t where = place(key);
    Part& part = parts_[part_of(where)];
    return part.lines.empty() ? Entry{} : erase(part, find(part, key, where));
}

KeyTable::Entry KeyTable::pop() {
    if (size_ == 0) return {};
    while (parts_[popped_].used == 0) popped_ = (popped_ + 1) % kParts;
    Part& part = parts_[popped_];
    popped_at_ = std::min(popped_at_, part.size() - 1);
    while (part.slot(popped_at_).key == 0) popped_at_ = (popped_at_ ? popped_at_ : part.size()) - 1;
    return erase(part, popped_at_);
}

void KeyTable::rebuild(Part& part, size_t lines) {
    std::vector<Line> old(lines);
    old.swap(part.lines);
    for (size_t i = 0; i < old.size(); ++i) {
        for (const Slot& next : old[std::min(i + 2, old.size() - 1)]) {
            __builtin_prefetch(next.entry().key);
        }
        for (const Slot& slot : old[i]) {
            if (slot.key == 0) continue;
            const char* key = slot.entry().key;
            part.slot(find(part, key, place(key))) = slot;
        }
    }
}

// Those behind it move up as far as their homes allow, so that every search still ends at an empty
// slot only where its key is not there.
KeyTable::Entry KeyTable::erase(Part& part, size_t at) {
    if (part.slot(at).key == 0) return {};
    const Entry erased = part.slot(at).entry();
    --part.used;
    --size_;
    const size_t slots = part.size();
    const auto distance = [&](size_t from, size_t to) {
        return to >= from ? to - from : to + slots - from;
    };
    for (size_t next = part.next(at); part.slot(next).key != 0; next = part.next(next)) {
        const size_t home = part.home(place(part.slot(next).entry().key));
        if (distance(home, next) >= distance(at, next)) {
            part.slot(at) = part.slot(next);
            at = next;
        }
    }
    part.slot(at) = {};
    if (part.used * 4 < slots) rebuild(part, (part.used * 5 / 3 + kLineSlots - 1) / kLineSlots);
    return erased;
}

}  // namespace kvserver
