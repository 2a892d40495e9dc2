// host_runtime.h: what gpu_ways.cu needs of the CUDA runtime, for the host. Copies are done when
// their call returns.
#pragma once

#include <cstdlib>
#include <cstring>

#include "testing/host_cuda.h"

namespace kvserver {

namespace {

constexpr int cudaMemcpyDefault = 4;
constexpr unsigned cudaStreamNonBlocking = 1;

cudaError_t cudaMalloc(void** memory, uint64_t bytes) {
    *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *memory == nullptr;
}
cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, uint64_t bytes, int, cudaStream_t) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** mapped, void* host, unsigned) {
    *mapped = host;
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : "no memory";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

}  // namespace

}  // namespace kvserver
