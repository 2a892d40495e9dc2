// kernel_layouts.h: KV caches as tensors: engines' layouts, the planes that they come down to, and
// a copy of blocks by strides alone that knows no planes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "copy/plane.h"

struct Dim {
    uint64_t size, stride;  // in bytes
};

// Outermost dimension first, without that of the blocks.
struct Tensor {
    uint64_t offset;  // in the engine's memory
    uint64_t block_stride;
    uint64_t element_bytes;
    std::vector<Dim> dims;
    uint32_t group = 0;

    uint64_t elements() const {
        uint64_t product = 1;
        for (const Dim& dim : dims) product *= dim.size;
        return product;
    }
    uint64_t block_bytes() const { return elements() * element_bytes; }
    // Where that element of a block lies, elements counted row by row.
    uint64_t address(uint64_t block, uint64_t element) const {
        uint64_t at = offset + block * block_stride;
        for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
            at += element % dim->size * dim->stride;
            element /= dim->size;
        }
        return at;
    }
};

struct Layout {
    std::string name;
    std::vector<Tensor> tensors;
    uint64_t bytes = 0;  // of the engine's memory
    uint32_t groups = 1;

    uint64_t position_bytes() const {
        uint64_t sum = 0;
        for (const Tensor& tensor : tensors) sum += tensor.block_bytes();
        return sum;
    }
};

using Sizes = std::map<char, uint64_t>;

// One more tensor behind the others, contiguous but for `padding` bytes behind each B. `order`
// names the dimensions, outermost first.
inline void add_tensor(Layout& layout, const std::string& order, Sizes sizes,
                       uint64_t element_bytes, uint64_t padding = 0, uint32_t group = 0) {
    Tensor tensor{layout.bytes, 0, element_bytes, {}, group};
    uint64_t stride = element_bytes;
    for (auto name = order.rbegin(); name != order.rend(); ++name) {
        if (*name == 'B') {
            stride += padding;
            tensor.block_stride = stride;
        } else {
            tensor.dims.insert(tensor.dims.begin(), {sizes.at(*name), stride});
        }
        stride *= sizes.at(*name);
    }
    layout.bytes += stride;
    layout.tensors.push_back(tensor);
}

// The contiguous tail is the run, the other dimensions enumerate planes.
inline std::vector<kvserver::Plane> planes_of(const Layout& layout, std::byte* memory) {
    std::vector<kvserver::Plane> planes;
    uint64_t slot_offset = 0;
    for (const Tensor& tensor : layout.tensors) {
        uint64_t run = tensor.element_bytes;
        size_t outer = tensor.dims.size();
        while (outer > 0 && tensor.dims[outer - 1].stride == run) run *= tensor.dims[--outer].size;
        for (uint64_t element = 0; element < tensor.elements();
             element += run / tensor.element_bytes) {
            planes.push_back({memory + tensor.address(0, element), tensor.block_stride, run,
                              slot_offset, tensor.group});
            slot_offset += run;
        }
    }
    return planes;
}

// What the kernels should do, element by element: also how often each byte of the destination is
// written. `blocks` is [positions][groups].
inline void copy_by_strides(kvserver::Direction direction, const Layout& layout,
                            const std::vector<uint32_t>& blocks, std::byte* memory,
                            std::byte* packed, uint8_t* times) {
    for (size_t position = 0; position < blocks.size() / layout.groups; ++position) {
        uint64_t at = position * layout.position_bytes();
        for (const Tensor& tensor : layout.tensors) {
            const uint32_t block = blocks[position * layout.groups + tensor.group];
            for (uint64_t element = 0; element < tensor.elements(); ++element) {
                const uint64_t place = at + element * tensor.element_bytes;
                if (block == kvserver::kNoBlock) continue;
                const uint64_t address = tensor.address(block, element);
                const bool store = direction == kvserver::Direction::kStore;
                std::memcpy(store ? packed + place : memory + address,
                            store ? memory + address : packed + place, tensor.element_bytes);
                for (uint64_t i = 0; i < tensor.element_bytes; ++i) {
                    ++times[(store ? place : address) + i];
                }
            }
            at += tensor.block_bytes();
        }
    }
}

// Every layout that engines use, for elements of that many bytes.
inline std::vector<Layout> engine_layouts(uint64_t num_blocks, uint64_t element_bytes) {
    const Sizes sizes{{'B', num_blocks}, {'L', 3}, {'2', 2}, {'N', 16},
                      {'H', 2},          {'1', 1}, {'C', 40}};
    constexpr int kLayers = 3;
    std::vector<Layout> layouts;
    auto add = [&](const char* name, int tensors, const std::string& order, uint64_t channels,
                   uint64_t padding = 0) {
        Layout layout{name, {}};
        Sizes own = sizes;
        own['C'] = channels;
        for (int i = 0; i < tensors; ++i) add_tensor(layout, order, own, element_bytes, padding);
        layouts.push_back(layout);
    };
    add("cross-layer", 1, "BL2NHC", 40);
    add("per-layer [2, NB, ...]", kLayers, "2BNHC", 40);
    add("per-layer [NB, 2, ...]", kLayers, "B2NHC", 40);
    add("MLA", kLayers, "BNC", 576);
    add("SGLang MHA", 2 * kLayers, "BNHC", 40);
    add("SGLang MLA", kLayers, "BN1C", 576);
    add("head-major", kLayers, "2HBNC", 40);
    for (const char* order : {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"}) {
        add(order, 1, order, 80);
    }
    add("padded pages", kLayers, "BNHC", 40, 256);
    add("pages padded by an odd count", kLayers, "BNHC", 40, 77);

    Layout indexed{"fp8 MLA with an indexer", {}};
    Layout hybrid{"two groups", {}, 0, 2};
    for (int i = 0; i < kLayers; ++i) {
        Sizes own = sizes;
        own['C'] = 656;
        add_tensor(indexed, "BNC", own, element_bytes);
        own['C'] = 132;
        add_tensor(indexed, "BNC", own, element_bytes);
        own['C'] = i == 0 ? 64 : 200;
        add_tensor(hybrid, "B2NHC", own, element_bytes, 0, i % 2);
    }
    layouts.push_back(indexed);
    layouts.push_back(hybrid);
    return layouts;
}

// A plane for each run; `padding` bytes lie behind each block of it.
inline Layout of_runs(const std::string& name, const std::vector<uint64_t>& runs,
                      uint64_t num_blocks, uint64_t padding, uint32_t groups = 1) {
    Layout layout{name, {}, 0, groups};
    for (size_t i = 0; i < runs.size(); ++i) {
        add_tensor(layout, "BC", {{'B', num_blocks}, {'C', runs[i]}}, 1, padding,
                   static_cast<uint32_t>(i % groups));
    }
    return layout;
}

// Around every count of vectors at which a warp's loop changes its course, for each vector.
inline std::vector<uint64_t> boundary_runs() {
    std::vector<uint64_t> runs;
    for (uint64_t vector : {16, 8, 4, 1}) {
        for (uint64_t vectors : {1, 2, 32, 64, 96, 128, 160, 256, 512}) {
            const uint64_t boundary = vectors * vector;
            for (uint64_t run : {boundary - vector, boundary, boundary + vector}) {
                for (uint64_t odd : {run - 1, run, run + 1}) {
                    if (odd > 0 && odd < 1 << 20) runs.push_back(odd);
                }
            }
        }
    }
    std::sort(runs.begin(), runs.end());
    runs.erase(std::unique(runs.begin(), runs.end()), runs.end());
    return runs;
}
