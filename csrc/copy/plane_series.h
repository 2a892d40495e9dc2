// plane_series.h: which planes of a table one pitched copy can move together. No CUDA in here.
#pragma once

#include <vector>

#include "copy/plane.h"

namespace kvserver {

// The longest distance between two rows of a pitched copy (cudaDevAttrMaxPitch of every GPU).
constexpr uint64_t kMaxPitch = INT32_MAX;

// Planes that differ only in their place, by equal steps: in L0, inside one
// allocation, by `pitch`, and in a slot by `slot_pitch`. Block `id` of all of them is one copy of
// `count` rows. A plane without such neighbours is a series of one; a plane that begins where the
// one before it ends, in L0 and in the slot, is part of its run.
struct PlaneSeries {
    Plane first;
    uint64_t count = 1;
    uint64_t pitch = 0;
    uint64_t slot_pitch = 0;
};

// The series of planes, which are in the order of the slot. Every plane is in one series, once.
// `allocation_of[i]`: the allocation that holds planes[i]; no copy may span two.
std::vector<PlaneSeries> plane_series(const std::vector<Plane>& planes,
                                      const std::vector<const void*>& allocation_of);

}  // namespace kvserver
