// bindings.cpp: kvserver_testing, the simulators as a Python module of the tests. Their base
// classes are bound by kvserver._native.
#include "python/bindings.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "copy/cpu_device.h"
#include "testing/fake_device.h"
#include "testing/fake_gpu.h"
#include "testing/faulty_file.h"
#include "testing/slow_copies.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

using Released = nb::call_guard<nb::gil_scoped_release>;

NB_MODULE(kvserver_testing, m) {
    nb::module_::import_("kvserver._native");
    nb::enum_<FakeDevice::Order>(m, "Order")
        .value("SUBMITTED", FakeDevice::Order::kSubmitted)
        .value("REVERSED", FakeDevice::Order::kReversed);
    nb::class_<FakeDevice, Device>(m, "FakeDevice")
        .def(
            "__init__",
            [](FakeDevice* self, std::shared_ptr<HostRegion> region, uint64_t page_bytes,
               uint64_t seed, double trouble, unsigned delay_micros) {
                new (self) FakeDevice(std::move(region), page_bytes,
                                      {.seed = seed, .trouble = trouble, .slow = {delay_micros}});
            },
            "region"_a, "page_bytes"_a, "seed"_a = 0, "trouble"_a = 0.0, "delay_micros"_a = 0)
        .def_prop_ro("open", &FakeDevice::open)
        .def_prop_ro("newest_blocks", &FakeDevice::newest_blocks)
        .def("run", &FakeDevice::run, "ticket"_a, "blocks"_a, Released())
        .def("release", &FakeDevice::release, "ticket"_a, Released())
        .def("release_all", &FakeDevice::release_all, "order"_a = FakeDevice::Order::kSubmitted,
             Released())
        .def("report", &FakeDevice::report, "ticket"_a, Released())
        .def("fail", &FakeDevice::fail, "ticket"_a, "blocks"_a, "what"_a, Released())
        .def("step", &FakeDevice::step, Released())
        .def("lose", &FakeDevice::lose, "what"_a, Released())
        .def("recover", &FakeDevice::recover, Released())
        .def(
            "read_l1",
            [](const FakeDevice& device, uint64_t page) {
                const L1& l1 = device.l1();
                if (page >= l1.region->size() / l1.page_bytes)
                    throw std::out_of_range("a page outside L1");
                return nb::bytes(l1.region->data() + page * l1.page_bytes, l1.page_bytes);
            },
            "page"_a);
    m.def(
        "slow_cpu",
        [](std::shared_ptr<HostRegion> region, uint64_t page_bytes, unsigned threads,
           unsigned delay_micros, std::string pause_file, uint64_t pause_at, uint64_t part_bytes) {
            return make_without_gil<CpuDevice>(
                std::move(region), page_bytes, threads,
                SlowCopies{delay_micros, std::move(pause_file), pause_at},
                CpuOptions{.part_bytes = part_bytes});
        },
        "region"_a, "page_bytes"_a, "threads"_a, "delay_micros"_a = 0, "pause_file"_a = "",
        "pause_at"_a = 0, "part_bytes"_a = CpuOptions{}.part_bytes);
    nb::class_<FakeGpu, Gpu>(m, "FakeGpu")
        .def(nb::new_([](std::string uuid, uint64_t seed, unsigned delay_micros,
                         uint64_t memory_bytes, std::string pause_file) {
                 return make_without_gil<FakeGpu>(
                     std::move(uuid),
                     FakeGpu::Options{seed, {delay_micros, std::move(pause_file)}, memory_bytes});
             }),
             "uuid"_a, "seed"_a = 0, "delay_micros"_a = 0, "memory_bytes"_a = uint64_t{1} << 30,
             "pause_file"_a = "")
        .def("pause", &FakeGpu::pause, Released())
        .def("resume", &FakeGpu::resume, Released())
        .def("fail_next", &FakeGpu::fail_next, "call"_a, "what"_a, "lost"_a = false,
             "alive"_a = false, "after"_a = 0, Released())
        .def("delay_next", &FakeGpu::delay_next, "call"_a, "micros"_a, "after"_a = 0, Released())
        .def("die", &FakeGpu::die, "what"_a, Released())
        .def("lose", &FakeGpu::lose, "what"_a, Released())
        .def_prop_ro("faults", &FakeGpu::faults)
        .def_prop_ro("calls", &FakeGpu::calls)
        .def_prop_ro("open_memories", &FakeGpu::open_memories)
        .def_prop_ro("allocated_bytes", &FakeGpu::allocated_bytes)
        .def_prop_ro("registered_bytes", &FakeGpu::pinned_bytes);
    nb::class_<Faults>(m, "Faults")
        .def_prop_rw(
            "error", [](const Faults& of) { return of.error.load(); },
            [](Faults& of, int value) { of.error = value; })
        .def_prop_rw(
            "most_bytes", [](const Faults& of) { return of.most_bytes.load(); },
            [](Faults& of, size_t value) { of.most_bytes = value; })
        .def_prop_rw(
            "flip_every", [](const Faults& of) { return of.flip_every.load(); },
            [](Faults& of, size_t value) { of.flip_every = value; })
        .def_prop_rw(
            "delay_micros", [](const Faults& of) { return of.delay_micros.load(); },
            [](Faults& of, unsigned value) { of.delay_micros = value; })
        .def_prop_ro("calls", [](const Faults& of) { return of.calls.load(); });
    nb::class_<FaultyFile, FileCalls>(m, "FaultyFile")
        .def(nb::new_([] { return std::make_shared<FaultyFile>(); }))
        .def("hang", &FaultyFile::hang, "on"_a, Released())
        .def_prop_ro("hanging", &FaultyFile::hanging)
        .def_prop_ro(
            "reads", [](FaultyFile& file) { return &file.reads; },
            nb::rv_policy::reference_internal)
        .def_prop_ro(
            "writes", [](FaultyFile& file) { return &file.writes; },
            nb::rv_policy::reference_internal);
}
