// kernel_matrix.cpp: the kernels, compiled for the host, against a copy by strides: every byte of
// the destination that belongs to the copy is written exactly once, with what belongs there, and no
// other byte is. Ends with 1 and the case's name at the first difference.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>

#include "counted_kernels.h"
#include "kernel_layouts.h"

namespace {

using kvserver::Direction;
using kvserver::HostGrid;
using kvserver::kNoBlock;
using kvserver::PackedBlocks;
using kvserver::Plane;

uint64_t cases = 0;

void check(bool good, const std::string& name, const char* what) {
    if (good) return;
    std::fprintf(stderr, "%s: %s\n", name.c_str(), what);
    std::exit(1);
}

// ---- orders of threads ----------------------------------------------------------------------
uint64_t reversed(uint64_t index, uint64_t threads) { return threads - 1 - index; }
// A permutation, since a launch has 256 * n threads, n < 1000003, which is a prime.
uint64_t shuffled(uint64_t index, uint64_t threads) { return index * 1000003 % threads; }

const HostGrid kGrids[] = {{nullptr, 1}, {reversed, 2}, {shuffled, 1}};

// ---- memory ---------------------------------------------------------------------------------
// Its end is known to the sanitizer, its begin is `misaligned` bytes behind a multiple of 64.
class Memory {
  public:
    Memory(uint64_t size, uint64_t misaligned, unsigned seed)
        : whole_(static_cast<std::byte*>(operator new(size + misaligned, kAlign))),
          data_(whole_ + misaligned),
          size_(size) {
        std::minstd_rand random(seed);
        for (uint64_t i = 0; i < size; ++i) data_[i] = static_cast<std::byte>(random() >> 8);
    }
    ~Memory() { operator delete(whole_, kAlign); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::byte* data() { return data_; }
    uint64_t size() const { return size_; }
    std::vector<std::byte> copy() const { return {data_, data_ + size_}; }
    bool equals(const std::vector<std::byte>& other) const {
        return std::equal(other.begin(), other.end(), data_);
    }

  private:
    static constexpr std::align_val_t kAlign{64};
    std::byte* whole_;
    std::byte* data_;
    uint64_t size_;
};

// ---- one case -------------------------------------------------------------------------------
struct Copy {
    Direction direction;
    std::vector<uint32_t> blocks;  // [positions][groups]
    uint32_t skip = 0;             // positions that the caller leaves out
    uint64_t misaligned = 0;       // of the engine's memory
    uint64_t packed_misaligned = 0;
};

std::string title(const Layout& layout, const Copy& copy) {
    std::string text = layout.name + (copy.direction == Direction::kStore ? ", store" : ", load") +
                       ", skip " + std::to_string(copy.skip) + ", bases + " +
                       std::to_string(copy.misaligned) + " and " +
                       std::to_string(copy.packed_misaligned) + ", blocks";
    for (uint32_t block : copy.blocks) text += " " + std::to_string(static_cast<int>(block));
    return text;
}

void run(const Layout& layout, const Copy& copy, const HostGrid& grid) {
    const std::string name = title(layout, copy);
    const uint64_t position_bytes = layout.position_bytes();
    const uint64_t positions = copy.blocks.size() / layout.groups;
    Memory memory(layout.bytes, copy.misaligned, 1);
    Memory packed(positions * position_bytes, copy.packed_misaligned, 2);
    const std::vector<Plane> planes = planes_of(layout, memory.data());
    const std::vector<uint32_t> blocks(copy.blocks.begin() + copy.skip * layout.groups,
                                       copy.blocks.end());

    std::vector<std::byte> memory_after = memory.copy(), packed_after = packed.copy();
    Memory& destination = copy.direction == Direction::kStore ? packed : memory;
    std::vector<uint8_t> times(destination.size()), times_expected(destination.size());
    const uint64_t skipped = copy.skip * position_bytes;
    const bool store = copy.direction == Direction::kStore;
    copy_by_strides(copy.direction, layout, blocks, memory_after.data(),
                    packed_after.data() + skipped, times_expected.data() + (store ? skipped : 0));

    counted = {destination.data(), destination.size(), times.data(), 0};
    counted_copy_blocks(
        copy.direction,
        {planes.data(), static_cast<uint32_t>(planes.size()), layout.groups, blocks.data(),
         static_cast<uint32_t>(positions - copy.skip), position_bytes, packed.data() + skipped},
        grid);
    uint64_t payload = 0;
    for (uint8_t once : times_expected) payload += once;
    check(counted.bytes == payload, name, "wrote another number of bytes than the payload's");
    check(times == times_expected, name, "bytes were not written exactly once, or others were");
    check(memory.equals(memory_after), name, "the engine's memory differs");
    check(packed.equals(packed_after), name, "the packed memory differs");
    ++cases;
}

// Both directions, and the orders of threads in turn.
void run_all_ways(const Layout& layout, Copy copy) {
    for (Direction direction : {Direction::kStore, Direction::kLoad}) {
        copy.direction = direction;
        run(layout, copy, kGrids[cases % std::size(kGrids)]);
    }
}

// ---- the cases ------------------------------------------------------------------------------
// Every layout x element size x blocks x skip x direction.
void layouts() {
    const std::vector<uint32_t> id_lists[] = {{5}, {2, 3, 4, 5}, {7, 1, 10, 4}, {9, 8, 7, 6}};
    for (uint64_t element_bytes : {2, 1}) {
        for (const Layout& layout : engine_layouts(11, element_bytes)) {
            for (const auto& ids : id_lists) {
                std::vector<uint32_t> blocks;
                for (uint32_t id : ids) {
                    for (uint32_t group = 0; group < layout.groups; ++group) {
                        blocks.push_back((id + group * 5) % 11);
                    }
                }
                for (uint32_t skip : {0u, 1u, 3u}) {
                    if (skip < ids.size()) run_all_ways(layout, {{}, blocks, skip});
                }
            }
        }
    }
}

// Bases that are not aligned to a vector, each side on its own.
void misaligned_layouts() {
    for (const Layout& layout : engine_layouts(7, 1)) {
        const std::vector<uint32_t> blocks =
            layout.groups == 1 ? std::vector<uint32_t>{3, 1, 6} : std::vector<uint32_t>{3, 0, 1, 6};
        for (uint64_t misaligned : {0, 8, 4, 3}) {
            for (uint64_t packed_misaligned : {0, 8, 1}) {
                run_all_ways(layout, {{}, blocks, 0, misaligned, packed_misaligned});
            }
        }
    }
}

void boundaries() {
    const std::vector<uint64_t> runs = boundary_runs();
    for (uint64_t run : runs) {
        // The second block and the second plane begin where the first ones' runs leave them.
        const Layout one = of_runs("run of " + std::to_string(run), {run}, 3, 0);
        const Layout two = of_runs("runs of " + std::to_string(run) + " and 48", {48, run}, 3,
                                   (16 - run % 16) % 16);
        for (uint64_t misaligned : {0, 8, 4, 1}) {
            run_all_ways(one, {{}, {2, 0}, 0, misaligned, 0});
            run_all_ways(two, {{}, {1}, 0, misaligned, misaligned == 1 ? 1u : 0u});
        }
    }
    run_all_ways(of_runs("all those runs", runs, 2, 5), {{}, {1, 0}, 0});
    run_all_ways(of_runs("all those runs, longest first", {runs.rbegin(), runs.rend()}, 2, 0),
                 {{}, {1, 0}, 0});
}

// Tables whose planes differ widely in length, and tables of very many or very short planes.
void mixed_tables() {
    run_all_ways(of_runs("300 planes of a byte", std::vector<uint64_t>(300, 1), 4, 0),
                 {{}, {3, 0}});
    run_all_ways(of_runs("70 planes of a piece", std::vector<uint64_t>(70, 2048), 4, 0),
                 {{}, {3, 0}});
    run_all_ways(of_runs("long among short", {256, 1 << 20, 256, 3, 2048, 2047, 1}, 2, 0),
                 {{}, {1}});
    std::mt19937 random(7);
    for (int table = 0; table < 150; ++table) {
        std::vector<uint64_t> runs(1 + random() % 20);
        for (uint64_t& run : runs) run = 1 + random() % (1 << (1 + random() % 14));
        const auto groups = static_cast<uint32_t>(1 + random() % std::min<size_t>(3, runs.size()));
        const Layout layout =
            of_runs("table " + std::to_string(table), runs, 16, random() % 3 * 8, groups);
        std::vector<uint32_t> blocks(16);
        for (uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
        std::shuffle(blocks.begin(), blocks.end(), random);
        blocks.resize(groups * (1 + random() % 4));
        for (uint32_t& block : blocks) {
            if (random() % 4 == 0) block = kNoBlock;
        }
        run_all_ways(layout, {{}, blocks, 0, random() % 2 * 8});
    }
}

// Groups that have no block at some positions: first, last, all and none.
void holes() {
    const std::vector<uint32_t> lists[] = {{kNoBlock, 1, 2, 3, 4, kNoBlock},
                                           {0, kNoBlock, kNoBlock, kNoBlock, kNoBlock, 5},
                                           {kNoBlock, kNoBlock},
                                           {6, 5, 4, 3}};
    for (const Layout& layout : engine_layouts(7, 2)) {
        if (layout.groups != 2) continue;
        for (const auto& blocks : lists) {
            run_all_ways(layout, {{}, blocks});
            if (blocks.size() > 2) run_all_ways(layout, {{}, blocks, 1});
        }
    }
}

// ---- more than 4 GiB ------------------------------------------------------------------------
template <typename T>
T* reserve(uint64_t size) {
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) std::perror("mmap"), std::exit(1);
    return static_cast<T*>(at);
}

constexpr uint64_t kGiB = 1ull << 30;

// Where a run lies: `there` in the engine's memory, `here` in the packed one.
struct Far {
    uint64_t there, here;
};

void run_far(const std::string& name, const Plane& plane, const std::vector<uint32_t>& blocks,
             std::byte* memory, std::byte* packed, const std::vector<Far>& runs,
             const std::vector<Direction>& directions) {
    uint8_t* times = reserve<uint8_t>(10 * kGiB);
    for (Direction direction : directions) {
        const bool store = direction == Direction::kStore;
        for (const Far& far : runs) {
            std::memset(memory + far.there, store ? 0x5a : 0, plane.run);
            std::memset(packed + far.here, store ? 0 : 0xa5, plane.run);
        }
        counted = {store ? packed : memory, 10 * kGiB, times, 0};
        counted_copy_blocks(
            direction,
            {&plane, 1, 1, blocks.data(), static_cast<uint32_t>(blocks.size()), plane.run, packed},
            kGrids[2]);
        check(counted.bytes == runs.size() * plane.run, name, "wrote another number of bytes");
        for (const Far& far : runs) {
            const std::byte* to = store ? packed + far.here : memory + far.there;
            for (uint64_t i = 0; i < plane.run; ++i) {
                uint8_t& once = times[to - counted.data + i];
                check(once == 1, name, "bytes were not written exactly once");
                check(to[i] == std::byte(store ? 0x5a : 0xa5), name, "bytes differ");
                once = 0;
            }
        }
        ++cases;
    }
    munmap(times, 10 * kGiB);
}

// A block whose offset alone is above 4 GiB, in a plane whose base is so too.
void far_blocks(std::byte* memory, std::byte* packed) {
    const uint64_t stride = 48 << 10;
    const Plane plane{memory + 4 * kGiB + 64, stride, 5000, 0, 0};
    run_far("a far block", plane, {90001, 3, 90000}, memory, packed,
            {{4 * kGiB + 64 + 90001 * stride, 0},
             {4 * kGiB + 64 + 3 * stride, 5000},
             {4 * kGiB + 64 + 90000 * stride, 10000}},
            {Direction::kStore, Direction::kLoad});
}

// A position that lies above 4 GiB; those before it are holes. It takes seconds, so: one way.
void far_positions(std::byte* memory, std::byte* packed) {
    const uint64_t run = 1 << 20;
    std::vector<uint32_t> blocks(4099, kNoBlock);
    blocks[1] = 2;
    blocks[4098] = 1;
    run_far("a far position", {memory, run, run, 0, 0}, blocks, memory, packed,
            {{2 * run, run}, {run, 4098 * run}}, {Direction::kLoad});
}

}  // namespace

int main() {
    auto* memory = reserve<std::byte>(10 * kGiB);
    auto* packed = reserve<std::byte>(10 * kGiB);
    boundaries();
    far_blocks(memory, packed);
    mixed_tables();
    layouts();
    misaligned_layouts();
    holes();
    far_positions(memory, packed);
    std::printf("%lu cases\n", static_cast<unsigned long>(cases));
}
