// record_table.cpp: see record_table.h.
#include "l2/record_table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "l2/extents.h"
#include "tables/fold.h"

namespace kvserver {

namespace {

constexpr size_t kWays = 4;
constexpr size_t kLooks = 16;     // of a sweep, in the time that the removal of one record needs
constexpr size_t kMostDead = 64;  // leaves that one evict() passes over

// The first of the free elements, which `next` links, or one more.
template <typename T>
uint32_t take(Slabs<T>& all, uint32_t& free, uint32_t T::* next) {
    if (free == UINT32_MAX) {
        if (all.size() >= UINT32_MAX) throw std::length_error("too many records");
        all.push_back({});
        return static_cast<uint32_t>(all.size() - 1);
    }
    return std::exchange(free, all[free].*next);
}

}  // namespace

RecordTable::RecordTable(uint64_t seed) : seed_(seed) { buckets_.push_back(kNone); }

// ---- spaces -------------------------------------------------------------------------------------

std::string RecordTable::joined(const SpaceName& space) {
    std::string name(space.ns);
    name.append(reinterpret_cast<const char*>(&space.generation), sizeof(space.generation));
    name.append(reinterpret_cast<const char*>(&space.group), sizeof(space.group));
    return name;
}

uint32_t RecordTable::space_number(const SpaceName& space) const {
    const auto found = numbers_.find(joined(space));
    return found == numbers_.end() ? kNone : found->second;
}

uint32_t RecordTable::make_space(const SpaceName& space) {
    std::string name = joined(space);
    if (const auto found = numbers_.find(name); found != numbers_.end()) return found->second;
    uint32_t number = static_cast<uint32_t>(spaces_.size());
    if (free_spaces_.empty()) {
        spaces_.emplace_back();
    } else {
        number = free_spaces_.back();
        free_spaces_.pop_back();
    }
    spaces_[number] = {name, {std::string(space.ns), space.generation, space.group, 0}, false};
    numbers_.emplace(std::move(name), number);
    return number;
}

void RecordTable::leave_space(uint32_t number) {
    SpaceSlot& slot = spaces_[number];
    if (--slot.space.records != 0) return;
    if (!slot.dead) numbers_.erase(slot.name);
    slot = {};
    free_spaces_.push_back(number);
}

std::vector<RecordTable::Space> RecordTable::spaces() const {
    std::vector<Space> found;
    for (const auto& [name, number] : numbers_) found.push_back(spaces_[number].space);
    steps_ += found.size();
    return found;
}

std::vector<RecordTable::Keys> RecordTable::walk(size_t& at, size_t most) const {
    std::vector<Keys> found;
    std::unordered_map<uint32_t, size_t> numbers;  // of spaces, in `found`
    const size_t end = std::min(nodes_.size(), at + std::min(most, nodes_.size()));
    for (; at < end; ++at, ++steps_) {
        const Node& node = nodes_[at];
        if (node.unit == kNone) continue;
        const uint32_t space = units_[node.unit].space;
        if (spaces_[space].dead) continue;
        const auto [entry, fresh] = numbers.try_emplace(space, found.size());
        if (fresh) found.push_back({&spaces_[space].space, {}});
        found[entry->second].keys.append(node.key.data(), kKeyBytes);
    }
    if (at >= nodes_.size()) at = SIZE_MAX;
    return found;
}

bool RecordTable::drop_space(const SpaceName& space) {
    const uint32_t number = space_number(space);
    if (number == kNone) return false;
    SpaceSlot& slot = spaces_[number];
    numbers_.erase(slot.name);
    slot.dead = true;
    dead_records_ += slot.space.records;
    swept_to_ = 0;
    return true;
}

std::vector<Extent> RecordTable::sweep(size_t most) {
    std::vector<Extent> freed;
    for (size_t looks = most * kLooks; looks != 0 && dead_records_ != 0; ++steps_) {
        if (swept_to_ >= units_.size()) swept_to_ = 0;
        const Unit& unit = units_[swept_to_];
        if (unit.space == kNone || !spaces_[unit.space].dead) {
            ++swept_to_;
            --looks;
            continue;
        }
        looks -= std::min(looks, kLooks);
        --dead_records_;
        const auto extents = erase(last_node(unit));
        freed.insert(freed.end(), extents.begin(), extents.end());
    }
    return freed;
}

// ---- nodes --------------------------------------------------------------------------------------

uint64_t RecordTable::place(uint32_t space, const char* key) const {
    uint64_t bits = seed_ ^ space;
    for (size_t at = 0; at < kKeyBytes; at += sizeof(uint64_t)) {
        uint64_t word;
        std::memcpy(&word, key + at, sizeof(word));
        bits = fold(bits ^ word, kGolden);
    }
    return fold(bits ^ seed_, kGolden);
}

size_t RecordTable::bucket_of(uint32_t space, const char* key) const {
    const size_t round = std::bit_floor(buckets_.size());  // buckets at its begin
    const size_t at = place(space, key) & (2 * round - 1);
    return at < buckets_.size() ? at : at - round;
}

uint32_t RecordTable::find_node(uint32_t space, const char* key) const {
    if (space == kNone) return kNone;
    uint32_t node = buckets_[bucket_of(space, key)];
    for (; node != kNone; node = nodes_[node].next, ++steps_)
        if (std::memcmp(nodes_[node].key.data(), key, kKeyBytes) == 0 &&
            units_[nodes_[node].unit].space == space)
            break;
    return node;
}

// Split the bucket whose turn it is.
void RecordTable::add_bucket() {
    const size_t split = buckets_.size() - std::bit_floor(buckets_.size());
    uint32_t head = std::exchange(buckets_[split], kNone);
    buckets_.push_back(kNone);
    for (; head != kNone; ++steps_) {
        Node& node = nodes_[head];
        uint32_t& bucket = buckets_[bucket_of(units_[node.unit].space, node.key.data())];
        head = std::exchange(node.next, std::exchange(bucket, head));
    }
}

uint32_t RecordTable::insert(uint32_t space, const JournalEntry& entry) {
    const uint32_t parent = entry.parent.empty() ? kNone : find_node(space, entry.parent.data());
    const uint32_t number = take(units_, free_units_, &Unit::node);
    Unit& unit = units_[number];
    const size_t records = 1 + entry.others.size() / kKeyBytes;
    unit.meaning = entry.meaning;
    unit.age = entry.age;
    unit.extent = entry.extents.front();
    unit.space = space;
    unit.parent = kNone;
    unit.children = 0;
    unit.living = static_cast<uint16_t>((1U << records) - 1);
    unit.records = static_cast<uint8_t>(records);
    unit.recovered = false;
    if (parent != kNone) adopt(unit, parent);
    std::array<uint32_t, kMostInUnit> nodes;
    bool in_a_row = true;
    for (size_t i = 0; i < records; ++i) {
        const uint32_t at = nodes[i] = take(nodes_, free_nodes_, &Node::next);
        in_a_row &= at == nodes[0] + i;
        const char* key = i == 0 ? entry.key.data() : entry.others.data() + (i - 1) * kKeyBytes;
        std::memcpy(nodes_[at].key.data(), key, kKeyBytes);
        nodes_[at].unit = number;
        if (++records_ > buckets_.size()) add_bucket();
        nodes_[at].next = std::exchange(buckets_[bucket_of(space, key)], at);
    }
    unit.node = nodes[0];
    if (entry.extents.size() != 1 || !in_a_row) unit.several = std::make_unique<Several>();
    if (entry.extents.size() != 1) unit.several->extents = entry.extents;
    if (!in_a_row) unit.several->nodes.assign(nodes.begin(), nodes.begin() + records);
    spaces_[space].space.records += records;
    live_journal_bytes_ += journal_bytes_of(unit);
    add_leaf(number);
    return number;
}

void RecordTable::unlink(uint32_t at) {
    const Node& node = nodes_[at];
    uint32_t* link = &buckets_[bucket_of(units_[node.unit].space, node.key.data())];
    for (; *link != at; ++steps_) link = &nodes_[*link].next;
    *link = node.next;
}

std::vector<Extent> RecordTable::erase(uint32_t at) {
    std::vector<Extent> extents = extents_of(at);
    Node& node = nodes_[at];
    const uint32_t number = node.unit;
    Unit& unit = units_[number];
    live_journal_bytes_ -= journal_bytes_of(unit);
    unlink(at);
    unit.living = static_cast<uint16_t>(unit.living & ~(1U << place_of(at)));
    node.unit = kNone;
    node.next = std::exchange(free_nodes_, at);
    --records_;
    if (unit.living != 0) live_journal_bytes_ += journal_bytes_of(unit);
    const uint32_t space = unit.space;
    if (unit.living == 0) end_unit(number);
    leave_space(space);
    return extents;
}

// Its last record has left.
void RecordTable::end_unit(uint32_t number) {
    Unit& unit = units_[number];
    drop_leaf(number);
    unit.several.reset();
    if (const uint32_t parent = living_parent(unit); parent != kNone)
        if (--units_[parent].children == 0 && !spaces_[unit.space].dead) add_leaf(parent);
    unit.space = kNone;
    ++unit.serial;
    unit.node = std::exchange(free_units_, number);
}

void RecordTable::adopt(Unit& unit, uint32_t parent) {
    const uint32_t of = nodes_[parent].unit;
    unit.parent = of;
    unit.parent_serial = units_[of].serial;
    unit.parent_place = static_cast<uint16_t>(place_of(parent) & (kMostInUnit - 1));
    ++units_[of].children;
    drop_leaf(of);
}

uint32_t RecordTable::living_parent(const Unit& unit) const {
    const bool there = unit.parent != kNone && units_[unit.parent].serial == unit.parent_serial;
    return there ? unit.parent : kNone;
}

// Only ancestors: were another record named, a replay could make two units each other's parents,
// and neither would be a leaf.
uint32_t RecordTable::living_ancestor(const Unit& unit) const {
    const Unit* below = &unit;
    for (uint32_t parent; (parent = living_parent(*below)) != kNone; below = &units_[parent]) {
        const auto before = units_[parent].living & ((2U << below->parent_place) - 1);
        if (before != 0)
            return node_at(units_[parent], static_cast<uint32_t>(std::bit_width(before)) - 1);
    }
    return kNone;
}

uint32_t RecordTable::node_at(const Unit& unit, uint32_t place) {
    const bool listed = unit.several && !unit.several->nodes.empty();
    return listed ? unit.several->nodes[place] : unit.node + place;
}

uint32_t RecordTable::last_node(const Unit& unit) {
    return node_at(unit, static_cast<uint32_t>(std::bit_width(unit.living)) - 1);
}

uint32_t RecordTable::place_of(uint32_t at) const {
    const Unit& unit = units_[nodes_[at].unit];
    uint32_t place = 0;
    if (unit.several && !unit.several->nodes.empty())
        while (unit.several->nodes[place] != at) ++place;
    else
        place = at - unit.node;
    return place;
}

std::vector<Extent> RecordTable::all_extents(const Unit& unit) {
    if (unit.several && !unit.several->extents.empty()) return unit.several->extents;
    return {unit.extent};
}

std::vector<Extent> RecordTable::extents_of(uint32_t at) const {
    const Unit& unit = units_[nodes_[at].unit];
    std::vector<Extent> extents = all_extents(unit);
    if (unit.records == 1) return extents;
    const uint64_t pages = page_count(extents) / unit.records;
    return part_of(extents, place_of(at) * pages, pages);
}

// A run of neighbours gives as few extents as its pages are.
std::vector<Extent> RecordTable::living_extents(const Unit& unit) {
    std::vector<Extent> extents = all_extents(unit);
    if (std::popcount(unit.living) == unit.records) return extents;
    const uint64_t pages = page_count(extents) / unit.records;
    std::vector<Extent> living;
    for (uint32_t at = 0, run; at < unit.records; at += run + 1) {
        run = static_cast<uint32_t>(std::countr_one(static_cast<uint32_t>(unit.living >> at)));
        const auto part = part_of(extents, at * pages, run * pages);
        living.insert(living.end(), part.begin(), part.end());
    }
    return living;
}

// ---- leaves -------------------------------------------------------------------------------------

void RecordTable::add_leaf(uint32_t number) {
    leaves_.push_back({});
    place_leaf(leaves_.size() - 1, {units_[number].age, number});
}

void RecordTable::drop_leaf(uint32_t number) {
    const uint32_t hole = std::exchange(units_[number].leaf, kNone);
    if (hole == kNone) return;
    const Leaf last = leaves_.back();
    leaves_.pop_back();
    if (last.unit != number) place_leaf(hole, last);
}

void RecordTable::place_leaf(size_t hole, Leaf leaf) {
    const auto set = [&](size_t at, const Leaf& moved) {
        leaves_[at] = moved;
        units_[moved.unit].leaf = static_cast<uint32_t>(at);
        ++steps_;
    };
    for (; hole != 0 && leaf.age < leaves_[(hole - 1) / kWays].age; hole = (hole - 1) / kWays)
        set(hole, leaves_[(hole - 1) / kWays]);
    for (size_t first; (first = hole * kWays + 1) < leaves_.size();) {
        size_t oldest = first;
        for (size_t at = first + 1; at < std::min(first + kWays, leaves_.size()); ++at)
            if (leaves_[at].age < leaves_[oldest].age) oldest = at;
        if (leaves_[oldest].age >= leaf.age) break;
        set(std::exchange(hole, oldest), leaves_[oldest]);
    }
    set(hole, leaf);
}

// ---- records ------------------------------------------------------------------------------------

std::vector<uint8_t> RecordTable::holds(const SpaceName& space, std::string_view keys) const {
    const size_t count = keys.size() / kKeyBytes;
    std::vector<uint8_t> bits((count + 7) / 8);
    const uint32_t number = space_number(space);
    if (number == kNone) return bits;
    for (size_t i = 0; i < count; ++i, ++steps_)
        if (find_node(number, keys.data() + i * kKeyBytes) != kNone)
            bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | 1 << i % 8);
    return bits;
}

std::optional<RecordTable::Found> RecordTable::find(const SpaceName& space,
                                                    std::string_view key) const {
    const uint32_t at = find_node(space_number(space), key.data());
    if (at == kNone) return std::nullopt;
    const Unit& unit = units_[nodes_[at].unit];
    return Found{unit.meaning, extents_of(at), unit.recovered != 0};
}

void RecordTable::add(const SpaceName& space, std::string_view keys, std::string_view parent,
                      uint64_t meaning, const std::vector<Extent>& extents) {
    const size_t records = keys.size() / kKeyBytes;
    if (records == 0 || records > kMostInUnit)
        throw std::invalid_argument("a unit has 1 to " + std::to_string(kMostInUnit) + " records");
    if (const uint64_t pages = page_count(extents); pages == 0 || pages % records != 0)
        throw std::invalid_argument("a record without extents, or of other pages than the others");
    const uint32_t known = space_number(space);
    for (size_t at = 0; at < keys.size(); at += kKeyBytes)
        if (find_node(known, keys.data() + at) != kNone)
            throw std::invalid_argument("the record is in the table");
    const JournalEntry entry{true,
                             space.ns,
                             space.generation,
                             space.group,
                             keys.substr(0, kKeyBytes),
                             keys.substr(kKeyBytes),
                             parent,
                             meaning,
                             ++clock_,
                             extents};
    const uint32_t number = insert(make_space(space), entry);
    log_put(log_, number);
    log_put(next_, number);
}

std::optional<std::vector<Extent>> RecordTable::remove(const SpaceName& space,
                                                       std::string_view key) {
    const uint32_t at = find_node(space_number(space), key.data());
    if (at == kNone) return std::nullopt;
    log_drop(at);
    return erase(at);
}

void RecordTable::touch(const SpaceName& space, std::string_view keys) {
    const uint32_t number = space_number(space);
    if (number == kNone) return;
    for (size_t i = keys.size() / kKeyBytes; i-- > 0;) {
        const uint32_t at = find_node(number, keys.data() + i * kKeyBytes);
        if (at == kNone) continue;
        const uint32_t unit = nodes_[at].unit;
        if (units_[unit].age == clock_) continue;  // it is the youngest
        units_[unit].age = ++clock_;
        if (units_[unit].leaf != kNone) place_leaf(units_[unit].leaf, {clock_, unit});
    }
}

std::optional<RecordTable::Evicted> RecordTable::evict() {
    for (size_t dead = 0; dead < kMostDead && !leaves_.empty(); ++dead) {
        const uint32_t number = leaves_[0].unit;
        const Unit& unit = units_[number];
        if (spaces_[unit.space].dead) {
            drop_leaf(number);  // sweep() removes the records
            continue;
        }
        const Space& space = spaces_[unit.space].space;
        const uint32_t at = last_node(unit);
        Evicted evicted{space.ns, space.group, std::string(nodes_[at].key.data(), kKeyBytes), {}};
        log_drop(at);
        evicted.extents = erase(at);
        return evicted;
    }
    return std::nullopt;
}

uint64_t RecordTable::memory_bytes() const {
    uint64_t sum = nodes_.memory_bytes() + units_.memory_bytes() + leaves_.memory_bytes() +
                   buckets_.memory_bytes();
    for (size_t at = 0; at < units_.size(); ++at)
        if (const Several* several = units_[at].several.get())
            sum += 96 + several->extents.size() * sizeof(Extent) +
                   several->nodes.size() * sizeof(uint32_t);
    return sum;
}

}  // namespace kvserver
