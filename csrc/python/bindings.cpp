// bindings.cpp: kvserver._native. Converts, checks nothing that the core checks already.
#include "python/bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "copy/cpu_device.h"
#include "copy/host_copy.h"
#include "copy/last_words.h"
#include "tables/block_runs.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

void bind_gpu(nb::module_& m);  // bindings_gpu.cpp
void bind_cache(nb::module_& m);
void bind_kv(nb::module_& m);         // bindings_kv.cpp
void bind_l2(nb::module_& m);         // bindings_l2.cpp
void bind_lifetimes(nb::module_& m);  // bindings_lifetimes.cpp
void bind_what_if(nb::module_& m);    // bindings_what_if.cpp

std::vector<Extent> kvserver::to_extents(const nb::bytes& raw) {
    if (raw.size() % sizeof(Extent) != 0)
        throw std::invalid_argument("extents: not whole pairs of u32");
    std::vector<Extent> extents(raw.size() / sizeof(Extent));
    std::memcpy(extents.data(), raw.c_str(), raw.size());
    return extents;
}

namespace {

std::shared_ptr<BlockIds> make_ids(std::shared_ptr<PlaneTable> planes, Direction direction,
                                   const nb::bytes& packed, uint64_t least, uint64_t most,
                                   uint32_t null_block) {
    return std::make_shared<BlockIds>(std::move(planes), direction, view(packed), least, most,
                                      null_block);
}

}  // namespace

std::shared_ptr<CopyJob> kvserver::make_job(const BlockIds& blocks, const nb::bytes& extents,
                                            uint32_t pages_per_slot, uint32_t blocks_per_slot,
                                            uint32_t skip,
                                            const std::optional<std::vector<uint64_t>>& chunks) {
    auto job = std::make_shared<CopyJob>(blocks, blocks_per_slot, chunks ? &*chunks : nullptr);
    job->extents = to_extents(extents);
    job->pages_per_slot = pages_per_slot;
    job->skip = skip;
    return job;
}

namespace {

using Row = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t>;

std::shared_ptr<PlaneTable> make_table(std::vector<std::shared_ptr<Mapping>> memories,
                                       const std::vector<Row>& rows, uint64_t num_blocks) {
    std::vector<PlaneTable::Row> converted;
    converted.reserve(rows.size());
    for (const auto& [memory, offset, stride, run, group] : rows)
        converted.push_back({memory, offset, stride, run, group});
    return std::make_shared<PlaneTable>(std::move(memories), converted, num_blocks);
}

void submit_copy(Device& device, uint64_t ticket, const BlockIds& blocks, const nb::bytes& extents,
                 uint32_t pages_per_slot, uint32_t blocks_per_slot, uint32_t skip,
                 const std::optional<std::vector<uint64_t>>& chunks,
                 std::shared_ptr<WordMapping> word_memory, uint64_t word_index, uint64_t sequence,
                 uint64_t deadline_nanos) {
    auto job = make_job(blocks, extents, pages_per_slot, blocks_per_slot, skip, chunks);
    job->ticket = ticket;
    if (word_memory) {
        job->word = word_memory->word(word_index);
        if (job->word == nullptr)
            throw std::invalid_argument(
                "state word index outside its page, or the page not mapped");
        job->word_memory = std::move(word_memory);
    }
    job->sequence = sequence;
    job->deadline_nanos = deadline_nanos;
    nb::gil_scoped_release released;
    device.submit_copy(std::move(job));
}

nb::bytes pack_bytes(const std::vector<uint32_t>& ids) { return to_bytes(pack_blocks(ids)); }

nb::bytes unpack_bytes(const nb::bytes& packed, uint64_t most) {
    const std::vector<uint32_t> ids = unpack_blocks(view(packed), most);
    return nb::bytes(ids.data(), ids.size() * sizeof(uint32_t));
}

using End = std::tuple<uint64_t, Outcome, uint64_t, uint64_t, std::string>;

std::vector<End> drain(Device& device) {
    std::vector<End> ends;
    for (Completion& c : device.drain())
        ends.emplace_back(c.ticket, c.outcome, c.bytes, c.nanos, std::move(c.what));
    return ends;
}

std::vector<std::tuple<uint64_t, uint64_t>> drain_parts(Device& device) {
    std::vector<std::tuple<uint64_t, uint64_t>> parts;
    for (const Part& part : device.drain_parts()) parts.emplace_back(part.ticket, part.slots);
    return parts;
}

using Released = nb::call_guard<nb::gil_scoped_release>;

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native module; `csrc/copy/device.h` is its manual.";
    m.attr("NO_BLOCK") = kNoBlock;
    m.attr("MAX_GROUPS") = kMaxGroups;
    nb::enum_<State>(m, "State", nb::is_arithmetic())
        .value("IDLE", State::kIdle)
        .value("PENDING", State::kPending)
        .value("RUNNING", State::kRunning)
        .value("DONE", State::kDone)
        .value("FAILED", State::kFailed)
        .value("CANCELLED", State::kCancelled)
        .value("CANCELLING", State::kCancelling);
    nb::enum_<Direction>(m, "Direction")
        .value("STORE", Direction::kStore)
        .value("LOAD", Direction::kLoad);
    nb::enum_<Outcome>(m, "Outcome")
        .value("DONE", Outcome::kDone)
        .value("FAILED", Outcome::kFailed)
        .value("CANCELLED", Outcome::kCancelled)
        .value("LATE", Outcome::kLate)
        .value("MEMORY_LOST", Outcome::kMemoryLost)
        .value("DEVICE_LOST", Outcome::kDeviceLost);

    nb::class_<Mapping>(m, "Mapping")
        .def("intact", &Mapping::intact)
        .def_prop_ro("mapped", &Mapping::mapped)
        .def_prop_ro("size", &Mapping::size);
    nb::class_<FileMapping, Mapping>(m, "FileMapping")
        .def(
            nb::new_([](int fd, uint64_t size) { return std::make_shared<FileMapping>(fd, size); }),
            "fd"_a, "size"_a);
    nb::class_<WordMapping, Mapping>(m, "WordMapping")
        .def(
            nb::new_([](int fd, uint64_t size) { return std::make_shared<WordMapping>(fd, size); }),
            "fd"_a, "size"_a)
        .def(
            "fail_word",
            [](WordMapping& page, uint64_t index, uint64_t sequence) {
                Word* word = page.word(index);
                if (word == nullptr) throw std::out_of_range("state word index");
                return move_word(*word, sequence, State::kPending, State::kFailed);
            },
            "index"_a, "sequence"_a,
            "Refuse an operation before it began: PENDING -> FAILED. False if it was cancelled.");
    nb::class_<PlaneTable>(m, "PlaneTable")
        .def(nb::new_(&make_table), "memories"_a, "rows"_a, "num_blocks"_a)
        .def_prop_ro("num_blocks", &PlaneTable::num_blocks)
        .def_prop_ro("block_bytes", &PlaneTable::block_bytes)
        .def_prop_ro("groups", &PlaneTable::groups);
    nb::class_<BlockIds>(
        m, "BlockIds",
        "The blocks that a copy names, checked; `csrc/copy/block_ids.h` is the manual.")
        .def(nb::new_(&make_ids), "planes"_a, "direction"_a, "packed"_a, "least"_a, "most"_a,
             "null_block"_a = 0, "ValueError states what is wrong.")
        .def_prop_ro("direction", &BlockIds::direction)
        .def_prop_ro("positions", &BlockIds::positions);
    nb::class_<HostRegion>(m, "HostRegion")
        .def(nb::new_([](uint64_t size, uint64_t huge_page_bytes, bool transparent,
                         std::vector<unsigned> nodes, bool bound, int fd) {
                 return make_without_gil<HostRegion>(
                     size, Placement{huge_page_bytes, transparent, std::move(nodes), bound}, fd);
             }),
             "size"_a, "huge_page_bytes"_a = 0, "transparent"_a = true,
             "nodes"_a = std::vector<unsigned>(), "bound"_a = false, "fd"_a = -1)
        .def_prop_ro("size", &HostRegion::size)
        .def_prop_ro(
            "address",
            [](const HostRegion& region) { return reinterpret_cast<uintptr_t>(region.data()); },
            "For benchmarks, which look at its bytes.")
        .def(
            "populate",
            [](HostRegion& region, uint64_t offset, uint64_t bytes) {
                if (offset > region.size() || bytes > region.size() - offset)
                    throw std::invalid_argument("bytes beyond L1");
                nb::gil_scoped_release released;
                return region.populate(offset, bytes);
            },
            "offset"_a, "bytes"_a, "Make the memory of these bytes; `host_region.h` is the manual.")
        .def("unmap_pages", &HostRegion::unmap_pages, "threads"_a,
             nb::call_guard<nb::gil_scoped_release>(),
             "Unmap what is in a file; `host_region.h` is the manual.")
        .def_prop_ro("pinned_bytes",
                     [](const HostRegion& region) { return region.pinned_bytes.load(); })
        .def_prop_ro("numa_error", &HostRegion::numa_error)
        .def_prop_ro("numa_policy", [](const HostRegion& region) {
            const NumaPolicy policy = numa_policy_at(region.data());
            return std::make_tuple(policy.mode, policy.nodes);
        });
    m.def("process_numa_policy", [] {
        const NumaPolicy policy = numa_policy_at(nullptr);
        return std::make_tuple(policy.mode, policy.nodes);
    });
    nb::class_<WordPage>(m, "WordPage")
        .def(nb::init<uint64_t>(), "words"_a)
        .def_prop_ro("fd", &WordPage::fd)
        .def_prop_ro("count", &WordPage::count)
        .def(
            "arm",
            [](WordPage& page, uint64_t index, uint64_t sequence) {
                page.at(index).store(make_word(sequence, State::kPending),
                                     std::memory_order_release);
            },
            "index"_a, "sequence"_a, "Begin an operation: the word becomes PENDING.")
        .def(
            "state",
            [](WordPage& page, uint64_t index) {
                return static_cast<State>(page.at(index).load(std::memory_order_acquire) & 0xff);
            },
            "index"_a)
        .def(
            "move",
            [](WordPage& page, uint64_t index, uint64_t sequence, State from, State to) {
                return move_word(page.at(index), sequence, from, to);
            },
            "index"_a, "sequence"_a, "from_"_a, "to"_a)
        .def(
            "wait",
            [](WordPage& page, uint64_t index, double seconds) {
                return wait_word(page.at(index),
                                 static_cast<uint64_t>(std::max(0.0, seconds) * 1e9));
            },
            "index"_a, "seconds"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Wait until the word is neither PENDING nor RUNNING, `seconds` at most; True if it is "
            "neither.");
    nb::class_<Device>(m, "Device")
        .def_prop_ro("completion_fd", &Device::completion_fd)
        .def_prop_ro("lost", &Device::lost)
        .def("submit_copy", &submit_copy, "ticket"_a, "blocks"_a, "extents"_a, "pages_per_slot"_a,
             "blocks_per_slot"_a, "skip"_a = 0, "chunks"_a.none() = nb::none(),
             "word_memory"_a.none() = nb::none(), "word_index"_a = 0, "sequence"_a = 0,
             "deadline_nanos"_a = 0)
        .def("cancel", &Device::cancel, "ticket"_a, Released())
        .def("submit_map", &Device::submit_map, "ticket"_a, "mappings"_a, Released())
        .def("submit_unmap", &Device::submit_unmap, "ticket"_a, "mappings"_a, Released())
        .def("drain", &drain, Released(),
             "(ticket, outcome, bytes, nanoseconds, reason) of each ticket that ended.")
        .def("drain_parts", &drain_parts, Released(),
             "(ticket, slots) of stores whose first slots are copied and count.");
    nb::class_<CpuDevice, Device>(m, "CpuDevice")
        .def(
            nb::new_(&make_without_gil<CpuDevice, std::shared_ptr<HostRegion>, uint64_t, unsigned>),
            "region"_a, "page_bytes"_a, "threads"_a);

    m.def(
        "next_lines",
        [](int from) {
            std::string lines;
            {
                nb::gil_scoped_release released;
                lines = next_lines(from);
            }
            return to_bytes(lines);
        },
        "from_"_a, "Lines in a stream socket; `csrc/copy/last_words.h` is the manual.");
    m.def("copy_last_words", &copy_last_words, "from_"_a, "to"_a,
          "Descriptors; `csrc/copy/last_words.h` is the manual.");
    m.def("pack_blocks", &pack_bytes, "ids"_a,
          "The wire form of ids; `csrc/tables/block_runs.h` is the manual.");
    m.def("unpack_blocks", &unpack_bytes, "packed"_a, "most"_a,
          "The u32 ids of a wire form with at most `most` ids; ValueError states what is wrong.");
    bind_gpu(m);
    bind_cache(m);
    bind_kv(m);
    bind_l2(m);
    bind_lifetimes(m);
    bind_what_if(m);
}
