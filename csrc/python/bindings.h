// bindings.h: what the files of the Python module share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
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

// A slot of Python: pairs of u32. Throws std::invalid_argument if it is not whole pairs.
std::vector<Extent> to_extents(const nanobind::bytes& raw);

// Make a job of a copy's arguments in Python; the word is left out.
std::shared_ptr<CopyJob> make_job(const BlockIds& blocks, const nanobind::bytes& extents,
                                  uint32_t pages_per_slot, uint32_t blocks_per_slot, uint32_t skip,
                                  const std::optional<std::vector<uint64_t>>& chunks);

}  // namespace kvserver
