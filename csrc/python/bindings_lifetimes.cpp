// bindings_lifetimes.cpp: the part of kvserver._native that follows the lifetimes of L0 blocks.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/bindings.h"
#include "tables/block_lifetimes.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;

void bind_metrics(nb::module_& m) {
    nb::class_<LifetimeHistogram>(m, "LifetimeHistogram")
        .def_ro("counts", &LifetimeHistogram::counts)
        .def_ro("sum", &LifetimeHistogram::sum);
    nb::class_<LifetimeSnapshot>(m, "LifetimeSnapshot")
        .def_ro("allocations", &LifetimeSnapshot::allocations)
        .def_ro("reuses", &LifetimeSnapshot::reuses)
        .def_ro("shared_accesses", &LifetimeSnapshot::shared_accesses)
        .def_ro("evictions", &LifetimeSnapshot::evictions)
        .def_ro("recycled", &LifetimeSnapshot::recycled)
        .def_ro("cleared", &LifetimeSnapshot::cleared)
        .def_ro("lost", &LifetimeSnapshot::lost)
        .def_ro("active_blocks", &LifetimeSnapshot::active_blocks)
        .def_ro("released_blocks", &LifetimeSnapshot::released_blocks)
        .def_ro("lifetime", &LifetimeSnapshot::lifetime)
        .def_ro("idle_before_evict", &LifetimeSnapshot::idle_before_evict)
        .def_ro("since_last_access", &LifetimeSnapshot::since_last_access)
        .def_ro("reuse_gap", &LifetimeSnapshot::reuse_gap);
    nb::class_<LifetimeMetrics>(m, "LifetimeMetrics")
        .def(nb::new_([](std::vector<double> bounds) {
                 return std::make_shared<LifetimeMetrics>(std::move(bounds));
             }),
             "bounds"_a)
        .def("read", &LifetimeMetrics::read, Released());
}

}  // namespace

void bind_lifetimes(nb::module_& m) {
    bind_metrics(m);
    m.def(
        "check_records",
        [](const nb::bytes& records, const nb::bytes& marks, uint64_t num_blocks) {
            check_records(view(records), view(marks), num_blocks);
        },
        "records"_a, "marks"_a, "num_blocks"_a,
        "ValueError states which record or mark is wrong, and why.");
    nb::class_<BlockLifetimes>(m, "BlockLifetimes")
        .def(nb::new_([](std::shared_ptr<LifetimeMetrics> metrics, uint64_t num_blocks,
                         double sample_rate, uint64_t seed) {
                 return make_without_gil<BlockLifetimes>(std::move(metrics), num_blocks,
                                                         sample_rate, seed);
             }),
             "metrics"_a, "num_blocks"_a, "sample_rate"_a, "seed"_a)
        .def_prop_ro("requests", &BlockLifetimes::requests)
        .def_prop_ro_static(
            "bytes_per_block", [](nb::handle) { return BlockLifetimes::bytes_per_block(); },
            "Memory of the table, by block.")
        .def(
            "apply",
            [](BlockLifetimes& lifetimes, const nb::bytes& records, const nb::bytes& marks) {
                const std::string_view raw = view(records), when = view(marks);
                nb::gil_scoped_release released;
                lifetimes.apply(raw, when);
            },
            "records"_a, "marks"_a)
        .def(
            "own_blocks",
            [](BlockLifetimes& lifetimes, uint64_t request, uint32_t group, const nb::bytes& blocks,
               const nb::bytes& contents, uint64_t time_ns, bool watched) {
                const std::string_view ids = view(blocks), names = view(contents);
                nb::gil_scoped_release released;
                lifetimes.own_blocks(request, group, ids, names, time_ns, watched);
            },
            "request"_a, "group"_a, "blocks"_a, "contents"_a, "time_ns"_a, "watched"_a = true)
        .def(
            "release_blocks",
            [](BlockLifetimes& lifetimes, uint64_t request, const nb::bytes& blocks,
               uint64_t time_ns) {
                const std::string_view ids = view(blocks);
                nb::gil_scoped_release released;
                lifetimes.release_blocks(request, ids, time_ns);
            },
            "request"_a, "blocks"_a, "time_ns"_a)
        .def("end_request", &BlockLifetimes::end_request, "request"_a, "time_ns"_a, Released())
        .def("end_all", &BlockLifetimes::end_all, Released());
}
