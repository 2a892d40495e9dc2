// gpu.cpp: when a GPU is lost.
#include "gpu/gpu.h"

namespace kvserver {

std::string Gpu::lost() const {
    std::lock_guard lock(mutex_);
    return lost_;
}

void Gpu::lose(const std::string& why) {
    std::lock_guard lock(mutex_);
    if (lost_.empty()) lost_ = why;
    is_lost_ = true;
}

void Gpu::fail(const std::string& what, bool no_memory) {
    if (!alive()) lose(what);
    throw GpuError(what, no_memory);
}

}  // namespace kvserver
