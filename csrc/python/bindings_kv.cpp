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

std::string_view view(const nb::bytes& raw) { return {raw.c_str(), raw.size()}; }
nb::bytes bytes(const std::string& raw) { return nb::bytes(raw.data(), raw.size()); }

// Other threads run while a large table grows.
std::string add(HashCounts& counts, std::string_view hashes, size_t hash_bytes) {
    if (hash_bytes == 0 || counts.has_room(hashes.size() / hash_bytes))
        return counts.add(hashes, hash_bytes);
    const nb::gil_scoped_release others_run;
    return counts.add(hashes, hash_bytes);
}

using ReaderTuple = std::tuple<int, int, int, uint32_t>;
using MatchTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;

// The bytes of a Python buffer, not copied: a slice of a message, for example.
class Lent {
  public:
    explicit Lent(const nb::object& from) {
        if (PyObject_GetBuffer(from.ptr(), &buffer_, PyBUF_SIMPLE) != 0) nb::raise_python_error();
    }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    ~Lent() { PyBuffer_Release(&buffer_); }
    std::string_view view() const {
        return {static_cast<const char*>(buffer_.buf), static_cast<size_t>(buffer_.len)};
    }

  private:
    Py_buffer buffer_;
};

std::vector<MatchTuple> match(const PrefixIndex& index, const nb::object& hashes, size_t hash_bytes,
                              const std::vector<ReaderTuple>& readers) {
    const Lent lent(hashes);
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

nb::bytes owners_of(const PrefixIndex& index, const nb::object& hashes, size_t hash_bytes,
                    size_t every) {
    const Lent lent(hashes);
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
    nb::class_<PrefixIndex>(m, "PrefixIndex")
        .def(nb::init<uint64_t, size_t>(), "seed"_a, "most_bytes"_a)
        .def("add_owner", &PrefixIndex::add_owner, Free())
        .def("clear_owner", &PrefixIndex::clear_owner, "owner"_a, Free())
        .def("remove_owner", &PrefixIndex::remove_owner, "owner"_a, Free())
        .def("add_blocks", released(&PrefixIndex::add_blocks), "owner"_a, "hashes"_a,
             "hash_bytes"_a)
        .def("remove_blocks", released(&PrefixIndex::remove_blocks), "owner"_a, "hashes"_a,
             "hash_bytes"_a)
        .def("match", &match, "hashes"_a, "hash_bytes"_a, "readers"_a)
        .def("owners_of", &owners_of, "hashes"_a, "hash_bytes"_a, "every"_a)
        .def("owned_blocks", &PrefixIndex::owned_blocks, "owner"_a, Free())
        .def("__len__", &PrefixIndex::size, Free())
        .def_prop_ro("refused", &PrefixIndex::refused, Free())
        .def_prop_ro("memory_bytes", &PrefixIndex::memory_bytes, Free());
}

}  // namespace

void bind_kv(nb::module_& m) {
    nb::class_<HashCounts>(m, "HashCounts")
        .def(nb::init<uint64_t>(), "seed"_a)
        .def(
            "add",
            [](HashCounts& counts, const nb::bytes& hashes, size_t hash_bytes) {
                return bytes(add(counts, view(hashes), hash_bytes));
            },
            "hashes"_a, "hash_bytes"_a)
        .def(
            "remove",
            [](HashCounts& counts, const nb::bytes& hashes, size_t hash_bytes) {
                return bytes(counts.remove(view(hashes), hash_bytes));
            },
            "hashes"_a, "hash_bytes"_a)
        .def(
            "contains",
            [](const HashCounts& counts, const nb::bytes& hashes, size_t hash_bytes) {
                return bytes(counts.contains(view(hashes), hash_bytes));
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
    bind_prefix_index(m);
}
