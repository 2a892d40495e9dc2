// bindings.h: what the files of the Python module share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "copy/device.h"

namespace kvserver {

// Joining threads and unmapping memory are slow; Python's other threads run meanwhile.
template <typename T>
struct DeleteWithoutGil {
    void operator()(T* object) const {
        if (!PyGILState_Check()) {
            delete object;
            return;
        }
        nanobind::gil_scoped_release released;
        delete object;
    }
};

template <typename T, typename... Arguments>
std::shared_ptr<T> make_without_gil(Arguments... arguments) {
    nanobind::gil_scoped_release released;
    return {new T(std::move(arguments)...), DeleteWithoutGil<T>()};
}

// The caller's reference keeps the bytes while the GIL is released.
inline std::string_view view(const nanobind::bytes& raw) { return {raw.c_str(), raw.size()}; }
inline nanobind::bytes to_bytes(std::string_view raw) {
    return nanobind::bytes(raw.data(), raw.size());
}
// To be filled before any other sees it.
inline nanobind::bytes new_bytes(size_t size) {
    nanobind::object made =
        nanobind::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    if (!made.is_valid()) throw nanobind::python_error();
    return nanobind::borrow<nanobind::bytes>(made);
}

// A slot of Python: pairs of u32. Throws std::invalid_argument if it is not whole pairs.
std::vector<Extent> to_extents(const nanobind::bytes& raw);

// An object with contiguous memory: bytes, a memoryview, a mapped file.
struct Memory : nanobind::object {
    NB_OBJECT(Memory, nanobind::object, "typing_extensions.Buffer", PyObject_CheckBuffer)
};

// A view of the memory, not copied.
class Buffer {
  public:
    explicit Buffer(const nanobind::object& owner, int flags = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(owner.ptr(), &view_, flags) != 0) throw nanobind::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }
    std::string_view view() const { return {static_cast<const char*>(view_.buf), size()}; }

  private:
    Py_buffer view_;
};

// Make a job of a copy's arguments in Python; the word is left out.
std::shared_ptr<CopyJob> make_job(const BlockIds& blocks, const nanobind::bytes& extents,
                                  uint32_t pages_per_slot, uint32_t blocks_per_slot, uint32_t skip,
                                  const std::optional<std::vector<uint64_t>>& chunks);

}  // namespace kvserver
