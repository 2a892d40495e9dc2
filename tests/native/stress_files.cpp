// stress_files.cpp: the file device under sanitizers: threads put and get records over one file
// whose calls are short, late, wrong or hang, others cancel and expire them.
//
// Checked: every ticket ends exactly once; a get that is done has the bytes of the put of its
// record; no thread touches L1 after close(). The index, its journal and its replacement, and
// records that are packed for shared stores, whole and damaged, are of one thread.
#include "stress_files.h"

#include <sys/mman.h>
#include <sys/select.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "copy/threads.h"
#include "l2/file_device.h"
#include "l2/record.h"
#include "l2/record_table.h"
#include "testing/faulty_file.h"

using namespace kvserver;

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kRecords = 24;
constexpr uint32_t kSlotPages = 20;  // of each record, in L1 and in the file, in three extents
constexpr uint64_t kSlotBytes = kSlotPages * kPage - 100;
constexpr size_t kSeal = 336;  // from there on each byte of a header counts
constexpr uint32_t kFilePages = kRecords * (kSlotPages + 1);

std::vector<Extent> extents_at(uint32_t first, uint32_t pages) {
    return {{first + pages - 5, 5}, {first, 1}, {first + 1, pages - 6}};
}

struct Place {
    std::shared_ptr<Record> record;
    uint32_t first;  // page of L1
};

Place make_place(const std::shared_ptr<HostRegion>& region, uint32_t number, uint32_t first) {
    std::string key(RecordName::kKeyBytes, static_cast<char>(number));
    return {std::make_shared<Record>(
                L1{region, kPage}, RecordName{"namespace", number, key}, std::string(16, 'c'), 7,
                std::vector<std::vector<Extent>>{extents_at(first, kSlotPages)},
                std::vector<uint64_t>{kSlotBytes}),
            first};
}

std::byte content(uint32_t number) { return static_cast<std::byte>(number * 7 + 1); }

std::vector<FileEnd> wait(FileDevice& device, size_t count) {
    std::vector<FileEnd> found;
    while (found.size() < count) {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(device.completion_fd(), &set);
        timeval limit{20, 0};
        CHECK(select(device.completion_fd() + 1, &set, nullptr, nullptr, &limit) == 1);
        for (auto& end : device.drain()) found.push_back(std::move(end));
    }
    return found;
}

struct Scene {
    std::shared_ptr<HostRegion> region =
        std::make_shared<HostRegion>(2 * kRecords * kSlotPages * kPage);
    std::shared_ptr<FaultyFile> faults = std::make_shared<FaultyFile>();
    int fd = memfd_create("data", 0);
    std::vector<Place> sources, targets;

    Scene() {
        CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(kFilePages * kPage)) == 0);
        for (uint32_t i = 0; i < kRecords; ++i) {
            sources.push_back(make_place(region, i, i * kSlotPages));
            targets.push_back(make_place(region, i, (kRecords + i) * kSlotPages));
            std::memset(region->data() + i * kSlotPages * kPage, static_cast<int>(content(i)),
                        kSlotPages * kPage);
        }
    }
    ~Scene() { close(fd); }

    std::vector<Extent> file_extents(uint32_t number) const {
        return extents_at(number * (kSlotPages + 1), kSlotPages + 1);
    }
};

// Each record is written, then read while faults are switched on and off and tickets cancelled.
void puts_and_gets(unsigned threads) {
    Scene scene;
    FileDevice device({scene.fd, kPage, kFilePages}, threads, scene.faults);
    scene.faults->writes.most_bytes = 3 * kPage;
    for (uint32_t i = 0; i < kRecords; ++i)
        device.submit(i, true, {scene.sources[i].record}, scene.file_extents(i), 0);
    for (const FileEnd& end : wait(device, kRecords)) CHECK(end.outcome == FileOutcome::kDone);
    // Two of them once more, as a unit whose extents are not those of its records, with pages to
    // spare behind each. Then what it has overwritten.
    constexpr uint32_t kShare = kSlotPages + 3;
    device.submit(0, true, {scene.sources[0].record, scene.sources[1].record},
                  {{0, 2}, {2, 2 * kShare - 2}}, 0);
    CHECK(wait(device, 1).front().bytes == 2 * kSlotBytes);
    for (uint32_t i = 0; i < 2; ++i) {
        device.submit(i, false, {scene.targets[i].record}, {{i * kShare, kShare}}, 0);
        CHECK(wait(device, 1).front().outcome == FileOutcome::kDone);
    }
    for (uint32_t i = 0; i < 3; ++i) {
        device.submit(i, true, {scene.sources[i].record}, scene.file_extents(i), 0);
        CHECK(wait(device, 1).front().outcome == FileOutcome::kDone);
    }
    std::mt19937 random(threads);
    for (int round = 0; round < 20; ++round) {
        scene.faults->reads.error = round % 4 == 1 ? EIO : 0;
        scene.faults->reads.flip_every = round % 4 == 2 ? 2 : 0;
        scene.faults->reads.most_bytes = round % 4 == 3 ? kPage : 0;
        scene.faults->reads.delay_micros = round % 2 == 0 ? 50 : 0;
        std::thread troubles([&, seed = random()] {
            std::mt19937 own(seed);
            for (int i = 0; i < 20; ++i) {
                device.cancel(own() % kRecords);
                device.expire();
                (void)device.stalled_nanos();
                std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
            }
        });
        for (uint32_t i = 0; i < kRecords; ++i) {
            const uint64_t late = i % 7 == 0 ? monotonic_nanos() + 100'000 : 0;
            // Half of them are written once more meanwhile: the same bytes, to the same pages.
            const bool put = i % 2 == 0;
            device.submit(i, put, {(put ? scene.sources : scene.targets)[i].record},
                          scene.file_extents(i), late);
        }
        std::set<uint64_t> ended;
        for (const FileEnd& end : wait(device, kRecords)) {
            CHECK(ended.insert(end.ticket).second);
            const auto number = static_cast<uint32_t>(end.ticket);
            if (end.outcome != FileOutcome::kDone || number % 2 == 0) continue;
            CHECK(end.bytes == kSlotBytes);
            const std::byte* at = scene.region->data() + scene.targets[number].first * kPage;
            for (uint64_t i = 0; i < (kSlotPages - 6) * kPage; i += 97)
                CHECK(at[kPage + i] == content(number) || i > (kSlotPages - 6) * kPage - 101);
        }
        troubles.join();
    }
    CHECK(device.close(10'000'000'000));
}

// A device whose thread hangs is closed and destroyed; its memory stays until the thread let go.
void hanging_thread() {
    std::weak_ptr<HostRegion> region;
    std::shared_ptr<FaultyFile> faults;
    {
        Scene scene;
        region = scene.region;
        faults = scene.faults;
        faults->hang(true);
        FileDevice device({scene.fd, kPage, kFilePages}, 2, scene.faults);
        device.submit(1, false, {scene.targets[1].record}, scene.file_extents(1), 0);
        while (faults->hanging() == 0) std::this_thread::yield();
        CHECK(!device.close(1'000'000));
    }
    CHECK(!region.expired());
    faults->hang(false);
    for (int i = 0; i < 20'000 && !region.expired(); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(region.expired());
}

// The index and its journal: what was added and not removed is found again.
void table_and_journal() {
    std::mt19937 random(3);
    RecordTable table(1);
    table.begin_log(9, 0);
    std::map<std::string, uint32_t> there;
    std::string log;
    const SpaceName space{"namespace", 4, 2};
    const auto key = [](uint32_t number) {
        std::string made(RecordTable::kKeyBytes, 'k');
        std::memcpy(made.data(), &number, sizeof(number));
        return made;
    };
    for (uint32_t step = 0; step < 20'000; ++step) {
        const uint32_t number = random() % 500;
        if (there.contains(key(number))) {
            CHECK(table.remove(space, key(number)).has_value());
            there.erase(key(number));
        } else {
            // A unit of it and of those behind it that are not there.
            std::string keys = key(number);
            uint32_t more = 1;
            for (; more < step % 17 && !there.contains(key(number + more)); ++more)
                keys += key(number + more);
            table.add(space, keys, key(number / 2), step,
                      {{step + 1, more}, {step + 99, 2 * more}});
            for (uint32_t i = 0; i < more; ++i) there[key(number + i)] = step;
        }
        if (step % 50 == 0) {
            if (const auto evicted = table.evict()) there.erase(evicted->key);
            log += table.drain_log();
        }
    }
    log += table.drain_log();
    RecordTable again(2);
    CHECK(again.replay(log, 9, 0).first == log.size());
    again.link_orphans();
    CHECK(again.size() == there.size() && table.size() == there.size());
    for (const auto& [name, meaning] : there) CHECK(again.find(space, name)->meaning == meaning);
    for (int i = 0; i < 200; ++i) {
        std::string damaged = log;
        damaged[random() % damaged.size()] ^= static_cast<char>(1 << random() % 8);
        damaged.resize(random() % damaged.size() + 1);
        RecordTable other(3);
        CHECK(other.replay(damaged, 9, 0).first <= damaged.size());
        std::vector<Extent> gaps;
        other.check_extents(1, 15'000, gaps);
    }
}

// A journal is replaced slice by slice while the index changes: replay of either finds the same.
void compaction() {
    std::mt19937 random(5);
    RecordTable table(1);
    table.begin_log(9, 0);
    std::string log, next;
    const auto key = [](uint32_t number) {
        return std::string(RecordTable::kKeyBytes - 1, 'k') + static_cast<char>(number);
    };
    uint32_t page = 1;
    std::vector<uint64_t> generations{1, 2, 3};  // none returns once its space was dropped
    const auto change = [&] {
        uint64_t& generation = generations[random() % generations.size()];
        const SpaceName space{"namespace", generation, 0};
        const std::string name = key(random() % 100);
        if (!table.find(space, name))
            table.add(space, name, key(random() % 100), page, {{page, 1}});
        else if (random() % 2 == 0)
            table.remove(space, name);
        else
            table.touch(space, name + key(random() % 100));
        ++page;
        if (random() % 400 == 0 && table.drop_space(space)) generation = page + 10;
        if (!table.swept()) table.sweep(random() % 20);
        (void)table.holds(space, key(1) + key(2) + key(3));
    };
    for (uint64_t file = 10; file < 40; ++file) {
        for (int i = 0; i < 300; ++i) change();
        table.begin_next_log(file);
        next.clear();
        while (!table.fill_next_log(1 + random() % 50)) {
            change();
            next += table.drain_next_log();
        }
        next += table.drain_next_log();
        log += table.drain_log();
        table.switch_logs();
        RecordTable before(2), after(3);
        CHECK(before.replay(log, file == 10 ? 9 : file - 1, 0).first == log.size());
        CHECK(after.replay(next, file, 0).first == next.size());
        for (const auto& space : table.spaces()) {
            const SpaceName name{space.ns, space.generation, space.group};
            for (uint32_t number = 0; number < 100; ++number) {
                const auto found = table.find(name, key(number));
                for (const RecordTable* each : {&before, &after}) {
                    const auto other = each->find(name, key(number));
                    CHECK(found.has_value() == other.has_value());
                    CHECK(!found || found->extents[0].first == other->extents[0].first);
                }
            }
        }
        log = next;
    }
}

// Of any damage unpack() makes a refusal; after that a whole record is unpacked all the same.
void packed_records() {
    Scene scene;
    std::mt19937 random(7);
    for (uint32_t i = 0; i < kRecords; ++i) {
        const Record& source = *scene.sources[i].record;
        std::vector<std::byte> packed(source.packed_bytes());
        source.pack(packed.data());
        const Record& target = *scene.targets[i].record;
        std::byte* at = scene.region->data() + scene.targets[i].first * kPage;
        for (int damage = 0; damage < 20; ++damage) {
            std::vector<std::byte> other = packed;
            if (damage % 3 == 0)
                other.resize(random() % other.size());
            else
                other[kSeal + random() % (other.size() - kSeal)] ^= std::byte{1} << random() % 8;
            if (damage % 3 == 1) other.push_back(std::byte{0});
            CHECK(target.unpack(other) != RecordMatch::kMatch);
        }
        CHECK(target.unpack(packed) == RecordMatch::kMatch);
        CHECK(at[kPage] == content(i));
        CHECK(scene.targets[(i + 1) % kRecords].record->unpack(packed) == RecordMatch::kCorrupt);
        std::vector<std::byte> header(kHeaderBytes);
        const uint64_t step = 1 + random() % packed.size();
        for (uint64_t end = packed.size(); end != 0; end -= std::min(step, end)) {
            const uint64_t size = std::min(step, end);
            const std::vector<std::byte> piece(packed.begin() + static_cast<long>(end - size),
                                               packed.begin() + static_cast<long>(end));
            CHECK(target.match_written(header.data()) != RecordMatch::kMatch);
            target.unpack_piece(header.data(), end - size, piece);
        }
        CHECK(target.match_written(header.data()) == RecordMatch::kMatch);
    }
}

}  // namespace

void stress_files() {
    for (unsigned threads : {1u, 2u, 4u}) puts_and_gets(threads);
    hanging_thread();
    table_and_journal();
    compaction();
    packed_records();
}
