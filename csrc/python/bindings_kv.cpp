// bindings_kv.cpp: the part of kvserver._native that serves KV events.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "python/bindings.h"
#include "tables/hash_counts.h"
#include "tables/prefix_index.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

namespace {

// Other threads run while a large table grows.
std::string add(HashCounts& counts, std::string_view hashes, size_t hash_bytes) {
    if (hash_bytes == 0 || counts.has_room(hashes.size() / hash_bytes))
        return counts.add(hashes, hash_bytes);
    const nb::gil_scoped_release others_run;
    return counts.add(hashes, hash_bytes);
}

using ReaderTuple = std::tuple<int, int, int, uint32_t>;
using MatchTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;

std::vector<MatchTuple> match(const PrefixIndex& index, const Memory& hashes, size_t hash_bytes,
                              const std::vector<ReaderTuple>& readers) {
    const Buffer lent(hashes);
    const nb::gil_scoped_release released;
    std::vector<PrefixIndex::Reader> wanted;
    for (const auto& [l0, l1, l2, chunk_blocks] : readers) {
        wanted.push_back({l0, l1, l2, chunk_blocks});
    }
    std::vector<MatchTuple> found;
    for (const auto& [l0, l1, l2, best] : index.match(lent.view(), hash_bytes, wanted)) {
        found.emplace_back(l0, l1, l2, best);
    }
    return found;
}

nb::bytes owners_of(const PrefixIndex& index, const Memory& hashes, size_t hash_bytes,
                    size_t every) {
    const Buffer lent(hashes);
    std::vector<uint64_t> found;
    {
        const nb::gil_scoped_release released;
        found = index.owners_of(lent.view(), hash_bytes, every);
    }
    return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(uint64_t));
}

// Calls the method without the GIL, since other threads may hold the index's lock.
template <typename Method>
auto released(Method method) {
    return [method](PrefixIndex& index, int owner, const nb::bytes& hashes, size_t hash_bytes) {
        const std::string_view raw = view(hashes);
        const nb::gil_scoped_release without;
        return (index.*method)(owner, raw, hash_bytes);
    };
}

void bind_prefix_index(nb::module_& m) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<PrefixIndex>(m, "PrefixIndex",
                            "The owners of each block; `csrc/tables/prefix_index.h` is the manual. "
                            "Any thread may use it.")
        .def(nb::init<uint64_t, size_t>(), "seed"_a, "most_bytes"_a)
        .def("add_owner", &PrefixIndex::add_owner, Free(),
             "A new owner without blocks; -1 if there are 64 owners.")
        .def("clear_owner", &PrefixIndex::clear_owner, "owner"_a, Free())
        .def("remove_owner", &PrefixIndex::remove_owner, "owner"_a, Free())
        .def("add_blocks", released(&PrefixIndex::add_blocks), "owner"_a, "hashes"_a,
             "hash_bytes"_a, "The number of blocks refused for lack of memory.")
        .def("remove_blocks", released(&PrefixIndex::remove_blocks), "owner"_a, "hashes"_a,
             "hash_bytes"_a, "The number of blocks that `owner` did not have.")
        .def("match", &match, "hashes"_a, "hash_bytes"_a, "readers"_a,
             "For each reader (owners of L0, L1, L2, or -1; blocks of a chunk): leading blocks of "
             "each tier, the best.")
        .def("owners_of", &owners_of, "hashes"_a, "hash_bytes"_a, "every"_a,
             "A u64 for the last block of each `every` blocks: bit n is set if owner n has it.")
        .def("owned_blocks", &PrefixIndex::owned_blocks, "owner"_a, Free())
        .def("__len__", &PrefixIndex::size, Free())
        .def_prop_ro("refused", &PrefixIndex::refused, Free())
        .def_prop_ro("memory_bytes", &PrefixIndex::memory_bytes, Free());
}

}  // namespace

void bind_kv(nb::module_& m) {
    nb::class_<HashCounts>(
        m, "HashCounts",
        "The number of copies of each block hash; `csrc/tables/hash_counts.h` is the manual.")
        .def(nb::init<uint64_t>(), "seed"_a)
        .def(
            "add",
            [](HashCounts& counts, const nb::bytes& hashes, size_t hash_bytes) {
                return to_bytes(add(counts, view(hashes), hash_bytes));
            },
            "hashes"_a, "hash_bytes"_a,
            "One byte for each hash: 1 if this is its first copy. No thread may use the table "
            "during the call.")
        .def(
            "remove",
            [](HashCounts& counts, const nb::bytes& hashes, size_t hash_bytes) {
                return to_bytes(counts.remove(view(hashes), hash_bytes));
            },
            "hashes"_a, "hash_bytes"_a,
            "One byte for each hash: 1 if this removed its last copy, 2 if it had no copy.")
        .def(
            "contains",
            [](const HashCounts& counts, const nb::bytes& hashes, size_t hash_bytes) {
                return to_bytes(counts.contains(view(hashes), hash_bytes));
            },
            "hashes"_a, "hash_bytes"_a)
        .def(
            "slice",
            [](const HashCounts& counts, size_t cursor, size_t most) {
                const nb::bytes hashes = to_bytes(counts.slice(cursor, most));
                return std::make_tuple(hashes, cursor);
            },
            "cursor"_a, "most"_a,
            "Up to `most` of the hashes, 32 bytes each, and the cursor of the next slice; the "
            "first cursor is 0.")
        .def("__len__", &HashCounts::size)
        .def_prop_ro("memory_bytes", &HashCounts::memory_bytes);
    bind_prefix_index(m);
}
