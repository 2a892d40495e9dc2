// bindings_kv.cpp: the part of kvserver._native that serves KV events.
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "hash_counts.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

namespace {

std::string_view view(const nb::bytes& raw) { return {raw.c_str(), raw.size()}; }
nb::bytes bytes(const std::string& raw) { return nb::bytes(raw.data(), raw.size()); }

}  // namespace

void bind_kv(nb::module_& m) {
    nb::class_<HashCounts>(m, "HashCounts")
        .def(nb::init<uint64_t>(), "seed"_a)
        .def(
            "add",
            [](HashCounts& counts, const nb::bytes& hashes, size_t hash_bytes) {
                return bytes(counts.add(view(hashes), hash_bytes));
            },
            "hashes"_a, "hash_bytes"_a)
        .def(
            "remove",
            [](HashCounts& counts, const nb::bytes& hashes, size_t hash_bytes) {
                return bytes(counts.remove(view(hashes), hash_bytes));
            },
            "hashes"_a, "hash_bytes"_a)
        .def(
            "holds",
            [](const HashCounts& counts, const nb::bytes& hashes, size_t hash_bytes) {
                return bytes(counts.holds(view(hashes), hash_bytes));
            },
            "hashes"_a, "hash_bytes"_a)
        .def(
            "slice",
            [](const HashCounts& counts, size_t cursor, size_t most) {
                const nb::bytes hashes = bytes(counts.slice(cursor, most));
                return nb::make_tuple(hashes, cursor);
            },
            "cursor"_a, "most"_a)
        .def("__len__", &HashCounts::size)
        .def_prop_ro("memory_bytes", &HashCounts::memory_bytes);
}
