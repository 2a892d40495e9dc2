// host_cuda.h: what copy_blocks.cu needs of CUDA, for the host. Include it before that source.
//
// It shows addresses only: which bytes are read and written, and how often, in any order of the
// threads. Races, coalescing, caches and limits of a launch show on a GPU alone.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "testing/copy_blocks_host.h"

#define KVSERVER_HOST_CUDA
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

namespace kvserver {

namespace {

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct dim3 {
    uint32_t x = 1;
};
thread_local dim3 gridDim, blockIdx, threadIdx;

template <typename T>
void check_alignment(const T* at) {  // a GPU faults
    if (reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0) return;
    std::fprintf(stderr, "a kernel's access of %zu bytes at %p\n", sizeof(T), (const void*)at);
    std::abort();
}

template <typename T>
T __ldcs(const T* from) {
    check_alignment(from);
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <typename T>
void __stcs(T* to, T value) {
    check_alignment(to);
    std::memcpy(to, &value, sizeof(T));
}

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
constexpr int cudaDevAttrMultiProcessorCount = 0;
thread_local HostGrid device;

cudaError_t cudaGetDevice(int* number) { return *number = 0; }

cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
    *value = device.sms;
    return cudaSuccess;
}

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    cudaStream_t stream = nullptr;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
    gridDim = config->gridDim;
    const uint64_t threads = uint64_t{config->gridDim.x} * config->blockDim.x;
    for (uint64_t i = 0; i < threads; ++i) {
        const uint64_t thread = device.order ? device.order(i, threads) : i;
        blockIdx.x = static_cast<uint32_t>(thread / config->blockDim.x);
        threadIdx.x = static_cast<uint32_t>(thread % config->blockDim.x);
        kernel(arguments...);
    }
    return cudaSuccess;
}

}  // namespace

}  // namespace kvserver
