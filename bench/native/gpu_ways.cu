// gpu_ways.cu: see gpu_ways.h. KVSERVER_HOST_CUDA: the same source for the host.
#include "gpu_ways.h"

#ifdef WAYS_ON_HOST
#include "host_runtime.h"
#endif
// kvserver's kernels, for kDirect
#include <memory>
#include <string>
#include <vector>

#include "gpu/copy_blocks.cu"

namespace ways {

namespace {

using kvserver::Direction;
#ifdef WAYS_ON_HOST
using namespace kvserver;  // NOLINT: what stands for the CUDA runtime
#endif

// ---- the kernels ----------------------------------------------------------------------------

constexpr uint32_t kThreadsOfCta = 128;
constexpr uint32_t kAtOnce = 4;  // loads before the first store, else the comparison flatters ours

// One launch: so many blocks of all planes. `packed` is [chunk][plane][block of the chunk][run].
struct Launch {
    const uint64_t* bases;
    const uint32_t* blocks;  // or null
    const int64_t* slots;    // of each token, or null
    std::byte* packed;
    uint64_t num_planes, run, chunk_blocks, block_tokens;
};

// Vector v of a block in the engine's memory.
template <bool by_slots>
__device__ uint4* paged_vector(const Launch& job, uint64_t plane, uint64_t position, uint32_t v) {
    auto* base = reinterpret_cast<uint4*>(job.bases[plane]);
    if constexpr (by_slots) {
        const auto row = static_cast<uint32_t>(job.run / job.block_tokens / sizeof(uint4));
        const int64_t slot = job.slots[position * job.block_tokens + v / row];
        return base + static_cast<uint64_t>(slot) * row + v % row;
    } else {
        return base + job.blocks[position] * (job.run / sizeof(uint4)) + v;
    }
}

template <bool load, bool by_slots>
__global__ void __launch_bounds__(kThreadsOfCta) copy_paged(const Launch job) {
    const uint64_t plane = blockIdx.x % job.num_planes;
    const uint64_t position = blockIdx.x / job.num_planes;
    const uint64_t chunk = position / job.chunk_blocks, block = position % job.chunk_blocks;
    const uint64_t place = (chunk * job.num_planes + plane) * job.chunk_blocks + block;
    auto* packed = reinterpret_cast<uint4*>(job.packed + place * job.run);
    const auto vectors = static_cast<uint32_t>(job.run / sizeof(uint4));
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < vectors; first += kAtOnce * kThreadsOfCta) {
        uint4 words[kAtOnce] = {};
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t v = first + i * kThreadsOfCta;
            if (v < vectors)
                words[i] =
                    __ldcs(load ? packed + v : paged_vector<by_slots>(job, plane, position, v));
        }
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t v = first + i * kThreadsOfCta;
            if (v < vectors)
                __stcs(load ? paged_vector<by_slots>(job, plane, position, v) : packed + v,
                       words[i]);
        }
    }
}

template <bool by_slots>
cudaError_t launch_paged(bool load, uint64_t positions, const Launch& job, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim.x = static_cast<uint32_t>(positions * job.num_planes);
    config.blockDim.x = kThreadsOfCta;
    config.stream = stream;
    return cudaLaunchKernelEx(&config,
                              load ? copy_paged<true, by_slots> : copy_paged<false, by_slots>, job);
}

// ---- a request ------------------------------------------------------------------------------

struct Failed {
    std::string what;
};

void check(cudaError_t error, const char* call) {
    if (error != cudaSuccess) throw Failed{std::string(call) + ": " + cudaGetErrorString(error)};
}
#define CHECK(call) check(call, #call)

class Opened {
  public:
    explicit Opened(const Request& request)
        : request_(request),
          bases_(request.bases, request.bases + request.num_planes),
          blocks_(request.blocks, request.blocks + request.num_blocks) {
        const uint64_t row = request.run / request.block_tokens;
        if (request.num_blocks % request.chunk_blocks != 0)
            throw Failed{"blocks that are no whole chunks"};
        if (row % sizeof(uint4) != 0) throw Failed{"rows that are no multiple of 16 bytes"};
        std::vector<int64_t> slots;
        for (const uint64_t block : blocks_)
            for (uint64_t token = 0; token < request.block_tokens; ++token)
                slots.push_back(static_cast<int64_t>(block * request.block_tokens + token));
        std::vector<kvserver::Plane> planes;
        for (uint64_t p = 0; p < request.num_planes; ++p)
            planes.push_back({reinterpret_cast<std::byte*>(bases_[p]), request.run, request.run,
                              p * request.run, 0});
        CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        gpu_bases_ = on_gpu(bases_);
        gpu_blocks_ = on_gpu(blocks_);
        gpu_slots_ = on_gpu(slots);
        gpu_planes_ = on_gpu(planes);
        staging_ = allocate(kLaunchChunks * chunk_bytes());
        // By which the GPU may read and write it; usually the same address. Null: it may not.
        if (cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped_), request.host, 0) !=
            cudaSuccess) {
            (void)cudaGetLastError();
            mapped_ = nullptr;
        }
    }

    ~Opened() {
        for (std::byte* memory : allocated_) (void)cudaFree(memory);
        if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
    }

    void run(Way way, bool load) {
        if (way == Way::kMemcpy)
            copy_runs(load);
        else if (way == Way::kDirect)
            copy_directly(load);
        else
            copy_chunks(way, load);
        CHECK(cudaStreamSynchronize(stream_));
    }

  private:
    uint64_t block_bytes() const { return request_.num_planes * request_.run; }
    uint64_t chunk_bytes() const { return request_.chunk_blocks * block_bytes(); }

    std::byte* allocate(uint64_t bytes) {
        void* memory = nullptr;
        CHECK(cudaMalloc(&memory, bytes));
        return allocated_.emplace_back(static_cast<std::byte*>(memory));
    }

    template <typename T>
    const T* on_gpu(const std::vector<T>& values) {
        std::byte* memory = allocate(values.size() * sizeof(T));
        CHECK(cudaMemcpyAsync(memory, values.data(), values.size() * sizeof(T), cudaMemcpyDefault,
                              stream_));
        CHECK(cudaStreamSynchronize(stream_));
        return reinterpret_cast<const T*>(memory);
    }

    void move(std::byte* gpu, std::byte* host, uint64_t bytes, bool load) {
        CHECK(cudaMemcpyAsync(load ? gpu : host, load ? host : gpu, bytes, cudaMemcpyDefault,
                              stream_));
    }

    void copy_chunks(Way way, bool load) {
        const uint64_t most = kLaunchChunks * request_.chunk_blocks;
        for (uint64_t first = 0; first < request_.num_blocks; first += most) {
            const uint64_t left = request_.num_blocks - first,
                           positions = left < most ? left : most;
            std::byte* host = request_.host + first * block_bytes();
            const bool by_slots = way == Way::kBySlots;
            const Launch job{gpu_bases_,
                             by_slots ? nullptr : gpu_blocks_ + first,
                             by_slots ? gpu_slots_ + first * request_.block_tokens : nullptr,
                             staging_,
                             request_.num_planes,
                             request_.run,
                             request_.chunk_blocks,
                             request_.block_tokens};
            if (load) move(staging_, host, positions * block_bytes(), true);
            CHECK(by_slots ? launch_paged<true>(load, positions, job, stream_)
                           : launch_paged<false>(load, positions, job, stream_));
            if (!load) move(staging_, host, positions * block_bytes(), false);
        }
    }

    void copy_runs(bool load) {
        std::byte* host = request_.host;
        for (const uint64_t block : blocks_)
            for (const uint64_t base : bases_) {
                move(reinterpret_cast<std::byte*>(base) + block * request_.run, host, request_.run,
                     load);
                host += request_.run;
            }
    }

    void copy_directly(bool load) {
        if (mapped_ == nullptr) throw Failed{"the GPU may not use this host memory by itself"};
        const kvserver::PackedBlocks job{.planes = gpu_planes_,
                                         .num_planes = static_cast<uint32_t>(request_.num_planes),
                                         .groups = 1,
                                         .blocks = gpu_blocks_,
                                         .positions = static_cast<uint32_t>(request_.num_blocks),
                                         .position_bytes = block_bytes(),
                                         .packed = mapped_};
        CHECK(kvserver::launch(load ? Direction::kLoad : Direction::kStore, job, stream_));
    }

    const Request request_;
    const std::vector<uint64_t> bases_;
    const std::vector<uint32_t> blocks_;
    std::vector<std::byte*> allocated_;
    cudaStream_t stream_ = nullptr;
    const uint64_t* gpu_bases_ = nullptr;
    const uint32_t* gpu_blocks_ = nullptr;
    const int64_t* gpu_slots_ = nullptr;
    const kvserver::Plane* gpu_planes_ = nullptr;
    std::byte* staging_ = nullptr;
    std::byte* mapped_ = nullptr;
};

template <typename Act>
const char* text_of_failure(Act act) {
    static thread_local std::string what;
    try {
        act();
        return nullptr;
    } catch (const Failed& failed) {
        (void)cudaGetLastError();
        what = failed.what;
        return what.c_str();
    }
}

}  // namespace

}  // namespace ways

const char* ways_open(const ways::Request* request, void** opened) {
    return ways::text_of_failure([&] { *opened = new ways::Opened(*request); });
}

const char* ways_run(void* opened, ways::Way way, int32_t direction) {
    return ways::text_of_failure(
        [&] { static_cast<ways::Opened*>(opened)->run(way, direction == 1); });
}

void ways_close(void* opened) { delete static_cast<ways::Opened*>(opened); }
