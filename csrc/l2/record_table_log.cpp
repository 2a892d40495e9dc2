// record_table_log.cpp: the journal's entries of the index's changes, and what a start makes of
// them.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "l2/extents.h"
#include "l2/record_table.h"

namespace kvserver {

namespace {

size_t count_of(uint16_t living) { return static_cast<size_t>(std::popcount(living)); }

}  // namespace

// At most: neighbours on both sides of a gap may have one extent less.
uint64_t RecordTable::journal_bytes_of(const Unit& unit) const {
    const size_t runs = count_of(static_cast<uint16_t>(unit.living & ~(unit.living << 1)));
    const size_t extents = unit.several ? unit.several->extents.size() : 0;
    return entry_bytes(spaces_[unit.space].space.ns.size(), std::max<size_t>(extents, 1) + runs - 1,
                       count_of(unit.living));
}

void RecordTable::log_put(Log& log, uint32_t number) const {
    if (!log.on) return;
    const Unit& unit = units_[number];
    const Space& space = spaces_[unit.space].space;
    std::string keys;
    for (uint32_t place = 0; place < unit.records; ++place)
        if ((unit.living >> place & 1) != 0)
            keys.append(nodes_[node_at(unit, place)].key.data(), kKeyBytes);
    JournalEntry entry{true,
                       space.ns,
                       space.generation,
                       space.group,
                       std::string_view(keys).substr(0, kKeyBytes),
                       std::string_view(keys).substr(kKeyBytes),
                       {},
                       unit.meaning,
                       unit.age,
                       living_extents(unit)};
    if (const uint32_t parent = living_ancestor(unit); parent != kNone)
        entry.parent = {nodes_[parent].key.data(), kKeyBytes};
    append_entry(log.pending, log.file_id, log.sequence++, entry);
}

void RecordTable::log_drop(uint32_t at) {
    const Unit& unit = units_[nodes_[at].unit];
    const Space& space = spaces_[unit.space].space;
    const JournalEntry entry{
        false, space.ns, space.generation, space.group, {nodes_[at].key.data(), kKeyBytes},
        {},    {},       unit.meaning,     unit.age,    {}};
    for (Log* log : {&log_, &next_})
        if (log->on) append_entry(log->pending, log->file_id, log->sequence++, entry);
}

void RecordTable::begin_log(uint64_t file_id, uint64_t sequence) {
    log_ = {true, file_id, sequence, {}};
}

void RecordTable::begin_next_log(uint64_t file_id) {
    next_ = {true, file_id, 0, {}};
    filled_to_ = 0;
}

// A record that changes meanwhile gets its entries in order, here before or after its put.
bool RecordTable::fill_next_log(size_t most) {
    for (size_t looked; most != 0 && filled_to_ < units_.size(); most -= std::min(most, looked)) {
        const auto number = static_cast<uint32_t>(filled_to_++);
        const Unit& unit = units_[number];
        const bool there = unit.space != kNone && !spaces_[unit.space].dead;
        if (there) log_put(next_, number);
        looked = there ? count_of(unit.living) : 1;
        steps_ += looked;
    }
    return filled_to_ >= units_.size();
}

void RecordTable::switch_logs() { log_ = std::exchange(next_, {}); }

std::pair<size_t, uint64_t> RecordTable::replay(std::string_view data, uint64_t file_id,
                                                uint64_t sequence) {
    size_t done = 0;
    JournalEntry entry;
    while (const size_t bytes = read_entry(data.substr(done), file_id, sequence, entry)) {
        done += bytes;
        ++sequence;
        const SpaceName space{entry.ns, entry.generation, entry.group};
        const uint32_t known = space_number(space);
        const auto replace = [&](const char* key) {
            if (const uint32_t at = find_node(known, key); at != kNone) erase(at);
        };
        replace(entry.key.data());
        for (size_t at = 0; at < entry.others.size(); at += kKeyBytes)
            replace(entry.others.data() + at);
        clock_ = std::max(clock_, entry.age);
        if (!entry.put) continue;
        const uint32_t number = insert(make_space(space), entry);
        Unit& unit = units_[number];
        unit.recovered = true;
        if (entry.parent.empty() || unit.parent != kNone) continue;
        orphans_.push_back({number, unit.serial, {}});
        std::memcpy(orphans_.back().parent.data(), entry.parent.data(), kKeyBytes);
    }
    return {done, sequence};
}

void RecordTable::link_orphans() {
    for (const Orphan& orphan : std::exchange(orphans_, {})) {
        Unit& unit = units_[orphan.unit];
        if (unit.space == kNone || unit.serial != orphan.serial) continue;
        const uint32_t parent = find_node(unit.space, orphan.parent.data());
        if (parent == kNone || nodes_[parent].unit == orphan.unit) continue;
        adopt(unit, parent);
    }
}

size_t RecordTable::check_extents(uint32_t first, uint32_t pages, std::vector<Extent>& gaps) {
    std::vector<bool> used(pages);
    std::fill_n(used.begin(), std::min(first, pages), true);
    const auto bad = [&](const Extent& extent) {
        if (extent.count == 0 || uint64_t{extent.first} + extent.count > pages) return true;
        const auto begin = used.begin() + extent.first;
        return std::find(begin, begin + extent.count, true) != begin + extent.count;
    };
    // Marked one by one, so that a record on its own pages twice is found, too.
    const auto use = [&](const std::vector<Extent>& extents) {
        size_t good = 0;
        for (; good < extents.size() && !bad(extents[good]); ++good)
            std::fill_n(used.begin() + extents[good].first, extents[good].count, true);
        if (good == extents.size()) return true;
        for (size_t i = 0; i < good; ++i)
            std::fill_n(used.begin() + extents[i].first, extents[i].count, false);
        return false;
    };
    size_t dropped = 0;
    for (size_t number = 0; number < units_.size(); ++number) {
        const Unit& unit = units_[number];
        if (unit.space == kNone || use(living_extents(unit))) continue;
        for (uint32_t place = 0; place < unit.records; ++place) {
            if ((unit.living >> place & 1) == 0) continue;
            const uint32_t at = node_at(unit, place);
            if (use(extents_of(at))) continue;
            log_drop(at);
            erase(at);
            ++dropped;
        }
    }
    gaps.clear();
    for (uint32_t page = 0; page < pages; ++page) {
        if (used[page]) continue;
        if (!gaps.empty() && gaps.back().first + gaps.back().count == page)
            ++gaps.back().count;
        else
            gaps.push_back({page, 1});
    }
    return dropped;
}

}  // namespace kvserver
