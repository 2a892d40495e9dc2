// bindings_cache.cpp: the part of kvserver._native that the index of chunks uses.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <nanobind/typing.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "python/bindings.h"
#include "python/slotted.h"
#include "tables/key_table.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

namespace {

// A table that has a reference to each key, a bytes object, and to each value.
class ObjectTable {
  public:
    explicit ObjectTable(uint64_t seed) : table_(seed) {}
    ObjectTable(const ObjectTable&) = delete;
    ObjectTable& operator=(const ObjectTable&) = delete;
    ~ObjectTable() { clear(); }

    size_t size() const { return table_.size(); }

    // One value for each key, None where it is absent; with `leading` only those before the first
    // absent one.
    nb::list find(const nb::bytes& keys, bool leading) const {
        if (keys.size() % KeyTable::kKeyBytes != 0) throw nb::value_error("not whole keys");
        nb::list found;
        std::array<void*, KeyTable::kMostAtOnce> values;
        const size_t count = keys.size() / KeyTable::kKeyBytes;
        for (size_t first = 0; first < count; first += values.size()) {
            const size_t part = std::min(values.size(), count - first);
            table_.find(keys.c_str() + first * KeyTable::kKeyBytes, part, values.data());
            for (size_t i = 0; i < part; ++i) {
                if (values[i] == nullptr && leading) return found;
                found.append(values[i] != nullptr ? object(values[i]) : nb::none());
            }
        }
        return found;
    }

    nb::object get(const nb::bytes& key) const {
        void* value = nullptr;
        table_.find(checked(key), 1, &value);
        return value != nullptr ? object(value) : nb::none();
    }

    void add(const nb::bytes& key, const nb::object& value) {
        table_.add({checked(key), value.ptr()});
        key.inc_ref();
        value.inc_ref();
    }

    bool add_absent(const nb::bytes& key, const nb::object& value) {
        if (!table_.add_absent({checked(key), value.ptr()})) return false;
        key.inc_ref();
        value.inc_ref();
        return true;
    }

    // Rows of chunks, of the columns that pack_chunks() makes. Keys are looked up, and then added,
    // kMostAtOnce at a time.
    nb::list add_copies(const nb::object& prototype, const nb::bytes& wanted, const nb::bytes& keys,
                        const nb::bytes& ends, const nb::bytes& counts, const nb::bytes& extents) {
        constexpr size_t kKey = KeyTable::kKeyBytes;
        const size_t rows = wanted.size();
        if (keys.size() != rows * kKey || counts.size() != rows * sizeof(uint32_t) ||
            (rows != 0 && ends.size() % rows != 0))
            throw std::invalid_argument("columns that differ in length");
        const size_t end_bytes = rows != 0 ? ends.size() / rows : 0;
        const Slotted slotted(Py_TYPE(prototype.ptr()));
        const Py_ssize_t key_at = slotted.offset("key"), slots_at = slotted.offset("_slots");
        nb::list made;
        std::array<void*, KeyTable::kMostAtOnce> present;
        size_t at = 0;  // in `extents`
        for (size_t row = 0; row < rows; ++row) {
            const size_t in_part = row % present.size();
            const char* key = keys.c_str() + row * kKey;
            if (in_part == 0)
                table_.find(key, std::min(present.size(), rows - row), present.data());
            uint32_t count;
            std::memcpy(&count, counts.c_str() + row * sizeof(count), sizeof(count));
            const size_t bytes = count * sizeof(Extent);
            if (bytes > extents.size() - at) throw std::invalid_argument("too few extents");
            if (!wanted.c_str()[row] || present[in_part] != nullptr) {
                made.append(nb::none());
            } else {
                nb::object chunk = slotted.copy(prototype.ptr());
                nb::bytes slots =
                    joined(ends.c_str() + row * end_bytes, end_bytes, extents.c_str() + at, bytes);
                nb::bytes own_key(key, kKey);
                Slotted::set(chunk.ptr(), slots_at, std::move(slots));
                Slotted::set(chunk.ptr(), key_at, own_key);
                // Absent a moment ago: but for an earlier row of the same key.
                made.append(add_absent(own_key, chunk) ? chunk : nb::none());
            }
            at += bytes;
        }
        return made;
    }

    nb::object remove(const nb::bytes& key) { return taken(table_.remove(checked(key))); }
    nb::object pop() { return taken(table_.pop()); }

    nb::list values() const {
        nb::list found;
        table_.each([&](const KeyTable::Entry& entry) {
            found.append(object(entry.value));
            return true;
        });
        return found;
    }

    int traverse(visitproc visit, void* argument) const {
        int stopped = 0;
        table_.each([&](const KeyTable::Entry& entry) {
            stopped = visit(static_cast<PyObject*>(entry.value), argument);
            return stopped == 0;
        });
        return stopped;
    }

    void clear() {
        while (size() > 0) taken(table_.pop());
    }

  private:
    static const char* checked(const nb::bytes& key) {
        if (key.size() != KeyTable::kKeyBytes) throw nb::value_error("a key is 32 bytes");
        return key.c_str();
    }

    static nb::bytes joined(const char* first, size_t first_bytes, const char* second,
                            size_t second_bytes) {
        nb::bytes both = new_bytes(first_bytes + second_bytes);
        std::memcpy(PyBytes_AS_STRING(both.ptr()), first, first_bytes);
        std::memcpy(PyBytes_AS_STRING(both.ptr()) + first_bytes, second, second_bytes);
        return both;
    }

    static nb::object object(void* value) { return nb::borrow(static_cast<PyObject*>(value)); }

    // The value of an entry that left the table. The key is the content of a bytes object.
    static nb::object taken(const KeyTable::Entry& entry) {
        if (entry.key == nullptr) throw nb::key_error("no such key");
        char* key = const_cast<char*>(entry.key) - offsetof(PyBytesObject, ob_sval);
        nb::steal(reinterpret_cast<PyObject*>(key));
        return nb::steal(static_cast<PyObject*>(entry.value));
    }

    KeyTable table_;
};

using Columns = std::tuple<nb::bytes, nb::bytes, nb::bytes, nb::bytes, nb::bytes, nb::bytes>;

// Chunks lie anywhere in memory: a chunk is prefetched twice as far ahead as what it refers to.
Columns pack_chunks(const nb::list& chunks, const nb::list& namespaces,
                    const std::vector<uint32_t>& end_bytes) {
    constexpr size_t kAhead = 8;
    const size_t rows = chunks.size();
    if (namespaces.size() != end_bytes.size()) throw std::invalid_argument("namespaces");
    std::unordered_map<PyObject*, uint32_t> places;
    for (size_t i = 0; i < namespaces.size(); ++i) places[namespaces[i].ptr()] = i;
    const nb::bytes places_of = new_bytes(rows * sizeof(uint32_t)),
                    ready_of = new_bytes(rows * sizeof(uint32_t)),
                    counts_of = new_bytes(rows * sizeof(uint32_t)),
                    keys = new_bytes(rows * KeyTable::kKeyBytes);
    const auto words = [](const nb::bytes& of) {
        return reinterpret_cast<uint32_t*>(PyBytes_AS_STRING(of.ptr()));
    };
    uint32_t *place = words(places_of), *ready = words(ready_of), *counts = words(counts_of);
    std::string ends, extents;
    extents.reserve(rows * sizeof(Extent));
    if (rows != 0) {
        const Slotted slotted(Py_TYPE(nb::object(chunks[0]).ptr()));
        const Py_ssize_t key_at = slotted.offset("key"), slots_at = slotted.offset("_slots"),
                         ready_at = slotted.offset("ready"), of_at = slotted.offset("namespace");
        const auto chunk_at = [&](size_t row) { return PyList_GET_ITEM(chunks.ptr(), row); };
        for (size_t row = 0; row < rows; ++row) {
            if (row + 2 * kAhead < rows) {
                const char* later = reinterpret_cast<const char*>(chunk_at(row + 2 * kAhead));
                __builtin_prefetch(later);
                __builtin_prefetch(later + key_at);
                __builtin_prefetch(Slotted::at(chunk_at(row + kAhead), key_at));
                __builtin_prefetch(Slotted::at(chunk_at(row + kAhead), slots_at));
            }
            PyObject* chunk = chunk_at(row);
            slotted.check(chunk);
            const auto key = view(nb::borrow<nb::bytes>(Slotted::at(chunk, key_at)));
            const auto slots = view(nb::borrow<nb::bytes>(Slotted::at(chunk, slots_at)));
            const auto found = places.find(Slotted::at(chunk, of_at));
            if (found == places.end()) throw std::invalid_argument("a chunk of no such namespace");
            place[row] = found->second;
            const size_t of_ends = std::min<size_t>(end_bytes[found->second], slots.size());
            if (key.size() != KeyTable::kKeyBytes || (slots.size() - of_ends) % sizeof(Extent) != 0)
                throw std::invalid_argument("a chunk with another form");
            ready[row] = nb::cast<uint32_t>(nb::handle(Slotted::at(chunk, ready_at)));
            counts[row] = (slots.size() - of_ends) / sizeof(Extent);
            std::memcpy(PyBytes_AS_STRING(keys.ptr()) + row * key.size(), key.data(), key.size());
            ends += slots.substr(0, of_ends);
            extents += slots.substr(of_ends);
        }
    }
    return {places_of, ready_of, keys, to_bytes(ends), counts_of, to_bytes(extents)};
}

// Values refer to their table: Python's collector must see it.
int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<ObjectTable>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
    if (nb::inst_ready(self)) nb::inst_ptr<ObjectTable>(self)->clear();
    return 0;
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {0, nullptr},
};

}  // namespace

void bind_cache(nb::module_& m) {
    m.attr("Value") = nb::type_var("Value");
    nb::class_<ObjectTable>(
        m, "KeyTable", nb::type_slots(slots), nb::sig("class KeyTable(typing.Generic[Value])"),
        "Values by keys of 32 bytes, with a reference to both; `csrc/tables/key_table.h` is the "
        "manual.\n\nValueError for keys of other lengths, or one that is added while it is in the "
        "table; KeyError if there is none to remove.")
        .def(nb::init<uint64_t>(), "seed"_a)
        .def(
            "find",
            [](const ObjectTable& of, const nb::bytes& keys) { return of.find(keys, false); },
            "keys"_a, nb::sig("def find(self, keys: bytes) -> list[Value | None]"),
            "A value for each of the keys, which lie end to end; None for an absent one.")
        .def(
            "find_leading",
            [](const ObjectTable& of, const nb::bytes& keys) { return of.find(keys, true); },
            "keys"_a, nb::sig("def find_leading(self, keys: bytes) -> list[Value]"),
            "The values before the first absent key.")
        .def("get", &ObjectTable::get, "key"_a,
             nb::sig("def get(self, key: bytes) -> Value | None"))
        .def("add", &ObjectTable::add, "key"_a, "value"_a,
             nb::sig("def add(self, key: bytes, value: Value) -> None"))
        .def("add_copies", &ObjectTable::add_copies, "prototype"_a, "wanted"_a, "keys"_a, "ends"_a,
             "counts"_a, "extents"_a,
             nb::sig(
                 "def add_copies(self, prototype: Value, wanted: bytes, keys: bytes, ends: bytes, "
                 "counts: bytes, extents: bytes) -> list[Value | None]"),
             "Add a chunk for each row that is wanted and whose key is absent: a copy of the "
             "prototype with another key and other slots. None for the other rows. The columns are "
             "those of pack_chunks(), and all rows have as many ends.")
        .def("remove", &ObjectTable::remove, "key"_a,
             nb::sig("def remove(self, key: bytes) -> Value"))
        .def("pop", &ObjectTable::pop, nb::sig("def pop(self) -> Value"),
             "Remove any entry; the time does not grow with their number.")
        .def("values", &ObjectTable::values, nb::sig("def values(self) -> list[Value]"))
        .def("__len__", &ObjectTable::size);
    m.def(
        "pack_chunks", &pack_chunks, "chunks"_a, "namespaces"_a, "end_bytes"_a,
        nb::sig("def pack_chunks(chunks: list[typing.Any], namespaces: list[typing.Any], "
                "end_bytes: list[int]) "
                "-> tuple[bytes, bytes, bytes, bytes, bytes, bytes]"),
        "Columns of chunks: each one's namespace, by its place in the list, ready, key, slot ends, "
        "count of extents, extents. `end_bytes`: of a chunk's slot ends, for each namespace.\n\n"
        "ValueError for chunks of another form.");
}
