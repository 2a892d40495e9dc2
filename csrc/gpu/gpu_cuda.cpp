// gpu_cuda.cpp: a GPU by the CUDA runtime, and by the driver for what the runtime has not.
//
// The runtime is linked statically and finds the driver when it is first used, so that this module
// also loads where there is none. Driver functions are requested at the version whose signature is
// used here.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "gpu/gpu.h"

namespace kvserver {

namespace {

// ---- errors ---------------------------------------------------------------------------------

std::string error_text(const char* call, int error) {
    const auto code = static_cast<cudaError_t>(error);  // the driver's numbers are the same
    return std::string(call) + ": " + cudaGetErrorName(code) + " (" + std::to_string(error) +
           "): " + cudaGetErrorString(code) +
           (code == cudaErrorDevicesUnavailable ? "; in exclusive-process mode an engine has the "
                                                  "GPU to itself, `nvidia-smi -c DEFAULT` ends that"
                                                : "");
}

// Where no GPU could be lost yet.
void check_free(int error, const char* call) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();  // else the next launch would report it again
    throw GpuError(error_text(call, error), error == cudaErrorMemoryAllocation);
}

#define CHECK(call) check(static_cast<int>(call), #call, __FILE_NAME__, __LINE__)

// ---- the driver -----------------------------------------------------------------------------

template <typename Function>
Function driver(const char* name, unsigned version) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        (void)cudaGetLastError();
        return nullptr;
    }
    return reinterpret_cast<Function>(function);
}

#define DRIVER(name, version) driver<PFN_##name##_v##version>(#name, version)

template <typename Function>
Function needed(Function function, const char* name) {
    if (function == nullptr) throw GpuError(std::string("this driver has no ") + name);
    return function;
}

#define NEED(name, version) needed(DRIVER(name, version), #name)

std::string uuid_text(const cudaUUID_t& uuid) {
    std::string text = "GPU-";
    for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
        char hex[3];
        std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
        if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
        text += hex;
    }
    return text;
}

// As nvidia-smi names a slice of a GPU, "MIG-...", it has the same digits.
bool same_uuid(const std::string& one, const std::string& other) {
    return one.substr(one.find('-') + 1) == other.substr(other.find('-') + 1);
}

// By default the driver maps all streams of a process to 8 queues of the hardware, so that one
// waits for another: two lanes may have 2 * kMostSlots. It reads this when it is first used.
void give_each_stream_a_queue() {
    static const int once = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    (void)once;
}

std::vector<GpuInfo> visible_gpus() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaErrorInsufficientDriver)
        throw GpuError("there is no NVIDIA driver here, or one before R580, which CUDA 13 needs");
    check_free(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<GpuInfo> found;
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp properties{};
        check_free(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
        char pci[32] = {};
        check_free(cudaDeviceGetPCIBusId(pci, sizeof pci, i), "cudaDeviceGetPCIBusId");
        found.push_back(
            {uuid_text(properties.uuid), properties.name, pci, properties.totalGlobalMem});
    }
    return found;
}

// ---- one GPU --------------------------------------------------------------------------------

class CudaGpu final : public Gpu {
  public:
    explicit CudaGpu(std::string uuid) : uuid_(std::move(uuid)) {}

    std::string uuid() const override { return uuid_; }

    void enter() override {
        std::lock_guard lock(mutex_);
        if (ordinal_ < 0) ordinal_ = find_ordinal();
        CHECK(cudaSetDevice(ordinal_));
        if (entered_) return;
        make_probe();
        CHECK(load_copy_blocks());
        batch_ = DRIVER(cuMemcpyBatchAsync, 12080);
        pitched_batch_ = DRIVER(cuMemcpy3DBatchAsync, 12080);
        check_max_pitch();
        entered_ = true;
    }

    uint64_t free_bytes() override {
        size_t left = 0, all = 0;
        CHECK(cudaMemGetInfo(&left, &all));
        return left;
    }

    std::byte* allocate(uint64_t bytes) override {
        void* memory = nullptr;
        CHECK(cudaMalloc(&memory, bytes));
        return static_cast<std::byte*>(memory);
    }
    void free(std::byte* memory) override { CHECK(cudaFree(memory)); }

    std::byte* allocate_pinned(uint64_t bytes) override {
        void* memory = nullptr;
        CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable));
        return static_cast<std::byte*>(memory);
    }
    void free_pinned(std::byte* memory) override { CHECK(cudaFreeHost(memory)); }

    // Never write-combined: the daemon reads L1.
    void pin(std::byte* memory, uint64_t bytes) override {
        CHECK(cudaHostRegister(memory, bytes, cudaHostRegisterPortable));
    }
    void unpin(std::byte* memory) override { CHECK(cudaHostUnregister(memory)); }

    GpuMemory open(const GpuHandle& handle, uint64_t bytes) override {
        std::lock_guard lock(mutex_);
        for (Opened& opened : opened_)
            if (handle.kind == GpuHandle::Kind::kIpc && opened.handle.kind == handle.kind &&
                opened.handle.bytes == handle.bytes) {
                ++opened.count;
                return opened.memory;
            }
        const GpuMemory memory =
            handle.kind == GpuHandle::Kind::kIpc ? open_ipc(handle) : open_vmm(handle, bytes);
        opened_.push_back({handle, memory, 1});
        return memory;
    }

    void close(std::byte* data) override {
        std::lock_guard lock(mutex_);
        const auto found = std::find_if(opened_.begin(), opened_.end(), [&](const Opened& opened) {
            return opened.memory.data == data;
        });
        if (found == opened_.end() || --found->count > 0) return;
        const Opened opened = *found;
        opened_.erase(found);
        if (opened.handle.kind == GpuHandle::Kind::kIpc)
            CHECK(cudaIpcCloseMemHandle(data));
        else
            unmap_vmm(reinterpret_cast<CUdeviceptr>(data), *opened.memory.size);
    }

    Stream make_stream() override {
        cudaStream_t stream = nullptr;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        return stream;
    }
    void free_stream(Stream stream) override {
        CHECK(cudaStreamDestroy(static_cast<cudaStream_t>(stream)));
    }

    Event make_event() override {
        cudaEvent_t event = nullptr;
        CHECK(cudaEventCreateWithFlags(&event, cudaEventBlockingSync));
        return event;
    }
    void free_event(Event event) override {
        CHECK(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
    }
    void record(Event event, Stream stream) override {
        CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
    }
    void wait(Event event) override {
        CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
    }
    // An error that leaves the context alive is no evidence about the stream.
    void finish(Stream stream) override {
        const cudaError_t error = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
        if (error != cudaSuccess && alive()) CHECK(error);
    }
    uint64_t nanos_between(Event first, Event last) override {
        float milliseconds = 0;
        CHECK(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(first),
                                   static_cast<cudaEvent_t>(last)));
        return static_cast<uint64_t>(std::max(0.0f, milliseconds) * 1e6f);
    }

    void copy(Stream stream, const std::vector<Piece>& pieces, bool pinned) override {
        std::vector<Piece> flat, pitched;
        for (const Piece& piece : pieces) (piece.rows == 1 ? flat : pitched).push_back(piece);
        if (!pinned || flat.size() < 2 || !copy_batch(stream, flat))
            for (const Piece& piece : flat)
                CHECK(cudaMemcpyAsync(piece.to, piece.from, piece.bytes, cudaMemcpyDefault,
                                      static_cast<cudaStream_t>(stream)));
        if (!pinned || pitched.size() < 2 || !copy_pitched_batch(stream, pitched))
            for (const Piece& piece : pitched)
                CHECK(cudaMemcpy2DAsync(piece.to, piece.to_pitch, piece.from, piece.from_pitch,
                                        piece.bytes, piece.rows, cudaMemcpyDefault,
                                        static_cast<cudaStream_t>(stream)));
    }

    void copy_blocks(Stream stream, Direction direction, const PackedBlocks& blocks) override {
        CHECK(launch_copy_blocks(direction, blocks, static_cast<cudaStream_t>(stream)));
    }

  protected:
    // A record, as nothing waits for it and no one else uses that stream. After a sticky error "any
    // further CUDA work will return the same error" (CUDA runtime API, cudaError); no GPU was there
    // to see it. A hung GPU is alive by this.
    bool alive() override {
        cudaStream_t stream = probe_stream_;
        if (stream == nullptr) return true;
        const bool answers = cudaEventRecord(probe_event_, stream) == cudaSuccess;
        (void)cudaGetLastError();
        return answers;
    }

  private:
    void check(int error, const char* call, const char* file, int line) {
        if (error == cudaSuccess) return;
        (void)cudaGetLastError();  // else the next launch would report it again
        fail(error_text(call, error) + " at " + file + ":" + std::to_string(line) + " on " + uuid_,
             error == cudaErrorMemoryAllocation);
    }

    void make_probe() {
        if (probe_stream_ != nullptr) return;
        if (probe_event_ == nullptr)
            CHECK(cudaEventCreateWithFlags(&probe_event_, cudaEventDisableTiming));
        cudaStream_t stream = nullptr;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        probe_stream_ = stream;
    }

    struct Opened {
        GpuHandle handle;
        GpuMemory memory;
        uint64_t count;
    };

    int find_ordinal() const {
        const std::vector<GpuInfo> gpus = visible_gpus();
        std::string seen;
        for (size_t i = 0; i < gpus.size(); ++i) {
            if (same_uuid(gpus[i].uuid, uuid_)) return static_cast<int>(i);
            seen += (i ? ", " : "") + gpus[i].uuid;
        }
        throw GpuError("this process has no GPU " + uuid_ + ", it sees " + seen +
                       "; see CUDA_VISIBLE_DEVICES, or give the container that GPU");
    }

    void check_max_pitch() {
        int most = 0;
        CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxPitch, ordinal_));
        if (static_cast<uint64_t>(most) < kMaxPitch)
            throw GpuError("pitched copies reach " + std::to_string(most) + " bytes on " + uuid_);
    }

    // False if this driver has no such call.
    bool copy_batch(Stream stream, const std::vector<Piece>& pieces) {
        if (batch_ == nullptr) return false;
        std::vector<CUdeviceptr> to(pieces.size()), from(pieces.size());
        std::vector<size_t> sizes(pieces.size());
        for (size_t i = 0; i < pieces.size(); ++i) {
            to[i] = reinterpret_cast<CUdeviceptr>(pieces[i].to);
            from[i] = reinterpret_cast<CUdeviceptr>(pieces[i].from);
            sizes[i] = pieces[i].bytes;
        }
        CUmemcpyAttributes attributes{};
        attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        size_t begins_at = 0, failed = 0;
        const CUresult result =
            batch_(to.data(), from.data(), sizes.data(), pieces.size(), &attributes, &begins_at, 1,
                   &failed, static_cast<CUstream>(stream));
        if (result == CUDA_ERROR_NOT_SUPPORTED) return false;
        CHECK(result);
        return true;
    }

    static CUmemcpy3DOperand operand(const std::byte* first, uint64_t pitch) {
        CUmemcpy3DOperand side{};
        side.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
        side.op.ptr.ptr = reinterpret_cast<CUdeviceptr>(first);
        side.op.ptr.rowLength = pitch;
        return side;
    }

    // Likewise.
    bool copy_pitched_batch(Stream stream, const std::vector<Piece>& pieces) {
        if (pitched_batch_ == nullptr) return false;
        std::vector<CUDA_MEMCPY3D_BATCH_OP> copies(pieces.size());
        for (size_t i = 0; i < pieces.size(); ++i) {
            const Piece& piece = pieces[i];
            copies[i].src = operand(piece.from, piece.from_pitch);
            copies[i].dst = operand(piece.to, piece.to_pitch);
            copies[i].extent = {piece.bytes, piece.rows, 1};
            copies[i].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        }
        size_t failed = 0;
        const CUresult result =
            pitched_batch_(copies.size(), copies.data(), &failed, 0, static_cast<CUstream>(stream));
        if (result == CUDA_ERROR_NOT_SUPPORTED) return false;
        CHECK(result);
        return true;
    }

    GpuMemory open_ipc(const GpuHandle& handle) {
        cudaIpcMemHandle_t raw{};
        static_assert(sizeof raw == sizeof handle.bytes);
        std::memcpy(&raw, handle.bytes.data(), sizeof raw);
        void* data = nullptr;
        CHECK(cudaIpcOpenMemHandle(&data, raw, cudaIpcMemLazyEnablePeerAccess));
        return {static_cast<std::byte*>(data), size_of(data)};
    }

    // Drivers may know no range of imported memory (CUDA_ERROR_NOT_FOUND).
    std::optional<uint64_t> size_of(void* data) {
        const auto range = DRIVER(cuMemGetAddressRange, 3020);
        CUdeviceptr base = 0;
        size_t size = 0;
        const int result = range == nullptr
                               ? static_cast<int>(CUDA_ERROR_NOT_SUPPORTED)
                               : range(&base, &size, reinterpret_cast<CUdeviceptr>(data));
        if (result == 0) return size;
        if (!alive()) CHECK(result);
        return std::nullopt;
    }

    // The driver refuses to map more than there is.
    GpuMemory open_vmm(const GpuHandle& handle, uint64_t bytes) {
        CUmemAllocationProp properties{};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {ordinal_}};
        size_t granularity = 0;
        CHECK(NEED(cuMemGetAllocationGranularity, 10020)(&granularity, &properties,
                                                         CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        const size_t size = (bytes + granularity - 1) / granularity * granularity;
        CUmemGenericAllocationHandle memory = 0;
        CHECK(NEED(cuMemImportFromShareableHandle, 10020)(
            &memory, reinterpret_cast<void*>(static_cast<intptr_t>(handle.fd)),
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        CUdeviceptr data = 0;
        const int mapped = map_vmm(&data, memory, size);
        // The mapping owns it from here on.
        const int released = NEED(cuMemRelease, 10020)(memory);
        CHECK(mapped);
        CHECK(released);
        return {reinterpret_cast<std::byte*>(data), size};
    }

    int map_vmm(CUdeviceptr* data, CUmemGenericAllocationHandle memory, size_t size) {
        int result = NEED(cuMemAddressReserve, 10020)(data, size, 0, 0, 0);
        if (result != 0) return result;
        result = NEED(cuMemMap, 10020)(*data, size, 0, memory, 0);
        if (result == 0) {
            CUmemAccessDesc access{};
            access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {ordinal_}};
            access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            result = NEED(cuMemSetAccess, 10020)(*data, size, &access, 1);
            if (result != 0) (void)NEED(cuMemUnmap, 10020)(*data, size);
        }
        if (result != 0) (void)NEED(cuMemAddressFree, 10020)(*data, size);
        return result;
    }

    void unmap_vmm(CUdeviceptr data, size_t size) {
        CHECK(NEED(cuMemUnmap, 10020)(data, size));
        CHECK(NEED(cuMemAddressFree, 10020)(data, size));
    }

    const std::string uuid_;
    std::mutex mutex_;  // guards what follows; held over slow calls, but by no copying thread
    int ordinal_ = -1;
    bool entered_ = false;
    cudaEvent_t probe_event_ = nullptr;
    std::atomic<cudaStream_t> probe_stream_{nullptr};  // read without mutex_; set last
    PFN_cuMemcpyBatchAsync_v12080 batch_ = nullptr;
    PFN_cuMemcpy3DBatchAsync_v12080 pitched_batch_ = nullptr;
    std::vector<Opened> opened_;
};

}  // namespace

std::vector<GpuInfo> cuda_gpus() {
    give_each_stream_a_queue();
    return visible_gpus();
}

std::shared_ptr<Gpu> cuda_gpu(const std::string& uuid) {
    give_each_stream_a_queue();
    return std::make_shared<CudaGpu>(uuid);
}

bool built_with_cuda() { return true; }

}  // namespace kvserver
