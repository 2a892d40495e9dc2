#include "tables/prefix_index.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "tables/fold.h"

namespace kvserver {

namespace {

constexpr size_t kFirstLines = 2;
constexpr size_t kMostHashBytes = 32;
constexpr size_t kAgainBytes = 64;  // an entry of unordered_map and its share of the buckets

size_t count_of(std::string_view hashes, size_t hash_bytes) {
    if (hash_bytes < sizeof(uint64_t) || hash_bytes > kMostHashBytes ||
        hashes.size() % hash_bytes != 0) {
        throw std::invalid_argument(std::to_string(hashes.size()) +
                                    " bytes are no whole hashes of " + std::to_string(hash_bytes) +
                                    " bytes, 8 to 32 each");
    }
    return hashes.size() / hash_bytes;
}

uint64_t read(const char* at, size_t hash_bytes) {
    uint64_t hash;
    std::memcpy(&hash, at + hash_bytes - sizeof(hash), sizeof(hash));
    return hash;
}

// How far a reader has come with the blocks that were looked up.
struct Walk {
    uint64_t l0, l1, l2;  // the bits of its owners
    uint64_t chunk_blocks;
    uint64_t chunk_end;  // of the chunk that match.best was in last
    PrefixIndex::Match match = {};
    bool ended = false;
};

uint64_t advance_chunks(uint64_t from, uint64_t chunk_blocks, uint64_t bits,
                        const std::vector<uint64_t>& owners) {
    while (from + chunk_blocks <= owners.size() && (owners[from + chunk_blocks - 1] & bits) != 0) {
        from += chunk_blocks;
    }
    return from;
}

// A block counts if it is in L0, or its chunk is in L1 or L2.
void advance(Walk& walk, const std::vector<uint64_t>& owners, size_t count) {
    PrefixIndex::Match& match = walk.match;
    while (match.l0 < owners.size() && (owners[match.l0] & walk.l0) != 0) ++match.l0;
    match.l1 = advance_chunks(match.l1, walk.chunk_blocks, walk.l1, owners);
    match.l2 = advance_chunks(match.l2, walk.chunk_blocks, walk.l2, owners);
    for (;;) {
        while (match.best < owners.size() && (owners[match.best] & walk.l0) != 0) ++match.best;
        if (match.best == owners.size()) return;
        while (walk.chunk_end <= match.best) walk.chunk_end += walk.chunk_blocks;
        if (walk.chunk_end > owners.size()) {
            walk.ended = walk.chunk_end > count || (walk.l1 | walk.l2) == 0;
            return;
        }
        walk.ended = (owners[walk.chunk_end - 1] & (walk.l1 | walk.l2)) == 0;
        if (walk.ended) return;
        match.best = walk.chunk_end;
    }
}

}  // namespace

PrefixIndex::PrefixIndex(uint64_t seed, size_t most_bytes)
    : seed_(seed),
      factor_(fold(seed ^ kGolden, kGolden) | 1),
      most_bytes_(most_bytes),
      parts_(kParts) {
    for (Part& part : parts_) {
        part.lines.resize(kFirstLines);
        part.again = Times(0, HashAgain{factor_});
    }
    bytes_ = sizeof(*this) + kParts * (sizeof(Part) + kFirstLines * sizeof(Line));
}

size_t PrefixIndex::HashAgain::operator()(const Again& again) const {
    return fold(again.hash ^ seed, kGolden ^ static_cast<uint64_t>(again.owner));
}

uint64_t PrefixIndex::place(uint64_t hash) const {
    return fold(fold(hash ^ seed_, factor_) ^ seed_, kGolden);
}

// The slot of the hash, or the empty one where it would be.
size_t PrefixIndex::find(const Part& part, uint64_t hash, uint64_t place) const {
    size_t at = part.home(place) * kLineSlots;
    while (part.slot(at).owners != 0 && part.slot(at).hash != hash) at = part.next(at);
    return at;
}

void PrefixIndex::check(int owner) const {
    if (owner < 0 || owner >= kMostOwners || (open_ & bit(owner)) == 0) {
        throw std::invalid_argument("no owner " + std::to_string(owner));
    }
}

// ---- owners ----------------------------------------------------------------------------------

int PrefixIndex::add_owner() {
    const std::lock_guard lock(mutex_);
    for (int owner = 0; owner < kMostOwners; ++owner) {
        if ((open_ & bit(owner)) != 0) continue;
        open_ |= bit(owner);
        seen_ |= bit(owner);
        return owner;
    }
    return -1;
}

void PrefixIndex::clear_owner(int owner) {
    sweep(owner);
    const std::lock_guard lock(mutex_);
    seen_ |= bit(owner);
}

void PrefixIndex::remove_owner(int owner) {
    sweep(owner);
    const std::lock_guard lock(mutex_);
    open_ &= ~bit(owner);
}

// Takes the owner out of all parts, one after the other; matches do not see it meanwhile.
void PrefixIndex::sweep(int owner) {
    {
        const std::lock_guard lock(mutex_);
        check(owner);
        seen_ &= ~bit(owner);
        if (owned_[owner] == 0) return;
    }
    for (Part& part : parts_) {
        const std::lock_guard lock(mutex_);
        for (Line& line : part.lines) {
            for (Slot& slot : line.slots) {
                const bool only = slot.owners == bit(owner);
                slot.owners &= ~bit(owner);
                part.used -= only;
                size_ -= only;
            }
        }
        bytes_ -= kAgainBytes * std::erase_if(part.again, [&](const auto& entry) {
                      return entry.first.owner == owner;
                  });
        const size_t lines = (part.used * 5 / 3 + kLineSlots - 1) / kLineSlots;
        rebuild(part, std::clamp(lines, kFirstLines, part.lines.size()));
    }
    const std::lock_guard lock(mutex_);
    owned_[owner] = 0;
}

// ---- blocks -----------------------------------------------------------------------------------

size_t PrefixIndex::add_blocks(int owner, std::string_view hashes, size_t hash_bytes) {
    const size_t count = count_of(hashes, hash_bytes);
    size_t refused = 0;
    for (size_t first = 0; first < count; first += kSlice) {
        const std::lock_guard lock(mutex_);
        check(owner);
        for (size_t i = first; i < std::min(count, first + kSlice); ++i) {
            const bool added = add_one(owner, read(hashes.data() + i * hash_bytes, hash_bytes));
            refused += !added;
            refused_ += !added;
        }
    }
    return refused;
}

bool PrefixIndex::add_one(int owner, uint64_t hash) {
    const uint64_t where = place(hash);
    Part& part = parts_[part_of(where)];
    size_t at = find(part, hash, where);
    if (part.slot(at).owners == 0) {
        if ((part.used + 1) * 4 > part.size() * 3) {
            const size_t more = std::max<size_t>(1, part.lines.size() / 4);
            if (!room(more * sizeof(Line))) return false;
            rebuild(part, part.lines.size() + more);
            at = find(part, hash, where);
        }
        part.slot(at).hash = hash;
        ++part.used;
        ++size_;
    } else if ((part.slot(at).owners & bit(owner)) != 0) {
        const auto found = part.again.find({hash, owner});
        if (found != part.again.end()) {
            found->second += found->second < UINT32_MAX;
            return true;
        }
        if (!room(kAgainBytes)) return false;
        part.again.emplace(Again{hash, owner}, 1);
        bytes_ += kAgainBytes;
        return true;
    }
    part.slot(at).owners |= bit(owner);
    ++owned_[owner];
    return true;
}

size_t PrefixIndex::remove_blocks(int owner, std::string_view hashes, size_t hash_bytes) {
    const size_t count = count_of(hashes, hash_bytes);
    size_t unknown = 0;
    for (size_t first = 0; first < count; first += kSlice) {
        const std::lock_guard lock(mutex_);
        check(owner);
        for (size_t i = first; i < std::min(count, first + kSlice); ++i) {
            unknown += !remove_one(owner, read(hashes.data() + i * hash_bytes, hash_bytes));
        }
    }
    return unknown;
}

bool PrefixIndex::remove_one(int owner, uint64_t hash) {
    const uint64_t where = place(hash);
    Part& part = parts_[part_of(where)];
    const size_t at = find(part, hash, where);
    if ((part.slot(at).owners & bit(owner)) == 0) return false;
    const auto again = part.again.find({hash, owner});
    if (again != part.again.end()) {
        if (--again->second == 0) {
            part.again.erase(again);
            bytes_ -= kAgainBytes;
        }
        return true;
    }
    --owned_[owner];
    part.slot(at).owners &= ~bit(owner);
    if (part.slot(at).owners == 0) erase(part, at);
    return true;
}

void PrefixIndex::rebuild(Part& part, size_t lines) {
    bytes_ += (lines - part.lines.size()) * sizeof(Line);
    std::vector<Line> old(lines);
    old.swap(part.lines);
    for (const Line& line : old) {
        for (const Slot& slot : line.slots) {
            if (slot.owners != 0) part.slot(find(part, slot.hash, place(slot.hash))) = slot;
        }
    }
}

// Those behind it move up as far as their homes allow, so that every search still ends at an empty
// slot only where its hash is not there.
void PrefixIndex::erase(Part& part, size_t at) {
    --part.used;
    --size_;
    const size_t slots = part.size();
    const auto distance = [&](size_t from, size_t to) {
        return to >= from ? to - from : to + slots - from;
    };
    for (size_t next = part.next(at); part.slot(next).owners != 0; next = part.next(next)) {
        const size_t home = part.home(place(part.slot(next).hash)) * kLineSlots;
        if (distance(home, next) >= distance(at, next)) {
            part.slot(at) = part.slot(next);
            at = next;
        }
    }
    part.slot(at).owners = 0;
}

// ---- matching ---------------------------------------------------------------------------------

std::vector<PrefixIndex::Match> PrefixIndex::match(std::string_view hashes, size_t hash_bytes,
                                                   const std::vector<Reader>& readers) const {
    const size_t count = count_of(hashes, hash_bytes);
    std::vector<Walk> walks;
    for (const Reader& reader : readers) {
        if (std::max({reader.l0, reader.l1, reader.l2}) >= kMostOwners ||
            reader.chunk_blocks == 0) {
            throw std::invalid_argument("a reader with unknown owners, or chunks of no blocks");
        }
        walks.push_back({bit(reader.l0), bit(reader.l1), bit(reader.l2), reader.chunk_blocks,
                         reader.chunk_blocks});
    }
    std::vector<uint64_t> owners;  // of each block so far: who has it
    owners.reserve(count);
    bool more = !walks.empty();
    while (more && owners.size() < count) {
        const size_t first = owners.size();
        owners.resize(std::min(count, first + kSlice));
        look_up(hashes.data() + first * hash_bytes, hash_bytes, hash_bytes, owners.size() - first,
                &owners[first]);
        more = false;
        for (Walk& walk : walks) {
            if (!walk.ended) advance(walk, owners, count);
            more |= !walk.ended;
        }
    }
    std::vector<Match> found;
    for (const Walk& walk : walks) found.push_back(walk.match);
    return found;
}

std::vector<uint64_t> PrefixIndex::owners_of(std::string_view hashes, size_t hash_bytes,
                                             size_t every) const {
    const size_t count = count_of(hashes, hash_bytes);
    if (every == 0) throw std::invalid_argument("every block of no blocks");
    const size_t stride = every * hash_bytes;
    std::vector<uint64_t> owners(count / every);
    for (size_t first = 0; first < owners.size(); first += kSlice) {
        const char* at = hashes.data() + first * stride + stride - hash_bytes;
        look_up(at, hash_bytes, stride, std::min(kSlice, owners.size() - first), &owners[first]);
    }
    return owners;
}

// All lines are asked of memory first, then read: those where hashes belong, and then those behind
// them, of the few that were not there.
void PrefixIndex::look_up(const char* hashes, size_t hash_bytes, size_t stride, size_t count,
                          uint64_t* owners) const {
    std::array<uint64_t, kSlice> places;
    std::array<const Line*, kSlice> homes;
    std::array<uint8_t, kSlice> further;
    static_assert(kSlice <= 256);
    size_t far = 0;
    for (size_t i = 0; i < count; ++i) places[i] = place(read(hashes + i * stride, hash_bytes));
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
        const Part& part = parts_[part_of(places[i])];
        homes[i] = &part.lines[part.home(places[i])];
        __builtin_prefetch(homes[i]);
    }
    for (size_t i = 0; i < count; ++i) {
        const uint64_t hash = read(hashes + i * stride, hash_bytes);
        uint64_t found = 0;  // an empty slot has nothing to add; a branch could not be foretold
        for (const Slot& slot : homes[i]->slots) {
            found |= slot.owners & (uint64_t{0} - (slot.hash == hash));
        }
        owners[i] = found & seen_;
        further[far] = static_cast<uint8_t>(i);
        const bool goes_on = found == 0 && homes[i]->slots.back().owners != 0;
        __builtin_prefetch(homes[i] + goes_on);
        far += goes_on;
    }
    for (size_t j = 0; j < far; ++j) {
        const size_t i = further[j];
        const Part& part = parts_[part_of(places[i])];
        const uint64_t hash = read(hashes + i * stride, hash_bytes);
        owners[i] = part.slot(find(part, hash, places[i])).owners & seen_;
    }
}

// ---- metrics ----------------------------------------------------------------------------------

size_t PrefixIndex::size() const {
    const std::lock_guard lock(mutex_);
    return size_;
}

size_t PrefixIndex::owned_blocks(int owner) const {
    const std::lock_guard lock(mutex_);
    check(owner);
    return owned_[owner];
}

uint64_t PrefixIndex::refused() const {
    const std::lock_guard lock(mutex_);
    return refused_;
}

size_t PrefixIndex::memory_bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
}

}  // namespace kvserver
