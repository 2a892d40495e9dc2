// bindings_cache.cpp: the part of kvserver._native that the index of chunks uses.
#include <nanobind/typing.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "python/bindings.h"
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
        .def("remove", &ObjectTable::remove, "key"_a,
             nb::sig("def remove(self, key: bytes) -> Value"))
        .def("pop", &ObjectTable::pop, nb::sig("def pop(self) -> Value"),
             "Remove any entry; the time does not grow with their number.")
        .def("values", &ObjectTable::values, nb::sig("def values(self) -> list[Value]"))
        .def("__len__", &ObjectTable::size);
}
