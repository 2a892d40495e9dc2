// slotted.h: objects of a Python class with __slots__, in bulk: a field is an address, no call.
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace kvserver {

// The fields of one class, its bases' included. REQUIRES: the class lives as long.
class Slotted {
  public:
    explicit Slotted(PyTypeObject* type) : type_(type) {
        for (PyTypeObject* of = type; of != nullptr; of = of->tp_base) {
            const PyMemberDef* member = of->tp_members;
            for (; member != nullptr && member->name != nullptr; ++member)
                if (member->type == T_OBJECT_EX) fields_.push_back({member->name, member->offset});
        }
    }

    // Throws std::invalid_argument if the class has no such field.
    Py_ssize_t offset(std::string_view name) const {
        for (const Field& field : fields_)
            if (field.name == name) return field.offset;
        throw std::invalid_argument("a class without the slot " + std::string(name));
    }

    // nullptr if the field is not set. A borrowed reference.
    static PyObject*& at(PyObject* of, Py_ssize_t offset) {
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(of) + offset);
    }

    // Throws std::invalid_argument unless the object is of this class, not of a subclass.
    void check(PyObject* of) const {
        if (Py_TYPE(of) != type_) throw std::invalid_argument("objects of several classes");
    }

    // A new object whose fields are those of another one. A new reference.
    nanobind::object copy(PyObject* of) const {
        check(of);
        nanobind::object made = nanobind::steal(type_->tp_alloc(type_, 0));
        if (!made.is_valid()) throw nanobind::python_error();
        for (const Field& field : fields_) {
            at(made.ptr(), field.offset) = at(of, field.offset);
            Py_XINCREF(at(of, field.offset));
        }
        return made;
    }

    // Give a field of the object another value.
    static void set(PyObject* of, Py_ssize_t offset, nanobind::object value) {
        PyObject* old = at(of, offset);
        at(of, offset) = value.release().ptr();
        Py_XDECREF(old);
    }

  private:
    struct Field {
        std::string_view name;
        Py_ssize_t offset;
    };
    PyTypeObject* type_;
    std::vector<Field> fields_;
};

}  // namespace kvserver
