// record_table.cpp: see record_table.h.
#include "l2/record_table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "tables/fold.h"

namespace kvserver {

namespace {

constexpr size_t kWays = 4;
constexpr size_t kLooks = 16;     // of a sweep, in the time that the removal of one record needs
constexpr size_t kMostDead = 64;  // leaves that one evict() passes over

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
        if (node.space == kNone || spaces_[node.space].dead) continue;
        const auto [entry, fresh] = numbers.try_emplace(node.space, found.size());
        if (fresh) found.push_back({&spaces_[node.space].space, {}});
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
    size_t looks = most * kLooks;
    for (; looks != 0 && dead_records_ != 0; --looks, ++swept_to_, ++steps_) {
        if (swept_to_ >= nodes_.size()) swept_to_ = 0;
        const Node& node = nodes_[swept_to_];
        if (node.space == kNone || !spaces_[node.space].dead) continue;
        looks -= std::min(looks - 1, kLooks - 1);
        --dead_records_;
        const auto extents = erase(static_cast<uint32_t>(swept_to_));
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
        if (nodes_[node].space == space &&
            std::memcmp(nodes_[node].key.data(), key, kKeyBytes) == 0)
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
        uint32_t& bucket = buckets_[bucket_of(node.space, node.key.data())];
        head = std::exchange(node.next, std::exchange(bucket, head));
    }
}

uint32_t RecordTable::insert(uint32_t space, std::string_view key, std::string_view parent,
                             uint64_t meaning, uint64_t age, const std::vector<Extent>& extents) {
    uint32_t number = free_;
    if (number == kNone) {
        if (nodes_.size() >= kNone) throw std::length_error("too many records");
        number = static_cast<uint32_t>(nodes_.size());
        nodes_.push_back({});
    } else {
        free_ = nodes_[number].next;
    }
    Node& node = nodes_[number];
    std::memcpy(node.key.data(), key.data(), kKeyBytes);
    node.meaning = meaning;
    node.age = age;
    node.extent = extents.size() == 1 ? extents.front() : Extent{0, 0};
    if (extents.size() != 1) node.extents = std::make_unique<std::vector<Extent>>(extents);
    node.space = space;
    node.parent = parent.empty() ? kNone : find_node(space, parent.data());
    node.children = 0;
    node.recovered = false;
    if (node.parent == number) node.parent = kNone;
    if (node.parent != kNone) adopt(node, node.parent);
    if (++records_ > buckets_.size()) add_bucket();
    node.next = std::exchange(buckets_[bucket_of(space, node.key.data())], number);
    ++spaces_[space].space.records;
    live_journal_bytes_ += journal_bytes_of(number);
    add_leaf(number);
    return number;
}

void RecordTable::unlink(uint32_t number) {
    const Node& node = nodes_[number];
    uint32_t* link = &buckets_[bucket_of(node.space, node.key.data())];
    for (; *link != number; ++steps_) link = &nodes_[*link].next;
    *link = node.next;
}

std::vector<Extent> RecordTable::erase(uint32_t number) {
    std::vector<Extent> extents = extents_of(number);
    Node& node = nodes_[number];
    live_journal_bytes_ -= journal_bytes_of(number);
    unlink(number);
    drop_leaf(number);
    node.extents.reset();
    if (const uint32_t parent = living_parent(node); parent != kNone)
        if (--nodes_[parent].children == 0 && !spaces_[node.space].dead) add_leaf(parent);
    leave_space(node.space);
    node.space = kNone;
    ++node.serial;
    node.next = std::exchange(free_, number);
    --records_;
    return extents;
}

void RecordTable::adopt(Node& node, uint32_t parent) {
    node.parent = parent;
    node.parent_serial = nodes_[parent].serial;
    ++nodes_[parent].children;
    drop_leaf(parent);
}

uint32_t RecordTable::living_parent(const Node& node) const {
    const bool there = node.parent != kNone && nodes_[node.parent].serial == node.parent_serial;
    return there ? node.parent : kNone;
}

// ---- leaves -------------------------------------------------------------------------------------

void RecordTable::add_leaf(uint32_t number) {
    leaves_.push_back({});
    place_leaf(leaves_.size() - 1, {nodes_[number].age, number});
}

void RecordTable::drop_leaf(uint32_t number) {
    const uint32_t hole = std::exchange(nodes_[number].leaf, kNone);
    if (hole == kNone) return;
    const Leaf last = leaves_.back();
    leaves_.pop_back();
    if (last.node != number) place_leaf(hole, last);
}

void RecordTable::place_leaf(size_t hole, Leaf leaf) {
    const auto set = [&](size_t at, const Leaf& moved) {
        leaves_[at] = moved;
        nodes_[moved.node].leaf = static_cast<uint32_t>(at);
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

std::vector<Extent> RecordTable::extents_of(uint32_t number) const {
    const Node& node = nodes_[number];
    return node.extents ? *node.extents : std::vector<Extent>{node.extent};
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
    return Found{nodes_[at].meaning, extents_of(at), nodes_[at].recovered};
}

void RecordTable::add(const SpaceName& space, std::string_view key, std::string_view parent,
                      uint64_t meaning, const std::vector<Extent>& extents) {
    if (extents.empty()) throw std::invalid_argument("a record without extents");
    if (find_node(space_number(space), key.data()) != kNone)
        throw std::invalid_argument("the record is in the table");
    log(insert(make_space(space), key, parent, meaning, ++clock_, extents), true);
}

std::optional<std::vector<Extent>> RecordTable::remove(const SpaceName& space,
                                                       std::string_view key) {
    const uint32_t at = find_node(space_number(space), key.data());
    if (at == kNone) return std::nullopt;
    log(at, false);
    return erase(at);
}

void RecordTable::touch(const SpaceName& space, std::string_view keys) {
    const uint32_t number = space_number(space);
    if (number == kNone) return;
    for (size_t i = keys.size() / kKeyBytes; i-- > 0;) {
        const uint32_t at = find_node(number, keys.data() + i * kKeyBytes);
        if (at == kNone) continue;
        nodes_[at].age = ++clock_;
        if (nodes_[at].leaf != kNone) place_leaf(nodes_[at].leaf, {clock_, at});
    }
}

std::optional<RecordTable::Evicted> RecordTable::evict() {
    for (size_t dead = 0; dead < kMostDead && !leaves_.empty(); ++dead) {
        const uint32_t number = leaves_[0].node;
        const Node& node = nodes_[number];
        if (spaces_[node.space].dead) {
            drop_leaf(number);  // sweep() removes the record
            continue;
        }
        const Space& space = spaces_[node.space].space;
        Evicted evicted{space.ns, space.group, std::string(node.key.data(), kKeyBytes), {}};
        log(number, false);
        evicted.extents = erase(number);
        return evicted;
    }
    return std::nullopt;
}

uint64_t RecordTable::memory_bytes() const {
    uint64_t sum = nodes_.memory_bytes() + leaves_.memory_bytes() + buckets_.memory_bytes();
    for (size_t at = 0; at < nodes_.size(); ++at)
        if (nodes_[at].extents) sum += 64 + nodes_[at].extents->size() * sizeof(Extent);
    return sum;
}

// ---- the journal --------------------------------------------------------------------------------

JournalEntry RecordTable::entry_of(uint32_t number, bool put) const {
    const Node& node = nodes_[number];
    const Space& space = spaces_[node.space].space;
    JournalEntry entry{
        put, space.ns,     space.generation, space.group, {node.key.data(), kKeyBytes},
        {},  node.meaning, node.age,         {}};
    if (!put) return entry;
    entry.extents = extents_of(number);
    if (const uint32_t parent = living_parent(node); parent != kNone)
        entry.parent = {nodes_[parent].key.data(), kKeyBytes};
    return entry;
}

uint64_t RecordTable::journal_bytes_of(uint32_t number) const {
    const Node& node = nodes_[number];
    const size_t count = node.extents ? node.extents->size() : 1;
    return entry_bytes(spaces_[node.space].space.ns.size(), count);
}

void RecordTable::log_to(Log& log, const JournalEntry& entry) {
    if (log.on) append_entry(log.pending, log.file_id, log.sequence++, entry);
}

void RecordTable::log(uint32_t number, bool put) {
    if (!log_.on && !next_.on) return;
    const JournalEntry entry = entry_of(number, put);
    log_to(log_, entry);
    log_to(next_, entry);
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
    for (; most != 0 && filled_to_ < nodes_.size(); --most, ++filled_to_, ++steps_) {
        const Node& node = nodes_[filled_to_];
        if (node.space == kNone || spaces_[node.space].dead) continue;
        log_to(next_, entry_of(static_cast<uint32_t>(filled_to_), true));
    }
    return filled_to_ >= nodes_.size();
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
        const uint32_t there = find_node(space_number(space), entry.key.data());
        if (there != kNone) erase(there);
        clock_ = std::max(clock_, entry.age);
        if (!entry.put) continue;
        const uint32_t number = insert(make_space(space), entry.key, entry.parent, entry.meaning,
                                       entry.age, entry.extents);
        Node& node = nodes_[number];
        node.recovered = true;
        if (entry.parent.empty() || node.parent != kNone) continue;
        orphans_.push_back({number, node.serial, {}});
        std::memcpy(orphans_.back().parent.data(), entry.parent.data(), kKeyBytes);
    }
    return {done, sequence};
}

void RecordTable::link_orphans() {
    for (const Orphan& orphan : std::exchange(orphans_, {})) {
        Node& node = nodes_[orphan.node];
        if (node.space == kNone || node.serial != orphan.serial) continue;
        const uint32_t parent = find_node(node.space, orphan.parent.data());
        if (parent == kNone || parent == orphan.node) continue;
        adopt(node, parent);
    }
}

size_t RecordTable::check_extents(uint32_t first, uint32_t pages, std::vector<Extent>& gaps) {
    std::vector<bool> used(pages);
    std::fill_n(used.begin(), std::min(first, pages), true);
    size_t dropped = 0;
    for (size_t number = 0; number < nodes_.size(); ++number) {
        if (nodes_[number].space == kNone) continue;
        const auto extents = extents_of(static_cast<uint32_t>(number));
        const auto bad = [&](const Extent& extent) {
            if (extent.count == 0 || uint64_t{extent.first} + extent.count > pages) return true;
            const auto begin = used.begin() + extent.first;
            return std::find(begin, begin + extent.count, true) != begin + extent.count;
        };
        // Marked one by one, so that a record on its own pages twice is found, too.
        size_t good = 0;
        for (; good < extents.size() && !bad(extents[good]); ++good)
            std::fill_n(used.begin() + extents[good].first, extents[good].count, true);
        if (good == extents.size()) continue;
        for (size_t i = 0; i < good; ++i)
            std::fill_n(used.begin() + extents[i].first, extents[i].count, false);
        log(static_cast<uint32_t>(number), false);
        erase(static_cast<uint32_t>(number));
        ++dropped;
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
