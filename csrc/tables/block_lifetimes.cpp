// block_lifetimes.cpp: an array of blocks, and one switch over the operations on them.
#include "tables/block_lifetimes.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace kvserver {

namespace {

constexpr uint32_t kBlockMask = (1u << kRecordShift) - 1;
constexpr auto kLastRecord = static_cast<uint32_t>(Record::kOwned);
constexpr auto kClearedRecord = static_cast<uint32_t>(Record::kCleared);

// The `index`-th T in raw memory of any alignment.
template <typename T>
T at(std::string_view raw, size_t index) {
    T value;
    std::memcpy(&value, raw.data() + index * sizeof(T), sizeof(T));
    return value;
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

size_t count_of(std::string_view raw, size_t size, const char* what) {
    if (raw.size() % size != 0)
        refuse(std::to_string(raw.size()) + " bytes are no whole number of " + what + " of " +
               std::to_string(size) + " bytes");
    return raw.size() / size;
}

// Which record is wrong, and why. REQUIRES: one is.
[[noreturn]] void refuse_record(std::string_view records, size_t count, uint64_t num_blocks) {
    for (size_t i = 0; i < count; ++i) {
        const auto record = at<uint32_t>(records, i);
        const uint32_t operation = record >> kRecordShift, id = record & kBlockMask;
        const std::string here = "record " + std::to_string(i);
        if (operation > kLastRecord)
            refuse(here + ": operation " + std::to_string(operation) + " is not 0 to " +
                   std::to_string(kLastRecord));
        if (operation != kClearedRecord && id >= num_blocks)
            refuse(here + ": block " + std::to_string(id) + " is not below " +
                   std::to_string(num_blocks));
    }
    refuse("a record is wrong");
}

void check_marks(std::string_view marks, size_t records) {
    const size_t count = count_of(marks, sizeof(Mark), "marks");
    if (count == 0 && records > 0) refuse("records without a mark of their time");
    Mark before{};
    for (size_t i = 0; i < count; ++i) {
        const auto mark = at<Mark>(marks, i);
        const std::string here = "mark " + std::to_string(i);
        if (i == 0 && mark.record != 0) refuse(here + " is not of record 0");
        if (i > 0 && mark.record <= before.record) refuse(here + " is not of a later record");
        if (mark.record >= std::max<size_t>(records, 1)) refuse(here + " is beyond the records");
        if (mark.time_ns < before.time_ns) refuse(here + " is earlier than the mark before it");
        before = mark;
    }
}

// The finalizer of splitmix64.
uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

uint64_t span_ns(uint64_t from, uint64_t to) { return to > from ? to - from : 0; }

double checked_rate(double rate) {
    if (!(rate >= 0 && rate <= 1)) refuse("a sample rate is 0 to 1");
    return rate;
}

}  // namespace

void check_records(std::string_view records, std::string_view marks, uint64_t num_blocks) {
    const size_t count = count_of(records, sizeof(uint32_t), "records");
    const auto limit = static_cast<uint32_t>(std::min<uint64_t>(num_blocks, kBlockMask + 1));
    uint32_t wrong = 0;  // without branches, so that the compiler takes several at a time
    for (size_t i = 0; i < count; ++i) {
        const auto record = at<uint32_t>(records, i);
        const uint32_t operation = record >> kRecordShift;
        wrong |= (operation > kLastRecord) |
                 ((operation != kClearedRecord) & ((record & kBlockMask) >= limit));
    }
    if (wrong) refuse_record(records, count, num_blocks);
    check_marks(marks, count);
}

// ---- metrics --------------------------------------------------------------------------------

LifetimeMetrics::LifetimeMetrics(std::vector<double> bounds) : bounds_(std::move(bounds)) {
    for (size_t i = 0; i < bounds_.size(); ++i)
        if (std::isnan(bounds_[i]) || (i > 0 && bounds_[i] <= bounds_[i - 1]))
            refuse("bounds of buckets ascend");
    for (LifetimeHistogram* histogram : {&metrics_.lifetime, &metrics_.idle_before_evict,
                                         &metrics_.since_last_access, &metrics_.reuse_gap})
        histogram->counts.resize(bounds_.size() + 1);
    published_ = metrics_;
}

LifetimeSnapshot LifetimeMetrics::read() const {
    const std::lock_guard lock(published_mutex_);
    return published_;
}

LifetimeMetrics::Writing::~Writing() {
    const std::lock_guard published_lock(metrics.published_mutex_);
    metrics.published_ = metrics.metrics_;
}

void LifetimeMetrics::observe(LifetimeHistogram& histogram, uint64_t nanos) {
    const double seconds = static_cast<double>(nanos) / 1e9;
    const auto bound = std::lower_bound(bounds_.begin(), bounds_.end(), seconds);
    ++histogram.counts[static_cast<size_t>(bound - bounds_.begin())];
    histogram.sum += seconds;
}

// ---- lifetimes ------------------------------------------------------------------------------

void BlockLifetimes::Free::operator()(Block* blocks) const { std::free(blocks); }

BlockLifetimes::BlockLifetimes(std::shared_ptr<LifetimeMetrics> metrics, uint64_t num_blocks,
                               double sample_rate, uint64_t seed)
    : shared_(std::move(metrics)),
      metrics_(shared_->metrics_),
      num_blocks_(num_blocks),
      sample_below_(static_cast<uint64_t>(std::ldexp(checked_rate(sample_rate), 53))),
      seed_(mix(seed)),
      // Zero is a block that was never used, and pages that are never touched cost nothing.
      blocks_(static_cast<Block*>(std::calloc(num_blocks, sizeof(Block)))) {
    if (!blocks_ && num_blocks > 0) throw std::bad_alloc();
}

BlockLifetimes::~BlockLifetimes() { end_all(); }

BlockLifetimes::Block& BlockLifetimes::touch(uint32_t id) {
    touched_ = std::max<uint64_t>(touched_, uint64_t{id} + 1);
    return blocks_[id];
}

// The gauge that counts this block. Every change of a block is between --gauge and ++gauge of it.
uint64_t& BlockLifetimes::gauge(const Block& block) {
    if (block.owners > 0) return metrics_.active_blocks;
    return block.alive ? metrics_.released_blocks : nowhere_;
}

void BlockLifetimes::begin(Block& block, uint32_t id, uint64_t now) {
    ++block.births;
    block.alive = true;
    block.sampled =
        mix(seed_ + (uint64_t{id} << 32 | block.births) * 0x9e3779b97f4a7c15) >> 11 < sample_below_;
    block.born_ns = block.accessed_ns = now;
    block.released_ns = 0;
    block.content = 0;
}

// REQUIRES: the block is alive; its owners are those before this access.
void BlockLifetimes::access(Block& block, uint64_t now) {
    ++(block.owners > 0 ? metrics_.shared_accesses : metrics_.reuses);
    if (block.sampled && block.accessed_ns && now)
        shared_->observe(metrics_.reuse_gap, span_ns(block.accessed_ns, now));
    block.accessed_ns = now;
}

void BlockLifetimes::observe_end(const Block& block, uint64_t now) {
    if (block.born_ns && now) shared_->observe(metrics_.lifetime, span_ns(block.born_ns, now));
    if (block.accessed_ns && now)
        shared_->observe(metrics_.since_last_access, span_ns(block.accessed_ns, now));
    if (block.owners > 0)
        shared_->observe(metrics_.idle_before_evict, 0);
    else if (block.released_ns && now)
        shared_->observe(metrics_.idle_before_evict, span_ns(block.released_ns, now));
}

// Nothing for a block that is not alive.
void BlockLifetimes::end(Block& block, End how, uint64_t now) {
    if (block.alive && block.sampled) observe_end(block, now);
    forget(block, how);
}

// The same, and nothing is observed.
void BlockLifetimes::forget(Block& block, End how) {
    if (!block.alive) return;
    ++(metrics_.*how);
    block.alive = false;
}

void BlockLifetimes::forget_all(End how, bool owners_too) {
    bool owned = false;
    for (uint64_t id = 0; id < touched_; ++id) {
        Block& block = blocks_[id];
        --gauge(block);
        forget(block, how);
        if (owners_too && block.owners > 0) block.owners = 0;  // unwritten memory costs nothing
        owned |= block.owners > 0;
        ++gauge(block);
    }
    if (!owned) touched_ = 0;  // nothing more to forget: the next time is cheap
}

void BlockLifetimes::end_all() {
    const LifetimeMetrics::Writing writing(*shared_);
    forget_all(&LifetimeSnapshot::lost, true);
    others_.clear();
    requests_.clear();
}

// ---- exact ----------------------------------------------------------------------------------

void BlockLifetimes::apply(std::string_view records, std::string_view marks) {
    const LifetimeMetrics::Writing writing(*shared_);
    const size_t count = records.size() / sizeof(uint32_t), moments = marks.size() / sizeof(Mark);
    for (size_t m = 0; m < moments; ++m) {
        const auto mark = at<Mark>(marks, m);
        const size_t next = m + 1 < moments ? at<Mark>(marks, m + 1).record : count;
        for (size_t i = mark.record; i < std::min(next, count); ++i) {
            const auto record = at<uint32_t>(records, i);
            step(static_cast<Record>(record >> kRecordShift), record & kBlockMask, mark.time_ns);
        }
    }
}

void BlockLifetimes::step(Record operation, uint32_t id, uint64_t now) {
    if (operation == Record::kCleared) return forget_all(&LifetimeSnapshot::cleared, false);
    if (id == 0 || id >= num_blocks_) return;
    Block& block = touch(id);
    --gauge(block);
    switch (operation) {
        case Record::kAllocated:
            end(block, &LifetimeSnapshot::recycled, now);
            begin(block, id, now);
            block.owners = 1;
            ++metrics_.allocations;
            break;
        case Record::kAccessed:
            if (block.alive) access(block, now);
            ++block.owners;
            break;
        case Record::kReleased:
            if (block.owners > 0 && --block.owners == 0) block.released_ns = now;
            break;
        case Record::kEvicted:
            end(block, &LifetimeSnapshot::evictions, now);
            break;
        case Record::kPresent:
            forget(block, &LifetimeSnapshot::lost);
            begin(block, id, 0);
            block.owners = 0;
            break;
        case Record::kOwned:
            ++block.owners;
            break;
        case Record::kCleared:
            break;
    }
    ++gauge(block);
}

// ---- reported -------------------------------------------------------------------------------

void BlockLifetimes::own_blocks(uint64_t request, uint32_t group, std::string_view blocks,
                                std::string_view contents, uint64_t time_ns, bool watched) {
    const size_t count = blocks.size() / sizeof(uint32_t);
    const size_t named = contents.size() / sizeof(uint64_t);
    const LifetimeMetrics::Writing writing(*shared_);
    for (size_t i = 0; i < count; ++i) {
        const auto id = at<uint32_t>(blocks, i);
        const uint64_t name = i < named ? at<uint64_t>(contents, i) : 0;
        const uint64_t content = name ? name ^ mix(group) : 0;
        if (id != 0 && id < num_blocks_) own_one(request, id, content, time_ns, watched);
    }
}

void BlockLifetimes::own_one(uint64_t request, uint32_t id, uint64_t content, uint64_t now,
                             bool watched) {
    Block& block = touch(id);
    const bool owns = owned_by(block, id, request);
    const bool same = block.alive && content != 0 && block.content == content;
    --gauge(block);
    if (owns && (block.content == 0 || content == 0)) {
        if (content != 0) block.content = content;  // else the content is unchanged
    } else if (same && !owns) {
        if (watched) access(block, now);
        own(block, id, request);
    } else if (!same) {
        end(block, block.content ? &LifetimeSnapshot::evictions : &LifetimeSnapshot::recycled, now);
        disown_all(block, id, now);
        begin(block, id, watched ? now : 0);
        block.content = content;
        own(block, id, request);
        metrics_.allocations += watched;
    }
    ++gauge(block);
}

void BlockLifetimes::release_blocks(uint64_t request, std::string_view blocks, uint64_t time_ns) {
    const size_t count = blocks.size() / sizeof(uint32_t);
    const LifetimeMetrics::Writing writing(*shared_);
    for (size_t i = 0; i < count; ++i) disown_if_owned(at<uint32_t>(blocks, i), request, time_ns);
}

void BlockLifetimes::end_request(uint64_t request, uint64_t time_ns) {
    const LifetimeMetrics::Writing writing(*shared_);
    const auto found = requests_.find(request);
    if (found == requests_.end()) return;
    const std::vector<uint32_t> blocks = found->second.blocks;
    for (const uint32_t id : blocks) disown_if_owned(id, request, time_ns);
}

size_t BlockLifetimes::requests() const {
    const LifetimeMetrics::Writing writing(*shared_);
    return requests_.size();
}

bool BlockLifetimes::owned_by(const Block& block, uint32_t id, uint64_t request) const {
    if (block.owners == 0) return false;
    if (block.owner == request) return true;
    if (block.owners == 1) return false;
    const auto& others = others_.at(id);
    return std::find(others.begin(), others.end(), request) != others.end();
}

void BlockLifetimes::own(Block& block, uint32_t id, uint64_t request) {
    if (block.owners++ == 0)
        block.owner = request;
    else
        others_[id].push_back(request);
    RequestBlocks& ours = requests_[request];
    ++ours.owned;
    ours.blocks.push_back(id);
    if (ours.blocks.size() <= 2 * ours.owned + 64) return;
    std::vector<uint32_t>& blocks = ours.blocks;  // half of the entries are past
    std::sort(blocks.begin(), blocks.end());
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
    std::erase_if(blocks, [&](uint32_t b) { return !owned_by(blocks_[b], b, request); });
}

// REQUIRES: `request` is an owner.
void BlockLifetimes::disown(Block& block, uint32_t id, uint64_t request, uint64_t now) {
    if (--block.owners == 0) {
        block.released_ns = now;
    } else {
        std::vector<uint64_t>& others = others_[id];
        const uint64_t last = others.back();
        if (block.owner == request)
            block.owner = last;
        else
            *std::find(others.begin(), others.end(), request) = last;
        others.pop_back();
        if (others.empty()) others_.erase(id);
    }
    count_disowned(request);
}

void BlockLifetimes::disown_all(Block& block, uint32_t id, uint64_t now) {
    while (block.owners > 0) disown(block, id, block.owner, now);
}

void BlockLifetimes::disown_if_owned(uint32_t id, uint64_t request, uint64_t now) {
    if (id >= num_blocks_) return;
    Block& block = blocks_[id];
    if (!owned_by(block, id, request)) return;
    --gauge(block);
    disown(block, id, request, now);
    ++gauge(block);
}

void BlockLifetimes::count_disowned(uint64_t request) {
    const auto found = requests_.find(request);
    if (--found->second.owned == 0) requests_.erase(found);
}

}  // namespace kvserver
