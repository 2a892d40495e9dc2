// plane_series.cpp: see plane_series.h.
#include "copy/plane_series.h"

#include <utility>

namespace kvserver {

namespace {

// How many series may take turns in the slot, as those of an indexer and of the layers do, or those
// of groups.
constexpr size_t kInterleaved = 8;

struct Open {
    PlaneSeries series;
    const void* allocation;
};

bool alike(const Open& open, const Plane& plane, const void* allocation) {
    const Plane& first = open.series.first;
    return open.allocation == allocation && first.group == plane.group &&
           first.stride == plane.stride;
}

bool extends_run(const Open& open, const Plane& plane, const void* allocation) {
    const Plane& first = open.series.first;
    return alike(open, plane, allocation) && first.base + first.run == plane.base &&
           first.slot_offset + first.run == plane.slot_offset;
}

bool extends_series(const Open& open, const Plane& plane, const void* allocation) {
    const PlaneSeries& series = open.series;
    if (!alike(open, plane, allocation) || series.first.run != plane.run) return false;
    if (plane.base <= series.first.base) return false;
    const auto step = static_cast<uint64_t>(plane.base - series.first.base);
    const uint64_t slot_step = plane.slot_offset - series.first.slot_offset;
    if (series.count > 1)
        return step == series.count * series.pitch && slot_step == series.count * series.slot_pitch;
    return step >= plane.run && step <= kMaxPitch && slot_step <= kMaxPitch;
}

// The series if each plane may only follow the one `turns` before it.
std::vector<PlaneSeries> in_turns(const std::vector<Open>& runs, size_t turns) {
    std::vector<Open> open;
    std::vector<size_t> series_of;  // by run
    for (size_t i = 0; i < runs.size(); ++i) {
        const Plane& plane = runs[i].series.first;
        if (i < turns || !extends_series(open[series_of[i - turns]], plane, runs[i].allocation)) {
            series_of.push_back(open.size());
            open.push_back(runs[i]);
            continue;
        }
        series_of.push_back(series_of[i - turns]);
        PlaneSeries& series = open[series_of[i]].series;
        if (series.count++ == 1) {
            series.pitch = static_cast<uint64_t>(plane.base - series.first.base);
            series.slot_pitch = plane.slot_offset - series.first.slot_offset;
        }
    }
    std::vector<PlaneSeries> all;
    for (const Open& each : open) all.push_back(each.series);
    return all;
}

}  // namespace

std::vector<PlaneSeries> plane_series(const std::vector<Plane>& planes,
                                      const std::vector<const void*>& allocation_of) {
    std::vector<Open> runs;
    for (size_t i = 0; i < planes.size(); ++i) {
        if (!runs.empty() && extends_run(runs.back(), planes[i], allocation_of[i]))
            runs.back().series.first.run += planes[i].run;
        else
            runs.push_back({{planes[i]}, allocation_of[i]});
    }
    std::vector<PlaneSeries> best;
    for (size_t turns = 1; turns <= kInterleaved; ++turns) {
        std::vector<PlaneSeries> found = in_turns(runs, turns);
        if (best.empty() || found.size() < best.size()) best = std::move(found);
    }
    return best;
}

}  // namespace kvserver
