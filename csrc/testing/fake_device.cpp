// fake_device.cpp: a device whose tickets run and end when and how a test decides.
#include "testing/fake_device.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>

#include "copy/host_copy.h"

namespace kvserver {

namespace {

constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();

template <typename T>
bool overlap(const std::vector<T>& one, const std::vector<T>& other) {
    const std::set<T> seen(one.begin(), one.end());
    return std::any_of(other.begin(), other.end(), [&](const T& x) { return seen.contains(x); });
}

template <typename T>
bool has_twins(const std::vector<T>& items) {
    return std::set<T>(items.begin(), items.end()).size() != items.size();
}

// But for those of slots that were reported: nothing touches them any more.
std::vector<uint32_t> pages_of(const CopyJob& job) {
    std::vector<uint32_t> pages;
    for (const Extent& extent : job.extents)
        for (uint32_t i = 0; i < extent.count; ++i) pages.push_back(extent.first + i);
    pages.erase(pages.begin(), pages.begin() + job.reported_slots * job.pages_per_slot);
    return pages;
}

void require(bool kept, const char* rule) {
    if (!kept) throw std::logic_error(std::string("the caller broke a rule: ") + rule);
}

}  // namespace

FakeDevice::FakeDevice(std::shared_ptr<HostRegion> region, uint64_t page_bytes, Options options)
    : l1_{std::move(region), page_bytes}, options_(options), random_(options.seed) {
    check_l1(l1_);
    install_sigbus_guard();
    if (options.seed == 0) return;
    for (uint64_t i = 0; i < l1_.region->size(); ++i)
        l1_.region->data()[i] = static_cast<std::byte>(random_());
}

// ---- what the server calls ------------------------------------------------------------------

std::vector<Completion> FakeDevice::drain() {
    std::vector<Completion> ends = completions_.drain();
    if (options_.seed == 0) return ends;
    std::lock_guard lock(mutex_);
    std::shuffle(ends.begin(), ends.end(), random_);
    // Some are reported later.
    for (uint64_t later = dice(5) / 3; later > 0 && !ends.empty(); --later) {
        completions_.push(std::move(ends.back()));
        ends.pop_back();
    }
    return ends;
}

std::vector<Part> FakeDevice::drain_parts() {
    std::lock_guard lock(mutex_);
    return std::exchange(parts_, {});
}

std::string FakeDevice::lost() const {
    std::lock_guard lock(mutex_);
    return lost_;
}

void FakeDevice::submit_copy(std::shared_ptr<CopyJob> job) {
    check_job(*job, l1_);
    std::lock_guard lock(mutex_);
    check_caller(*job);
    const uint64_t number = job->ticket;
    newest_blocks_ = job->blocks;
    open_ticket({.number = number, .copy = std::move(job), .map = {}});
}

void FakeDevice::submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) {
    std::lock_guard lock(mutex_);
    open_ticket({.number = ticket, .copy = nullptr, .map = {ticket, false, std::move(mappings)}});
}

void FakeDevice::submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) {
    std::lock_guard lock(mutex_);
    for (const Shared& other : open_)
        if (other->copy)
            require(!overlap(other->copy->planes->memories(), mappings) &&
                        !overlap<std::shared_ptr<Mapping>>({other->copy->word_memory}, mappings),
                    "memory was unmapped under a copy");
    open_ticket({.number = ticket, .copy = nullptr, .map = {ticket, true, std::move(mappings)}});
}

void FakeDevice::cancel(uint64_t ticket) {
    std::lock_guard lock(mutex_);
    for (const Shared& other : open_)
        if (other->number == ticket && other->copy) other->copy->stop = true;
}

// REQUIRES: mutex_ held.
void FakeDevice::open_ticket(Ticket ticket) {
    for (const Shared& other : open_)
        require(other->number != ticket.number, "a ticket's number is in use");
    if (lost_.empty())
        open_.push_back(std::make_shared<Ticket>(std::move(ticket)));
    else
        completions_.push(end_lost(ticket));
}

// REQUIRES: mutex_ held, check_job() passed.
void FakeDevice::check_caller(const CopyJob& job) const {
    for (const auto& memory : job.planes->memories())
        require(memory->mapped(), "a copy of memory that is not mapped");
    std::vector<uint32_t> named = job.blocks;
    std::erase(named, kNoBlock);
    require(!named.empty(), "a copy of nothing");
    require(!has_twins(named), "a block is named twice");
    const bool store = job.direction == Direction::kStore;
    const std::vector<uint32_t> pages = pages_of(job);
    require(!store || !has_twins(pages), "a page is in two slots of one store");
    for (const Shared& other : open_) {
        if (!other->copy) continue;
        const bool both_read = !store && other->copy->direction == Direction::kLoad;
        require(both_read || !overlap(pages, pages_of(*other->copy)),
                "a page under a copy is named by another");
    }
}

// ---- what the test calls --------------------------------------------------------------------

std::vector<uint32_t> FakeDevice::newest_blocks() const {
    std::lock_guard lock(mutex_);
    return newest_blocks_;
}

std::vector<uint64_t> FakeDevice::open() const {
    std::lock_guard lock(mutex_);
    std::vector<uint64_t> numbers;
    for (const Shared& ticket : open_) numbers.push_back(ticket->number);
    return numbers;
}

void FakeDevice::run(uint64_t ticket, uint64_t blocks) {
    advance(claim(ticket), {.blocks = blocks});
}

void FakeDevice::report(uint64_t ticket) {
    const Shared claimed = claim(ticket);
    report_part(*claimed);
    return_ticket(claimed, std::nullopt);
}

void FakeDevice::release(uint64_t ticket) {
    advance(claim(ticket), {.blocks = kAll, .end = Outcome::kDone});
}

void FakeDevice::release_all(Order order) {
    std::vector<uint64_t> numbers = open();
    if (order == Order::kReversed) std::reverse(numbers.begin(), numbers.end());
    for (uint64_t number : numbers) release(number);
}

void FakeDevice::fail(uint64_t ticket, uint64_t blocks, const std::string& what) {
    advance(claim(ticket), {.blocks = blocks, .end = Outcome::kFailed, .what = what});
}

void FakeDevice::step() {
    const Shared ticket = claim_any();
    if (ticket) advance(ticket, next_stretch(*ticket));
}

void FakeDevice::lose(const std::string& what) {
    std::lock_guard lock(mutex_);
    lost_ = what;
    dead_ = true;
    // Those that a thread is running end when it has left them: until then they may still write.
    std::erase_if(open_, [this](const Shared& ticket) {
        if (!ticket->busy) completions_.push(end_lost(*ticket));
        return !ticket->busy;
    });
}

void FakeDevice::recover() {
    std::lock_guard lock(mutex_);
    lost_.clear();
    dead_ = false;
}

// ---- inside ---------------------------------------------------------------------------------

FakeDevice::Shared FakeDevice::claim(uint64_t number) {
    std::lock_guard lock(mutex_);
    for (const Shared& ticket : open_)
        if (ticket->number == number && !std::exchange(ticket->busy, true)) return ticket;
    throw std::invalid_argument("ticket " + std::to_string(number) + " is not open, or is running");
}

FakeDevice::Shared FakeDevice::claim_any() {
    std::lock_guard lock(mutex_);
    std::vector<Shared> idle;
    std::copy_if(open_.begin(), open_.end(), std::back_inserter(idle),
                 [](const Shared& ticket) { return !ticket->busy; });
    if (idle.empty()) return nullptr;
    const Shared ticket = idle[dice(idle.size())];
    ticket->busy = true;
    return ticket;
}

void FakeDevice::advance(const Shared& ticket, const Stretch& stretch) {
    std::optional<Completion> end;
    if (ticket->copy)
        end = run_copy(*ticket, stretch);
    else
        end = run_map_job(ticket->map);
    return_ticket(ticket, std::move(end));
}

// REQUIRES: claimed by this thread. How it ended, if it did.
std::optional<Completion> FakeDevice::run_copy(Ticket& ticket, const Stretch& stretch) {
    CopyJob& job = *ticket.copy;
    if (!ticket.begun) {
        if (auto refused = begin_job(job)) return refused;
        ticket.begun = true;
    }
    for (uint64_t left = stretch.blocks; left > 0 && job.next < job.positions(); --left) {
        if (dead_) return std::nullopt;
        if (stretch.looks && (job.stop || cancelled(job))) {
            job.stop = true;
            break;
        }
        options_.slow(job.next);
        if (!copy_block_guarded(job, job.next, l1_)) {
            job.memory_lost = true;
            job.stop = true;
            break;
        }
        job.bytes += job.bytes_at(job.next);
        ++job.next;
    }
    finish_copies();
    if (stretch.looks && (job.stop || cancelled(job))) return end_job(job);
    if (stretch.end) return end_job(job, *stretch.end, stretch.what);
    if (stretch.reports) report_part(ticket);
    return std::nullopt;
}

// REQUIRES: claimed by this thread.
void FakeDevice::report_part(Ticket& ticket) {
    if (!ticket.begun || ticket.copy->direction != Direction::kStore) return;
    if (auto part = next_part(*ticket.copy, ticket.copy->next, 1)) {
        std::lock_guard lock(mutex_);
        parts_.push_back(*part);
        completions_.notify();
    }
}

// See "Loss" in device.h. REQUIRES: no thread is running the ticket.
Completion FakeDevice::end_lost(const Ticket& ticket) const {
    if (ticket.copy)
        return ticket.begun ? end_job(*ticket.copy, Outcome::kDeviceLost, lost_)
                            : refuse_job(*ticket.copy, Outcome::kDeviceLost, lost_);
    return ticket.map.unmap ? run_map_job(ticket.map) : refuse_map_job(ticket.map, lost_);
}

void FakeDevice::return_ticket(const Shared& ticket, std::optional<Completion> end) {
    std::lock_guard lock(mutex_);
    ticket->busy = false;
    if (!end && !lost_.empty()) end = end_lost(*ticket);
    if (!end) return;
    std::erase(open_, ticket);
    completions_.push(std::move(*end));
}

// Some copy begins, comes some way, or to an end; it looks at cancels only now and then.
FakeDevice::Stretch FakeDevice::next_stretch(const Ticket& ticket) {
    std::lock_guard lock(mutex_);
    if (!ticket.copy) return {.blocks = 0};
    CopyJob& job = *ticket.copy;
    if (!ticket.begun) {
        if (trouble()) job.deadline_nanos = 1;  // late
        return {.blocks = 0, .looks = false};
    }
    Stretch stretch{.blocks = 1 + dice(4), .looks = dice(2) == 0, .reports = dice(2) == 0};
    if (trouble()) {
        job.memory_lost = dice(2) == 0;
        stretch.end = Outcome::kFailed;
        stretch.what = "the test made it so";
    } else if (job.next == job.positions()) {
        stretch.end = Outcome::kDone;
    }
    return stretch;
}

// REQUIRES: mutex_ held.
uint64_t FakeDevice::dice(uint64_t sides) { return random_() % sides; }

// REQUIRES: mutex_ held.
bool FakeDevice::trouble() {
    return std::uniform_real_distribution<>()(random_) < options_.trouble;
}

}  // namespace kvserver
