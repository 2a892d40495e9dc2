#include "tables/hash_counts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace kvserver {

namespace {

constexpr size_t kFirstSlots = 64;

size_t count_of(std::string_view hashes, size_t hash_bytes) {
    if (hash_bytes == 0 || hash_bytes > HashCounts::kHashBytes || hashes.size() % hash_bytes != 0) {
        throw std::invalid_argument(std::to_string(hashes.size()) +
                                    " bytes are no whole hashes of " + std::to_string(hash_bytes) +
                                    " bytes, 32 at most");
    }
    return hashes.size() / hash_bytes;
}

// Every bit of the input changes about half of those of the output (the finalizer of MurmurHash3).
uint64_t mix(uint64_t bits) {
    bits = (bits ^ (bits >> 33)) * 0xff51afd7ed558ccdULL;
    bits = (bits ^ (bits >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return bits ^ (bits >> 33);
}

}  // namespace

HashCounts::HashCounts(uint64_t seed) : seed_(seed), mask_(kFirstSlots - 1), slots_(kFirstSlots) {}

HashCounts::Hash HashCounts::read(const char* at, size_t hash_bytes) {
    Hash hash{};
    std::memcpy(hash.data(), at, hash_bytes);
    return hash;
}

size_t HashCounts::home(const Hash& hash) const {
    uint64_t bits = seed_;
    for (const uint64_t word : hash) bits = mix(bits ^ word);
    return bits & mask_;
}

size_t HashCounts::find(const Hash& hash) const {
    size_t at = home(hash);
    while (slots_[at].count != 0 && slots_[at].hash != hash) at = (at + 1) & mask_;
    return at;
}

std::string HashCounts::add(std::string_view hashes, size_t hash_bytes) {
    const size_t count = count_of(hashes, hash_bytes);
    std::string fresh(count, '\0');
    for (size_t i = 0; i < count; ++i) {
        if (!has_room(1)) grow();
        const Hash hash = read(hashes.data() + i * hash_bytes, hash_bytes);
        Slot& slot = slots_[find(hash)];
        if (slot.count++ == 0) {
            slot.hash = hash;
            ++size_;
            fresh[i] = 1;
        }
    }
    return fresh;
}

std::string HashCounts::remove(std::string_view hashes, size_t hash_bytes) {
    const size_t count = count_of(hashes, hash_bytes);
    std::string removed(count, '\0');
    for (size_t i = 0; i < count; ++i) {
        const size_t at = find(read(hashes.data() + i * hash_bytes, hash_bytes));
        if (slots_[at].count == 0) {
            removed[i] = 2;
        } else if (--slots_[at].count == 0) {
            erase(at);
            removed[i] = 1;
        }
    }
    return removed;
}

std::string HashCounts::contains(std::string_view hashes, size_t hash_bytes) const {
    const size_t count = count_of(hashes, hash_bytes);
    std::string present(count, '\0');
    for (size_t i = 0; i < count; ++i) {
        present[i] = slots_[find(read(hashes.data() + i * hash_bytes, hash_bytes))].count != 0;
    }
    return present;
}

std::string HashCounts::slice(size_t& cursor, size_t most) const {
    std::string found;
    for (; cursor < slots_.size() && found.size() < most * kHashBytes; ++cursor) {
        if (slots_[cursor].count == 0) continue;
        found.append(reinterpret_cast<const char*>(slots_[cursor].hash.data()), kHashBytes);
    }
    return found;
}

void HashCounts::grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old) {
        if (slot.count != 0) slots_[find(slot.hash)] = slot;
    }
}

// Those behind it move up as far as their homes allow, so that every search still ends at an empty
// slot only where its hash is not there.
void HashCounts::erase(size_t at) {
    --size_;
    for (size_t next = (at + 1) & mask_; slots_[next].count != 0; next = (next + 1) & mask_) {
        const size_t from_home = (next - home(slots_[next].hash)) & mask_;
        if (from_home >= ((next - at) & mask_)) {
            slots_[at] = slots_[next];
            at = next;
        }
    }
    slots_[at].count = 0;
}

}  // namespace kvserver
