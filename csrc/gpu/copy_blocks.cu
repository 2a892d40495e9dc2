// copy_blocks.cu: see copy_blocks.h. The same source is compiled for the host, see host_cuda.h.
//
// Work is cut into pieces of a run, one warp each. The piece numbers of a position follow from the
// plane table alone: plane p's begin at slot_offset / kPieceBytes + p. That gives every plane the
// pieces of its run, or one more, whatever the mix of runs, and a binary search over the planes
// finds a piece's own. No other table is needed.
#ifndef KVSERVER_HOST_CUDA
#include <cuda_runtime.h>
#endif

#include "gpu/copy_blocks.h"

namespace kvserver {

namespace {

// ---- launch configuration -------------------------------------------------------------------
constexpr uint32_t kWarp = 32;
// Loads that a thread has in flight before it stores. At 2 KiB a warp, and the warps below, an SM
// has 96 KiB in flight; an H200's 4.8 TB/s at ~1 us latency need ~36 KiB of each of 132 SMs.
constexpr uint32_t kInFlight = 4;
constexpr uint64_t kPieceBytes = kInFlight * kWarp * sizeof(uint4);  // 2 KiB: one round of a warp
constexpr uint32_t kThreads = 256;
// 6 * 256 threads fit with 40 registers each on sm_80, sm_90 and sm_100 (64 Ki registers an SM).
constexpr uint32_t kBlocksPerSm = 6;

__device__ uint64_t first_piece(const Plane* planes, uint64_t plane) {
    return planes[plane].slot_offset / kPieceBytes + plane;
}

__host__ __device__ uint64_t pieces_of_position(const PackedBlocks& job) {
    return job.position_bytes / kPieceBytes + job.num_planes;
}

// The last plane whose pieces begin at or before this one.
__device__ uint32_t plane_of(const PackedBlocks& job, uint64_t piece) {
    uint32_t low = 0;
    for (uint32_t high = job.num_planes; high - low > 1;) {
        const uint32_t middle = low + (high - low) / 2;
        (first_piece(job.planes, middle) <= piece ? low : high) = middle;
    }
    return low;
}

// Copy up to kPieceBytes by one warp. The streaming hints (evict first) keep the engine's own data
// in L2: KV that was just copied is not read again soon.
template <typename Vector>
__device__ void copy_vectors(std::byte* to, const std::byte* from, uint32_t bytes, uint32_t lane) {
    const auto* source = reinterpret_cast<const Vector*>(from);
    auto* target = reinterpret_cast<Vector*>(to);
    const uint32_t vectors = bytes / sizeof(Vector);
#pragma unroll 1  // more rounds at a time would need more registers
    for (uint32_t first = lane; first < vectors; first += kInFlight * kWarp) {
        Vector loaded[kInFlight] = {};  // else it spills
        for (uint32_t i = 0; i < kInFlight; ++i) {
            if (first + i * kWarp < vectors) loaded[i] = __ldcs(source + first + i * kWarp);
        }
        for (uint32_t i = 0; i < kInFlight; ++i) {
            if (first + i * kWarp < vectors) __stcs(target + first + i * kWarp, loaded[i]);
        }
    }
    // What is left is shorter than a vector, so a lane has one byte of it at most.
    const uint32_t rest = vectors * sizeof(Vector) + lane;
    if (rest < bytes) {
        __stcs(reinterpret_cast<uint8_t*>(to) + rest,
               __ldcs(reinterpret_cast<const uint8_t*>(from) + rest));
    }
}

__device__ void copy_piece(std::byte* to, const std::byte* from, uint32_t bytes, uint32_t lane) {
    const uint64_t either = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
    if (either % sizeof(uint4) == 0) {
        copy_vectors<uint4>(to, from, bytes, lane);
    } else if (either % sizeof(uint64_t) == 0) {
        copy_vectors<uint64_t>(to, from, bytes, lane);
    } else if (either % sizeof(uint32_t) == 0) {
        copy_vectors<uint32_t>(to, from, bytes, lane);
    } else {
        copy_vectors<uint8_t>(to, from, bytes, lane);
    }
}

template <Direction direction>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) copy_blocks(const PackedBlocks job) {
    const uint64_t pieces = pieces_of_position(job);
    const uint64_t total = job.positions * pieces;
    const uint64_t thread = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
    const uint64_t warps = uint64_t{gridDim.x} * (kThreads / kWarp);
    for (uint64_t item = thread / kWarp; item < total; item += warps) {
        const uint64_t position = item / pieces;
        const uint64_t piece = item % pieces;
        const uint32_t index = plane_of(job, piece);
        const Plane plane = job.planes[index];
        const uint64_t offset = (piece - first_piece(job.planes, index)) * kPieceBytes;
        const uint32_t block = job.blocks[position * job.groups + plane.group];
        if (offset >= plane.run || block == kNoBlock) continue;

        const uint64_t left = plane.run - offset;
        const auto bytes = static_cast<uint32_t>(left < kPieceBytes ? left : kPieceBytes);
        std::byte* l0 = plane.base + block * plane.stride + offset;
        std::byte* packed = job.packed + position * job.position_bytes + plane.slot_offset + offset;
        if constexpr (direction == Direction::kStore) {
            copy_piece(packed, l0, bytes, thread % kWarp);
        } else {
            copy_piece(l0, packed, bytes, thread % kWarp);
        }
    }
}

// As wide as the GPU, and no wider than there is work.
cudaError_t launch(Direction direction, const PackedBlocks& job, cudaStream_t stream) {
    int gpu = 0, sms = 0;
    cudaError_t error = cudaGetDevice(&gpu);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, gpu);
    if (error != cudaSuccess) return error;

    const uint64_t threads = job.positions * pieces_of_position(job) * kWarp;
    const uint64_t needed = (threads + kThreads - 1) / kThreads;
    const uint64_t widest = static_cast<uint64_t>(sms) * kBlocksPerSm;
    cudaLaunchConfig_t config{};
    config.gridDim.x = static_cast<uint32_t>(needed < widest ? needed : widest);
    config.blockDim.x = kThreads;
    config.stream = stream;
    return cudaLaunchKernelEx(&config,
                              direction == Direction::kStore ? copy_blocks<Direction::kStore>
                                                             : copy_blocks<Direction::kLoad>,
                              job);
}

}  // namespace

#ifndef KVSERVER_HOST_CUDA
int load_copy_blocks() {
    cudaFuncAttributes found{};
    const cudaError_t error = cudaFuncGetAttributes(&found, copy_blocks<Direction::kStore>);
    if (error != cudaSuccess) return error;
    return cudaFuncGetAttributes(&found, copy_blocks<Direction::kLoad>);
}

int launch_copy_blocks(Direction direction, const PackedBlocks& blocks, CUstream_st* stream) {
    return launch(direction, blocks, stream);
}
#endif

}  // namespace kvserver
