// Uses: what becomes the youngest, and what it is listed with.
#include <algorithm>
#include <bit>

#include "tables/what_if.h"

namespace kvserver {

void WhatIf::use(uint64_t salt, std::string_view raw, const HitRules& rules, const Hits& hits,
                 size_t found, uint32_t pages) {
    const Keys keys = keys_of(salt, raw);
    const size_t listed = pages == 0 || rules.full == 0 ? 0 : std::min(found, keys.count);
    const size_t hit = *std::ranges::max_element(hits.boundary);
    begin_ = now_;
    adds_others_ = false;
    if (!others_.empty()) find_stores(keys.count, rules, hits);
    for (size_t end = std::min(keys.count, std::max(found, hit)); end > 0;) {
        const size_t first = (end - 1) / kBlock * kBlock;
        use_block(keys, first, end, hits, listed, listed != 0 ? rules.full : 0, pages);
        end = first;
    }
}

void WhatIf::add(uint64_t salt, std::string_view raw, const HitRules& rules, uint16_t bit,
                 uint32_t pages) {
    const Keys keys = keys_of(salt, raw);
    begin_ = now_;
    adds_others_ = (bit & rules.full) == 0;
    if (adds_others_) others_.resize(entries_.size());
    if (!others_.empty()) stores_others_.assign(keys.count, adds_others_ ? kAllSizes : 0);
    for (size_t end = keys.count; end > 0;) {
        const size_t first = (end - 1) / kBlock * kBlock;
        use_block(keys, first, end, {}, keys.count, bit, std::max<uint32_t>(1, pages));
        end = first;
    }
}

void WhatIf::remove(uint64_t salt, std::string_view raw, uint16_t bit, uint32_t pages) {
    const Keys keys = keys_of(salt, raw);
    for (size_t at = 0; at < keys.count; ++at) {
        const uint32_t time = time_of(keys, at);
        Entry& entry = entries_[time];
        if (time == 0 || (entry & Entry{bit} << kGroupsAt) == 0) continue;
        const Others others = this->others(time);
        const uint64_t fewer = std::min<uint64_t>({pages, others.pages, (entry & kPages) - 1});
        const uint8_t of = place(time, entry).has & counted_in(entry) & ~others.lacking;
        for (size_t size = 0; size < kUnlimited; ++size) {
            if ((of >> size & 1) != 0) sizes_[size].pages -= fewer;
        }
        if (fewer != 0) others_[time].pages -= fewer;
        entry = (entry - fewer) & ~(Entry{bit} << kGroupsAt);
    }
}

// Which chunks' objects of other groups each size's engine would keep, by the rule of
// adapters/common/boundaries.py.
void WhatIf::find_stores(size_t chunks, const HitRules& rules, const Hits& hits) {
    stores_others_.assign(chunks, 0);
    const auto keep = [&](const GroupNeed& need, size_t boundary, uint8_t sizes, size_t done) {
        for (size_t i = std::max(done, rules.first_needed(need, boundary)); i < boundary; ++i) {
            stores_others_[i] |= sizes;
        }
    };
    for (const GroupNeed& need : rules.others) {
        keep(need, chunks, kAllSizes, 0);
        for (size_t size = 0; size < kUnlimited; ++size) {
            if (hits.full[size] > hits.boundary[size]) keep(need, hits.full[size], 1 << size, 0);
        }
        size_t done = 0;
        for (size_t at = rules.interval; at != 0 && at <= chunks; at += rules.interval) {
            keep(need, at, kAllSizes, done);
            done = at;
        }
    }
}

// Use the chunks [first, end) of a prompt, the first one last. Those before `listed` have the
// groups `bits`, which need `pages`; of the others, and without bits, only what is listed is used.
void WhatIf::use_block(const Keys& keys, size_t first, size_t end, const Hits& hits, size_t listed,
                       uint16_t bits, uint32_t pages) {
    reserve(end - first);
    stretches_.clear();
    const Entry groups = Entry{bits} << kGroupsAt;
    for (size_t at = first; at < end;) {
        const uint32_t time = time_of(keys, at);
        const size_t length = time == 0 ? 1 : stretch(keys, at, time, end);
        stretches_.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(length), time});
        for (size_t i = 0; time != 0 && bits != 0 && i < length && at + i < listed; ++i) {
            const auto used = static_cast<uint32_t>(time - i);
            if ((entries_[used] & groups) != groups) add_pages(used, bits, pages);
        }
        at += length;
    }
    if (protects_) returning(hits);
    for (size_t i = stretches_.size(); i-- > 0;) {
        const Stretch& stretch = stretches_[i];
        if (stretch.time != 0) {
            move(stretch, hits);
        } else if (stretch.first < listed && bits != 0) {
            list(keys.hash(stretch.first), bits, pages);
        }
    }
    shrink();
}

void WhatIf::add_pages(uint32_t time, uint16_t bits, uint32_t pages) {
    Entry& entry = entries_[time];
    if (entry == 0) return;  // twice in a prompt
    const uint64_t more = std::min<uint64_t>(pages, kPages - (entry & kPages));
    const uint8_t lacking = adds_others_ ? others_[time].lacking : 0;
    const uint8_t of = place(time, entry).has & counted_in(entry) & ~lacking;
    for (size_t size = 0; size < kUnlimited; ++size) {
        if ((of >> size & 1) != 0) sizes_[size].pages += more;
    }
    if (adds_others_) others_[time].pages += more;
    entry = (entry + more) | Entry{bits} << kGroupsAt;
}

// A prompt that is stored again soon after its eviction returns as one that is used: each size's
// chunks behind its hit, up to the first one that is new to it.
void WhatIf::returning(const Hits& hits) {
    const Stretch& last = stretches_.back();
    returning_.fill(last.first + last.length);
    uint8_t going = kOnlyUnlimited - 1;
    for (const Stretch& stretch : stretches_) {
        Entry state = 0;
        Place where;
        for (uint32_t i = 0; i < stretch.length && going != 0; ++i) {
            const uint32_t used = stretch.time - (stretch.time == 0 ? 0 : i);
            const Entry entry = entries_[used];
            if (i == 0 || (entry & kState) != state || used < where.floor) {
                state = entry & kState;
                where = stretch.time == 0 ? Place{} : place(used, entry);
            }
            for (uint8_t fresh = going & ~(where.has | where.knows); fresh != 0;
                 fresh &= fresh - 1) {
                const auto size = std::countr_zero(fresh);
                if (stretch.first + i < hits.boundary[size]) continue;
                returning_[size] = stretch.first + i;
                going &= ~(1 << size);
            }
        }
    }
}

// Its chunks become the youngest, the first one last. Those with an equal state in the same place
// are counted together.
void WhatIf::move(const Stretch& stretch, const Hits& hits) {
    Entry state = 0, used = 0;
    Place where;
    Others was{}, is{};
    uint8_t stores = 0;
    uint32_t floor = 0;
    uint64_t run = 0;
    const auto before = [&](uint32_t at, const auto& bounds) {
        uint8_t sizes = 0;
        for (size_t size = 0; size < kUnlimited; ++size) {
            if (at < bounds[size]) sizes |= 1 << size;
            if (at >= bounds[size]) floor = std::max(floor, bounds[size]);
        }
        return sizes;
    };
    const bool hybrid = !others_.empty();
    uint32_t in_strip = 0;  // the next ones that move with their strip
    for (uint32_t i = stretch.length; i-- > 0;) {
        const uint32_t time = stretch.time - i, at = stretch.first + i;
        const Entry entry = entries_[time];
        if (entry == 0) continue;  // twice in a prompt
        if (run == 0 || (entry & kState) != state || time >= where.ceiling || at < floor ||
            (hybrid && (others_[time] != was || stores_others_[at] != stores))) {
            count_run(state, where, used, was, is, run);
            run = 0;
            state = entry & kState;
            where = place(time, entry);
            was = is = others(time);
            stores = hybrid ? stores_others_[at] : 0;
            uint8_t found =
                0;  // by sizes that, as L1, evict nothing of a prompt for the rest of it
            if (protects_) {
                floor = 0;
                found = before(at, hits.boundary);
                const uint8_t back = before(at, returning_) & ~where.has;
                used = Entry{uint8_t(where.keeps | found | back)} << kUsedAt & kUsed;
            }
            is.lacking = (was.lacking | ~(where.has | found)) & (kOnlyUnlimited - 1) & ~stores;
        }
        ++run;
        if (in_strip == 0) in_strip = move_strip(time, i + 1);
        --in_strip;
        entries_[time] = 0;
        if (hybrid) others_[now_] = is;
        entries_[now_++] = (entry & ~kUsed) | used | kWhole;
    }
    count_run(state, where, used, was, is, run);
}

// The chunk at this time and those of its strip are used now, if these are all it has and among the
// `most` from this time on; else this chunk gets a spot in another strip. Returns how many they
// are.
uint32_t WhatIf::move_strip(uint32_t time, uint32_t most) {
    const uint16_t number = strip_of_[time];
    Strip& strip = strips_[number];
    uint32_t chunks = 1;
    while (chunks < most && strip_of_[time + chunks] == number && entries_[time + chunks] != 0) {
        ++chunks;
    }
    if (chunks == strip.chunks) {
        strip.begin += now_ - time;
        std::fill_n(strip_of_.begin() + now_, chunks, number);
        return chunks;
    }
    --strip.chunks;  // one at least is left: the last one takes the strip along
    slots_[entries_[time] >> kSlotAt].spot = next_spot();
    return 1;
}

// For a chunk that is used now.
uint32_t WhatIf::next_spot() {
    if (now_ != open_end_ || now_ - strips_[open_strip_].begin >= kStrip) {
        open_strip_ = next_strip_++;
        strips_[open_strip_] = {now_, 0};
    }
    open_end_ = now_ + 1;
    strip_of_[now_] = static_cast<uint16_t>(open_strip_);
    Strip& strip = strips_[open_strip_];
    ++strip.chunks;
    return open_strip_ * kStrip + now_ - strip.begin;
}

// Chunks of an equal state were moved or listed from where they were, and have the bits `used` now.
void WhatIf::count_run(Entry state, const Place& where, Entry used, Others was, Others is,
                       uint64_t chunks) {
    const auto bits = static_cast<uint8_t>(used >> kUsedAt);
    const auto lacked = static_cast<uint8_t>(was.lacking & ~is.lacking);
    const uint8_t of = counted_in(state) & (~where.has | (bits & ~where.keeps) | lacked);
    for (uint8_t left = chunks == 0 ? 0 : of; left != 0; left &= left - 1) {
        const auto i = std::countr_zero(left);
        Size& size = sizes_[i];
        if ((where.has >> i & 1) == 0) {
            size.chunks += chunks;
            size.pages += chunks * pages_in(i, state, is);
        } else if ((lacked >> i & 1) != 0) {
            size.pages += chunks * is.pages;
        }
        if ((bits & ~where.keeps) >> i & 1) size.protected_chunks += chunks;
    }
}

void WhatIf::list(uint64_t hash, uint16_t bits, uint32_t pages) {
    const size_t at = find(hash);
    if (slots_[at].spot != 0) return;  // twice in a prompt
    const Entry sampled = hash < threshold_ ? kSampledFlag : 0;
    const Entry state =
        std::min<uint64_t>(pages, kPages) | sampled | kWhole | Entry{bits} << kGroupsAt;
    entries_[now_] = state | Entry{at} << kSlotAt;
    slots_[at] = {hash, next_spot()};
    Others others{kOnlyUnlimited - 1, 0};
    if (adds_others_) others = {0, static_cast<uint32_t>(state & kPages)};
    if (!others_.empty()) others_[now_] = others;
    ++now_;
    ++size_;
    count_run(state, {}, 0, others, others, 1);
}

}  // namespace kvserver
