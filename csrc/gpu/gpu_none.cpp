// gpu_none.cpp: what a build without CUDA has in place of gpu_cuda.cpp.
#include "gpu/gpu.h"

namespace kvserver {

namespace {

constexpr const char* kWhy =
    "this kvserver was built without CUDA; build it where nvcc is found to serve GPU memory";

}  // namespace

std::vector<GpuInfo> cuda_gpus() { throw GpuError(kWhy); }

std::shared_ptr<Gpu> cuda_gpu(const std::string&) { throw GpuError(kWhy); }

bool built_with_cuda() { return false; }

}  // namespace kvserver
