// bindings_lives.cpp: the part of kvserver._native that follows the lives of L0 blocks.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/bindings.h"
#include "tables/block_lives.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;

// The caller's reference keeps the bytes while the GIL is released.
std::string_view view(const nb::bytes& raw) { return {raw.c_str(), raw.size()}; }

void bind_figures(nb::module_& m) {
    nb::class_<LifeHistogram>(m, "LifeHistogram")
        .def_ro("counts", &LifeHistogram::counts)
        .def_ro("sum", &LifeHistogram::sum);
    nb::class_<LifeSnapshot>(m, "LifeSnapshot")
        .def_ro("allocations", &LifeSnapshot::allocations)
        .def_ro("reuses", &LifeSnapshot::reuses)
        .def_ro("shared_accesses", &LifeSnapshot::shared_accesses)
        .def_ro("evictions", &LifeSnapshot::evictions)
        .def_ro("recycled", &LifeSnapshot::recycled)
        .def_ro("cleared", &LifeSnapshot::cleared)
        .def_ro("lost", &LifeSnapshot::lost)
        .def_ro("active_blocks", &LifeSnapshot::active_blocks)
        .def_ro("released_blocks", &LifeSnapshot::released_blocks)
        .def_ro("lifetime", &LifeSnapshot::lifetime)
        .def_ro("idle_before_evict", &LifeSnapshot::idle_before_evict)
        .def_ro("since_last_access", &LifeSnapshot::since_last_access)
        .def_ro("reuse_gap", &LifeSnapshot::reuse_gap);
    nb::class_<LifeFigures>(m, "LifeFigures")
        .def(nb::new_([](std::vector<double> bounds) {
                 return std::make_shared<LifeFigures>(std::move(bounds));
             }),
             "bounds"_a)
        .def("read", &LifeFigures::read, Released());
}

}  // namespace

void bind_lives(nb::module_& m) {
    bind_figures(m);
    m.def(
        "check_records",
        [](const nb::bytes& records, const nb::bytes& marks, uint64_t num_blocks) {
            check_records(view(records), view(marks), num_blocks);
        },
        "records"_a, "marks"_a, "num_blocks"_a);
    nb::class_<BlockLives>(m, "BlockLives")
        .def(nb::new_([](std::shared_ptr<LifeFigures> figures, uint64_t num_blocks,
                         double sample_rate, uint64_t seed) {
                 return make_without_gil<BlockLives>(std::move(figures), num_blocks, sample_rate,
                                                     seed);
             }),
             "figures"_a, "num_blocks"_a, "sample_rate"_a, "seed"_a)
        .def_prop_ro("num_blocks", &BlockLives::num_blocks)
        .def_prop_ro("requests", &BlockLives::requests)
        .def_prop_ro_static("bytes_per_block",
                            [](nb::handle) { return BlockLives::bytes_per_block(); })
        .def(
            "apply",
            [](BlockLives& lives, const nb::bytes& records, const nb::bytes& marks) {
                const std::string_view raw = view(records), when = view(marks);
                nb::gil_scoped_release released;
                lives.apply(raw, when);
            },
            "records"_a, "marks"_a)
        .def(
            "hold",
            [](BlockLives& lives, uint64_t request, uint32_t group, const nb::bytes& blocks,
               const nb::bytes& contents, uint64_t time_ns, bool watched) {
                const std::string_view ids = view(blocks), names = view(contents);
                nb::gil_scoped_release released;
                lives.hold(request, group, ids, names, time_ns, watched);
            },
            "request"_a, "group"_a, "blocks"_a, "contents"_a, "time_ns"_a, "watched"_a = true)
        .def(
            "release",
            [](BlockLives& lives, uint64_t request, const nb::bytes& blocks, uint64_t time_ns) {
                const std::string_view ids = view(blocks);
                nb::gil_scoped_release released;
                lives.release(request, ids, time_ns);
            },
            "request"_a, "blocks"_a, "time_ns"_a)
        .def("end_request", &BlockLives::end_request, "request"_a, "time_ns"_a, Released())
        .def("end_all", &BlockLives::end_all, Released());
}
