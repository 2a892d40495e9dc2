// bindings_l2.cpp: the part of kvserver._native that tiers of L2 use.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "l2/extents.h"
#include "l2/file_device.h"
#include "l2/l1_objects.h"
#include "l2/record.h"
#include "l2/record_table.h"
#include "python/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

namespace {

std::string to_string(const nb::bytes& raw) { return {raw.c_str(), raw.size()}; }

std::shared_ptr<Record> make_record(std::shared_ptr<HostRegion> region, uint64_t page_bytes,
                                    const nb::bytes& ns, uint32_t group, const nb::bytes& key,
                                    const nb::bytes& coverage, uint64_t generation,
                                    const std::vector<nb::bytes>& slots,
                                    const std::vector<uint64_t>& slot_bytes) {
    std::vector<std::vector<Extent>> extents;
    for (const nb::bytes& slot : slots) extents.push_back(to_extents(slot));
    return std::make_shared<Record>(L1{std::move(region), page_bytes},
                                    RecordName{to_string(ns), group, to_string(key)},
                                    to_string(coverage), generation, extents, slot_bytes);
}

std::vector<uint32_t> to_counts(const nb::bytes& raw) {
    if (raw.size() % sizeof(uint32_t) != 0) throw std::invalid_argument("counts: not whole u32");
    std::vector<uint32_t> counts(raw.size() / sizeof(uint32_t));
    std::memcpy(counts.data(), raw.c_str(), raw.size());
    return counts;
}

std::tuple<nb::bytes, std::vector<std::pair<uint32_t, uint32_t>>> kept_pages_of(
    const nb::bytes& counts, const nb::bytes& extents, uint32_t pages) {
    const KeptPages kept = kept_pages(to_counts(counts), to_extents(extents), pages);
    std::vector<std::pair<uint32_t, uint32_t>> free;
    for (const Extent& extent : kept.free) free.emplace_back(extent.first, extent.count);
    return {nb::bytes(kept.fits.data(), kept.fits.size()), std::move(free)};
}

nb::bytes digests_of(std::shared_ptr<HostRegion> region, uint64_t page_bytes,
                     const nb::bytes& counts, const nb::bytes& extents, unsigned threads,
                     uint64_t deadline_nanos) {
    const auto of_objects = to_counts(counts);
    const auto pages = to_extents(extents);
    std::vector<DigestBytes> digests;
    {
        nb::gil_scoped_release released;
        digests = digest_objects({std::move(region), page_bytes}, of_objects, pages, threads,
                                 deadline_nanos);
    }
    return nb::bytes(digests.data(), digests.size() * sizeof(DigestBytes));
}

nb::bytes pack(const Record& record) {
    nb::bytes packed = new_bytes(record.packed_bytes());
    auto* data = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(packed.ptr()));
    {
        nb::gil_scoped_release released;
        record.pack(data);
    }
    return packed;
}

void pack_into(const Record& record, const Memory& to) {
    const Buffer buffer(to, PyBUF_WRITABLE);
    if (buffer.size() != record.packed_bytes())
        throw std::invalid_argument("the buffer is not of the size of the packed record");
    nb::gil_scoped_release released;
    record.pack(buffer.data());
}

RecordMatch unpack(const Record& record, const Memory& from) {
    const Buffer buffer(from);
    nb::gil_scoped_release released;
    return record.unpack({buffer.data(), buffer.size()});
}

void unpack_piece(const Record& record, const Memory& header, uint64_t at, const Memory& piece) {
    const Buffer to(header, PyBUF_WRITABLE), from(piece);
    if (to.size() != kHeaderBytes) throw std::invalid_argument("the header has another size");
    nb::gil_scoped_release released;
    record.unpack_piece(to.data(), at, {from.data(), from.size()});
}

RecordMatch match_written(const Record& record, const Memory& header) {
    const Buffer from(header);
    if (from.size() != kHeaderBytes) throw std::invalid_argument("the header has another size");
    nb::gil_scoped_release released;
    return record.match_written(from.data());
}

std::shared_ptr<FileDevice> make_device(int fd, uint64_t page_bytes, uint64_t pages,
                                        unsigned threads, std::shared_ptr<FileCalls> calls) {
    return std::make_shared<FileDevice>(DataFile{fd, page_bytes, pages}, threads, std::move(calls));
}

void submit(FileDevice& device, uint64_t ticket, bool put,
            const std::vector<std::shared_ptr<Record>>& records, const nb::bytes& extents,
            uint64_t deadline_nanos) {
    device.submit(ticket, put, {records.begin(), records.end()}, to_extents(extents),
                  deadline_nanos);
}

using End = std::tuple<uint64_t, FileOutcome, uint64_t, uint64_t, std::string>;

std::vector<End> drain(FileDevice& device) {
    std::vector<End> ends;
    for (FileEnd& end : device.drain())
        ends.emplace_back(end.ticket, end.outcome, end.bytes, end.nanos, std::move(end.what));
    return ends;
}

uint64_t checksum_of(const Memory& data) {
    const Buffer buffer(data);
    if (buffer.size() < kHeaderBytes) return checksum(buffer.view());
    nb::gil_scoped_release released;
    return checksum(buffer.view());
}

uint64_t checksum_of_parts(const std::vector<nb::bytes>& parts) {
    std::vector<std::string_view> views;
    for (const nb::bytes& part : parts) views.push_back(view(part));
    nb::gil_scoped_release released;
    return checksum(views);
}

// ---- RecordTable ------------------------------------------------------------------------------

nb::bytes from_extents(const std::vector<Extent>& extents) {
    return nb::bytes(extents.data(), extents.size() * sizeof(Extent));
}

std::string_view checked_keys(const nb::bytes& keys) {
    if (keys.size() % RecordTable::kKeyBytes != 0) throw nb::value_error("not whole keys");
    return view(keys);
}

std::string_view checked_key(const nb::bytes& key) {
    if (key.size() != RecordTable::kKeyBytes) throw nb::value_error("a key is 32 bytes");
    return view(key);
}

std::string_view checked_namespace(const nb::bytes& ns) {
    if (ns.size() == 0 || ns.size() > RecordName::kMostNamespaceBytes)
        throw nb::value_error("a namespace has 1 to 128 bytes");
    return view(ns);
}

SpaceName space_of(const nb::bytes& ns, uint64_t generation, uint32_t group) {
    return {checked_namespace(ns), generation, group};
}

nb::bytes part_of_extents(const nb::bytes& extents, uint64_t skip, uint64_t pages) {
    return from_extents(part_of(to_extents(extents), skip, pages));
}

nb::int_ holds(const RecordTable& table, const nb::bytes& ns, uint64_t generation, uint32_t group,
               const nb::bytes& keys) {
    const auto bits = table.holds(space_of(ns, generation, group), checked_keys(keys));
    return nb::steal<nb::int_>(_PyLong_FromByteArray(bits.data(), bits.size(), 1, 0));
}

std::optional<std::tuple<uint64_t, nb::bytes, bool>> find(const RecordTable& table,
                                                          const nb::bytes& ns, uint64_t generation,
                                                          uint32_t group, const nb::bytes& key) {
    const auto found = table.find(space_of(ns, generation, group), checked_key(key));
    if (!found) return std::nullopt;
    return std::make_tuple(found->meaning, from_extents(found->extents), found->recovered);
}

void add(RecordTable& table, const nb::bytes& ns, uint64_t generation, uint32_t group,
         const nb::bytes& keys, const nb::bytes& parent, uint64_t meaning,
         const nb::bytes& extents) {
    table.add(space_of(ns, generation, group), checked_keys(keys),
              parent.size() == 0 ? std::string_view() : checked_key(parent), meaning,
              to_extents(extents));
}

std::optional<nb::bytes> remove(RecordTable& table, const nb::bytes& ns, uint64_t generation,
                                uint32_t group, const nb::bytes& key) {
    const auto extents = table.remove(space_of(ns, generation, group), checked_key(key));
    if (!extents) return std::nullopt;
    return from_extents(*extents);
}

std::optional<std::tuple<nb::bytes, uint32_t, nb::bytes, nb::bytes>> evict(RecordTable& table) {
    const auto evicted = table.evict();
    if (!evicted) return std::nullopt;
    return std::make_tuple(to_bytes(evicted->ns), evicted->group, to_bytes(evicted->key),
                           from_extents(evicted->extents));
}

std::vector<std::tuple<nb::bytes, uint64_t, uint32_t, uint64_t>> spaces(const RecordTable& table) {
    std::vector<std::tuple<nb::bytes, uint64_t, uint32_t, uint64_t>> found;
    for (const auto& space : table.spaces())
        found.emplace_back(to_bytes(space.ns), space.generation, space.group, space.records);
    return found;
}

using Keys = std::tuple<nb::bytes, uint64_t, uint32_t, nb::bytes>;

std::pair<std::optional<size_t>, std::vector<Keys>> walk(const RecordTable& table, size_t at,
                                                         size_t most) {
    std::vector<Keys> found;
    for (const auto& [space, keys] : table.walk(at, most))
        found.emplace_back(to_bytes(space->ns), space->generation, space->group, to_bytes(keys));
    return {at == SIZE_MAX ? std::nullopt : std::optional(at), std::move(found)};
}

std::pair<size_t, uint64_t> replay(RecordTable& table, const nb::bytes& data, uint64_t file_id,
                                   uint64_t sequence) {
    const std::string_view bytes = view(data);
    nb::gil_scoped_release released;
    return table.replay(bytes, file_id, sequence);
}

std::pair<size_t, nb::bytes> check_extents(RecordTable& table, uint32_t first, uint32_t pages) {
    std::vector<Extent> gaps;
    size_t dropped = 0;
    {
        nb::gil_scoped_release released;
        dropped = table.check_extents(first, pages, gaps);
    }
    return {dropped, from_extents(gaps)};
}

void bind_record_table(nb::module_& m) {
    m.attr("MOST_IN_UNIT") = kMostInUnit;
    m.def("part_of_extents", &part_of_extents, "extents"_a, "skip"_a, "pages"_a,
          "`pages` pages behind the first `skip`.");
    nb::class_<RecordTable>(m, "RecordTable",
                            "The index of a file tier; `csrc/l2/record_table.h` is the manual. One "
                            "thread uses it.")
        .def(nb::init<uint64_t>(), "seed"_a)
        .def("holds", &holds, "namespace"_a, "generation"_a, "group"_a, "keys"_a)
        .def("find", &find, "namespace"_a, "generation"_a, "group"_a, "key"_a,
             "(meaning, extents, recovered).")
        .def("add", &add, "namespace"_a, "generation"_a, "group"_a, "keys"_a, "parent"_a,
             "meaning"_a, "extents"_a, "A unit of records, whose extents are of equal pages.")
        .def("remove", &remove, "namespace"_a, "generation"_a, "group"_a, "key"_a, "Its extents.")
        .def(
            "touch",
            [](RecordTable& table, const nb::bytes& ns, uint64_t generation, uint32_t group,
               const nb::bytes& keys) {
                table.touch(space_of(ns, generation, group), checked_keys(keys));
            },
            "namespace"_a, "generation"_a, "group"_a, "keys"_a)
        .def("evict", &evict,
             "(namespace, group, key, extents) of a record that was removed; None may mean later "
             "while it is not `swept`.")
        .def("spaces", &spaces, "(namespace, generation, group, records).")
        .def("walk", &walk, "at"_a, "most"_a,
             "Where to go on, None at the end; (namespace, generation, group, keys) of up to "
             "`most` records from `at` on.")
        .def(
            "drop_space",
            [](RecordTable& table, const nb::bytes& ns, uint64_t generation, uint32_t group) {
                return table.drop_space(space_of(ns, generation, group));
            },
            "namespace"_a, "generation"_a, "group"_a)
        .def(
            "sweep",
            [](RecordTable& table, size_t most) { return from_extents(table.sweep(most)); },
            "most"_a, "The extents of records that were removed.")
        .def_prop_ro("swept", &RecordTable::swept)
        .def("begin_log", &RecordTable::begin_log, "file_id"_a, "sequence"_a)
        .def("drain_log", [](RecordTable& table) { return to_bytes(table.drain_log()); })
        .def_prop_ro("log_bytes", &RecordTable::log_bytes)
        .def("begin_next_log", &RecordTable::begin_next_log, "file_id"_a)
        .def("fill_next_log", &RecordTable::fill_next_log, "most"_a)
        .def("drain_next_log", [](RecordTable& table) { return to_bytes(table.drain_next_log()); })
        .def("switch_logs", &RecordTable::switch_logs)
        .def("drop_next_log", &RecordTable::drop_next_log)
        .def_prop_ro("live_journal_bytes", &RecordTable::live_journal_bytes)
        .def("replay", &replay, "data"_a, "file_id"_a, "sequence"_a,
             "(bytes applied, next sequence).")
        .def("link_orphans", &RecordTable::link_orphans, nb::call_guard<nb::gil_scoped_release>())
        .def("check_extents", &check_extents, "first"_a, "pages"_a,
             "(records dropped, free extents).")
        .def_prop_ro("memory_bytes", &RecordTable::memory_bytes)
        .def_prop_ro("steps", &RecordTable::steps,
                     "Records, buckets and leaves that all calls so far looked at.")
        .def("__len__", &RecordTable::size);
}

}  // namespace

void bind_l2(nb::module_& m) {
    m.attr("RECORD_HEADER_BYTES") = kHeaderBytes;
    m.attr("RECORD_FORMAT") = kRecordFormat;
    nb::enum_<RecordMatch>(m, "RecordMatch")
        .value("MATCH", RecordMatch::kMatch)
        .value("OTHER", RecordMatch::kOther)
        .value("CORRUPT", RecordMatch::kCorrupt);
    nb::class_<Record>(
        m, "Record",
        "An object of L1 as L2 stores it, and the memory of its slots; `csrc/l2/record.h` is the "
        "manual.\n\nValueError if the slots do not lie in L1 or have no room for `slot_bytes`.")
        .def(nb::new_(&make_record), "region"_a, "page_bytes"_a, "namespace"_a, "group"_a, "key"_a,
             "coverage"_a, "generation"_a, "slots"_a, "slot_bytes"_a)
        .def("pack", &pack,
             "The header and the slots' bytes, end to end. Other threads of Python run meanwhile.")
        .def("pack_into", &pack_into, "buffer"_a,
             nb::sig("def pack_into(self, buffer: bytearray | memoryview) -> None"),
             "The same into a writable buffer of `packed_bytes`.")
        .def("unpack", &unpack, "buffer"_a,
             "Write a packed record to L1, and match what was written; one of another header or "
             "length writes nothing.")
        .def("unpack_piece", &unpack_piece, "header"_a, "at"_a, "piece"_a,
             "Write bytes of a packed record, from its byte `at` on, to `header`, which has "
             "RECORD_HEADER_BYTES, and to L1. Pieces come in any order.")
        .def("match_written", &match_written, "header"_a,
             "Match a header, and by its digest what L1 has.")
        .def_prop_ro("packed_bytes", &Record::packed_bytes)
        .def_prop_ro("file_bytes", &Record::file_bytes)
        // The last: in the types that are read from here its name hides that of Python's bytes.
        .def_prop_ro("bytes", &Record::bytes);
    nb::enum_<FileOutcome>(m, "FileOutcome")
        .value("DONE", FileOutcome::kDone)
        .value("OTHER", FileOutcome::kOther)
        .value("CORRUPT", FileOutcome::kCorrupt)
        .value("FULL", FileOutcome::kFull)
        .value("LATE", FileOutcome::kLate)
        .value("FAILED", FileOutcome::kFailed)
        .value("CANCELLED", FileOutcome::kCancelled);
    nb::class_<FileCalls>(m, "FileCalls",
                          "The calls below a FileDevice; tests have one with faults.");
    nb::class_<FileDevice>(m, "FileDevice",
                           "Threads that move records between L1 and a data file; "
                           "`csrc/l2/file_device.h` is the manual.")
        .def(nb::new_(&make_device), "fd"_a, "page_bytes"_a, "pages"_a, "threads"_a,
             "calls"_a.none() = nb::none())
        .def_prop_ro("completion_fd", &FileDevice::completion_fd)
        .def("drain", &drain,
             "(ticket, outcome, bytes, nanoseconds, reason) of each ticket that ended.")
        .def("notify", &FileDevice::notify)
        .def("submit", &submit, "ticket"_a, "put"_a, "records"_a, "extents"_a,
             "deadline_nanos"_a = 0)
        .def("cancel", &FileDevice::cancel, "ticket"_a)
        .def("expire", &FileDevice::expire)
        .def_prop_ro("stalled_nanos", &FileDevice::stalled_nanos)
        .def("close", &FileDevice::close, "wait_nanos"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("checksum", &checksum_of, "data"_a,
          "XXH3-64. Of long data other threads of Python run meanwhile.");
    m.def("checksum_of_parts", &checksum_of_parts, "parts"_a, "checksum() of all, end to end.");
    m.def("kept_pages", &kept_pages_of, "counts"_a, "extents"_a, "pages"_a);
    m.def("digest_objects", &digests_of, "region"_a, "page_bytes"_a, "counts"_a, "extents"_a,
          "threads"_a, "deadline_nanos"_a = 0);
    bind_record_table(m);
}
