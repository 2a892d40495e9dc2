// bindings_gpu.cpp: the part of kvserver._native that is about GPUs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "gpu/gpu_device.h"
#include "gpu/pieces.h"
#include "gpu/pinner.h"
#include "python/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;
using GpuPtr = std::shared_ptr<Gpu>;

std::shared_ptr<GpuMapping> by_ipc(GpuPtr gpu, const nb::bytes& raw, uint64_t offset,
                                   uint64_t size) {
    GpuHandle handle{.kind = GpuHandle::Kind::kIpc};
    if (raw.size() != handle.bytes.size())
        throw std::invalid_argument("a handle of GPU memory has 64 bytes");
    std::memcpy(handle.bytes.data(), raw.c_str(), raw.size());
    return std::make_shared<GpuMapping>(std::move(gpu), handle, offset, size);
}

auto gpu_tuple(const GpuInfo& info) {
    return std::make_tuple(info.uuid, info.name, info.pci, info.memory_bytes);
}

using PieceTuple = std::tuple<uintptr_t, uintptr_t, uint64_t, uint64_t, uint64_t, uint64_t>;

std::vector<PieceTuple> dma_pieces(std::shared_ptr<HostRegion> region, uint64_t page_bytes,
                                   const BlockIds& blocks, const nb::bytes& extents,
                                   uint32_t pages_per_slot, uint32_t blocks_per_slot,
                                   uint32_t skip) {
    const L1 l1{std::move(region), page_bytes};
    check_l1(l1);
    const auto job = make_job(blocks, extents, pages_per_slot, blocks_per_slot, skip, std::nullopt);
    check_job(*job, l1);
    const Pieces pieces = run_pieces(*job, l1, 0, job->positions());
    std::vector<PieceTuple> tuples;
    for (const Piece& piece : pieces.list())
        tuples.emplace_back(reinterpret_cast<uintptr_t>(piece.to),
                            reinterpret_cast<uintptr_t>(piece.from), piece.bytes, piece.rows,
                            piece.to_pitch, piece.from_pitch);
    return tuples;
}

}  // namespace

void bind_gpu(nb::module_& m) {
    m.attr("GPU_BATCH_BYTES") = kBatchBytes;
    m.attr("GPU_STAGING_BYTES") = 2 * kSlots * kBatchBytes;  // both directions
    m.attr("GPU_SLOTS") = kSlots;
    m.attr("GPU_MOST_SLOTS") = kMostSlots;
    m.attr("GPU_SPARE_BYTES") = kSpareBytes;
    m.attr("GPU_SHORT_LOAD_BYTES") = kShortLoadBytes;
    m.attr("GPU_SHORT_STORE_BYTES") = kShortStoreBytes;
    m.attr("PIN_BYTES") = HostRegion::kPinBytes;
    m.def("built_with_cuda", &built_with_cuda);
    m.def(
        "cuda_gpus",
        [] {
            std::vector<decltype(gpu_tuple({}))> found;
            for (const GpuInfo& info : cuda_gpus()) found.push_back(gpu_tuple(info));
            return found;
        },
        Released(),
        "(uuid, name, pci, bytes of memory) of each. RuntimeError is why there is none.");
    m.def("cuda_gpu", &cuda_gpu, "uuid"_a);

    m.def("dma_pieces", &dma_pieces, "region"_a, "page_bytes"_a, "blocks"_a, "extents"_a,
          "pages_per_slot"_a, "blocks_per_slot"_a, "skip"_a = 0,
          "(to, from, bytes of a row, rows, to's pitch, from's pitch) of each piece that a copy of "
          "one batch would be by DMA.");

    nb::enum_<Way>(m, "Way").value("DMA", Way::kDma).value("STAGED", Way::kStaged);
    nb::class_<Gpu>(m, "Gpu").def_prop_ro("uuid", &Gpu::uuid).def_prop_ro("lost", &Gpu::lost);

    nb::class_<GpuMapping, Mapping>(m, "GpuMapping")
        .def_static("by_ipc", &by_ipc, "gpu"_a, "handle"_a, "offset"_a, "size"_a)
        .def_static(
            "by_fd",
            [](GpuPtr gpu, int fd, uint64_t offset, uint64_t size) {
                return std::make_shared<GpuMapping>(
                    std::move(gpu), GpuHandle{.kind = GpuHandle::Kind::kFd, .fd = fd}, offset,
                    size);
            },
            "gpu"_a, "fd"_a, "offset"_a, "size"_a);

    nb::class_<GpuDevice, Device>(m, "GpuDevice")
        .def(nb::new_([](std::shared_ptr<HostRegion> region, uint64_t page_bytes, GpuPtr gpu,
                         uint64_t batch_bytes, std::optional<Way> way, uint64_t short_store_bytes,
                         uint64_t short_load_bytes, unsigned most_slots) {
                 return make_without_gil<GpuDevice>(
                     std::move(region), page_bytes, std::move(gpu),
                     GpuOptions{batch_bytes, way, short_store_bytes, short_load_bytes, most_slots});
             }),
             "region"_a, "page_bytes"_a, "gpu"_a, "batch_bytes"_a = kBatchBytes,
             "way"_a = nb::none(), "short_store_bytes"_a = kShortStoreBytes,
             "short_load_bytes"_a = kShortLoadBytes, "most_slots"_a = kMostSlots)
        .def_prop_ro("gpu", &GpuDevice::gpu)
        .def_prop_ro("mapped_bytes", &GpuDevice::mapped_bytes)
        .def(
            "counts",
            [](const GpuDevice& device, Direction direction) {
                const LaneCounts& counts = device.counts(direction);
                return std::make_tuple(counts.dma_bytes.load(), counts.staged_bytes.load(),
                                       counts.unpinned_bytes.load(), counts.staging_bytes.load());
            },
            "direction"_a, "(bytes by DMA, bytes staged, unpinned bytes of these, staging memory)");

    nb::class_<Pinner>(m, "Pinner")
        .def(nb::new_([](std::shared_ptr<HostRegion> region, GpuPtr gpu, unsigned threads,
                         std::vector<unsigned> cpus) {
                 return make_without_gil<Pinner>(std::move(region), std::move(gpu), threads,
                                                 std::move(cpus));
             }),
             "region"_a, "gpu"_a, "threads"_a, "cpus"_a = std::vector<unsigned>())
        .def_prop_ro("error", &Pinner::error)
        .def_prop_ro("done", &Pinner::done)
        .def_prop_ro("seconds", &Pinner::seconds);
}
