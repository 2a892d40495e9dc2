// cuda_stub.cpp: gpu_cuda.cpp over a CUDA runtime that is made up: each call succeeds and does
// nothing, fails once with any code, or fails like all others from a sticky error on.
//
// Usage: cuda_stub CASE
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "check.h"
#include "gpu/gpu.h"

namespace {

std::map<std::string, int> failures;  // of the next call of that name
std::map<std::string, int> calls;
int sticky = 0;
int last_error = 0;
bool has_range = true;
int somewhere;  // handles and memory

int call(const std::string& name) {
    ++calls[name];
    int error = sticky;
    if (const auto found = failures.find(name); found != failures.end()) {
        error = found->second;
        failures.erase(found);
    }
    if (error != 0) last_error = error;
    return error;
}

CUresult range(CUdeviceptr*, size_t* size, CUdeviceptr) {
    *size = 4096;
    return static_cast<CUresult>(call("cuMemGetAddressRange"));
}

}  // namespace

#define CALL() static_cast<cudaError_t>(call(__func__))
#define SET_POINTER(place) \
    (*(place) = static_cast<std::remove_pointer_t<decltype(place)>>((void*)&somewhere))

extern "C" {
const char* cudaGetErrorName(cudaError_t) { return "name"; }
const char* cudaGetErrorString(cudaError_t) { return "text"; }
cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(std::exchange(last_error, 0)); }
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return CALL();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    std::memset(properties, 0, sizeof *properties);
    return CALL();
}
cudaError_t cudaDeviceGetPCIBusId(char*, int, int) { return CALL(); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = INT32_MAX;
    return CALL();
}
cudaError_t cudaSetDevice(int) { return CALL(); }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    const bool known = std::strcmp(name, "cuMemGetAddressRange") == 0 && has_range;
    *function = known ? reinterpret_cast<void*>(&range) : nullptr;
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t) { return SET_POINTER(memory), CALL(); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = 0, CALL(); }
cudaError_t cudaFree(void*) { return CALL(); }
cudaError_t cudaHostAlloc(void** memory, size_t, unsigned) { return SET_POINTER(memory), CALL(); }
cudaError_t cudaFreeHost(void*) { return CALL(); }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return CALL(); }
cudaError_t cudaHostUnregister(void*) { return CALL(); }
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t, unsigned) {
    return SET_POINTER(memory), CALL();
}
cudaError_t cudaIpcCloseMemHandle(void*) { return CALL(); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    return SET_POINTER(stream), CALL();
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return CALL(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return CALL(); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return SET_POINTER(event), CALL();
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return CALL(); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return CALL(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return CALL(); }
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return CALL(); }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
    return CALL();
}
cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind,
                              cudaStream_t) {
    return CALL();
}
}

namespace kvserver {

int launch_copy_blocks(Direction, const PackedBlocks&, CUstream_st*) { return call("launch"); }
int load_copy_blocks() { return call("load"); }

}  // namespace kvserver

namespace {

using namespace kvserver;

constexpr int kOdd = 999, kStickyCode = cudaErrorIllegalAddress;

std::shared_ptr<Gpu> ready() {
    auto gpu = cuda_gpu("GPU-00000000-0000-0000-0000-000000000000");
    gpu->enter();
    calls.clear();
    return gpu;
}

// What it threw; aborts if it did not.
GpuError error_of(const std::function<void()>& what) {
    try {
        what();
    } catch (const GpuError& error) {
        return error;
    }
    CHECK(!"it threw nothing");
    return GpuError("");
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

struct Failing {
    const char* name;
    std::function<void(Gpu&)> act;
};

const std::vector<Failing>& every_call() {
    static std::byte memory[64];
    static const std::vector<Failing> all = {
        {"cudaSetDevice", [](Gpu& gpu) { gpu.enter(); }},
        {"cudaMalloc", [](Gpu& gpu) { gpu.allocate(1); }},
        {"cudaMemGetInfo", [](Gpu& gpu) { gpu.free_bytes(); }},
        {"cudaFree", [](Gpu& gpu) { gpu.free(memory); }},
        {"cudaHostAlloc", [](Gpu& gpu) { gpu.allocate_pinned(1); }},
        {"cudaFreeHost", [](Gpu& gpu) { gpu.free_pinned(memory); }},
        {"cudaHostRegister", [](Gpu& gpu) { gpu.pin(memory, 1); }},
        {"cudaHostUnregister", [](Gpu& gpu) { gpu.unpin(memory); }},
        {"cudaIpcOpenMemHandle", [](Gpu& gpu) { gpu.open({.kind = GpuHandle::Kind::kIpc}, 1); }},
        {"cudaIpcCloseMemHandle",
         [](Gpu& gpu) { gpu.close(gpu.open({.kind = GpuHandle::Kind::kIpc}, 1).data); }},
        {"cudaStreamCreateWithFlags", [](Gpu& gpu) { gpu.make_stream(); }},
        {"cudaStreamDestroy", [](Gpu& gpu) { gpu.free_stream(&somewhere); }},
        {"cudaEventCreateWithFlags", [](Gpu& gpu) { gpu.make_event(); }},
        {"cudaEventDestroy", [](Gpu& gpu) { gpu.free_event(&somewhere); }},
        {"cudaEventRecord", [](Gpu& gpu) { gpu.record(&somewhere, &somewhere); }},
        {"cudaEventSynchronize", [](Gpu& gpu) { gpu.wait(&somewhere); }},
        {"cudaMemcpyAsync", [](Gpu& gpu) { gpu.copy(&somewhere, {{memory, memory, 1}}, true); }},
        {"launch", [](Gpu& gpu) { gpu.copy_blocks(&somewhere, Direction::kLoad, {}); }},
    };
    return all;
}

void an_odd_error_fails_its_call_and_no_other() {
    for (const auto& [name, act] : every_call()) {
        auto gpu = ready();
        failures = {{name, kOdd}};
        const GpuError error = error_of([&] { act(*gpu); });
        CHECK(contains(error.what(), "(999)") && !error.out_of_memory);
        CHECK(gpu->lost().empty() && !gpu->is_lost());
        CHECK(last_error == 0);  // the next launch would report it again
        act(*gpu);
    }
}

void a_sticky_error_loses_the_gpu_with_the_call_that_met_it() {
    for (const auto& [name, act] : every_call()) {
        sticky = 0;
        auto gpu = ready();
        if (std::strcmp(name, "cudaIpcCloseMemHandle") == 0) continue;  // its open() would meet it
        sticky = kStickyCode;
        error_of([&] { act(*gpu); });
        CHECK(contains(gpu->lost(), "(700)") && gpu->is_lost());
    }
}

void a_gpu_in_exclusive_use_is_refused_and_may_be_tried_again() {
    auto gpu = cuda_gpu("GPU-00000000-0000-0000-0000-000000000000");
    failures = {{"cudaSetDevice", cudaErrorDevicesUnavailable}};
    const GpuError error = error_of([&] { gpu->enter(); });
    CHECK(contains(error.what(), "(46)") && contains(error.what(), "exclusive-process"));
    CHECK(gpu->lost().empty());
    gpu->enter();
}

void what_enter_left_missing_it_makes_the_next_time() {
    for (const char* name : {"cudaEventCreateWithFlags", "cudaStreamCreateWithFlags", "load"}) {
        auto gpu = cuda_gpu("GPU-00000000-0000-0000-0000-000000000000");
        failures = {{name, kOdd}};
        error_of([&] { gpu->enter(); });
        CHECK(gpu->lost().empty());
        gpu->enter();
        sticky = kStickyCode;
        error_of([&] { gpu->allocate(1); });
        CHECK(gpu->is_lost());  // so there is something to ask
        sticky = 0;
    }
}

void memory_whose_range_is_not_known_has_no_size() {
    const GpuHandle handle{.kind = GpuHandle::Kind::kIpc};
    CHECK(ready()->open(handle, 1).size == 4096);
    for (int code : {CUDA_ERROR_NOT_FOUND, CUDA_ERROR_INVALID_VALUE}) {
        auto gpu = ready();
        failures = {{"cuMemGetAddressRange", code}};
        const GpuMemory memory = gpu->open(handle, 1);
        CHECK(!memory.size && gpu->lost().empty());
        CHECK(gpu->open(handle, 1u << 30).data == memory.data);
        CHECK(calls["cudaIpcOpenMemHandle"] == 1 && calls["cudaIpcCloseMemHandle"] == 0);
        gpu->close(memory.data);
        CHECK(calls["cudaIpcCloseMemHandle"] == 0);
        gpu->close(memory.data);
        CHECK(calls["cudaIpcCloseMemHandle"] == 1);
    }
    has_range = false;
    CHECK(!ready()->open(handle, 1).size);
}

void a_stream_is_quiet_if_it_ended_or_its_context_is_dead() {
    auto gpu = ready();
    gpu->finish(&somewhere);
    failures = {{"cudaStreamSynchronize", kOdd}};
    error_of([&] { gpu->finish(&somewhere); });
    CHECK(gpu->lost().empty());
    sticky = kStickyCode;
    gpu->finish(&somewhere);
    CHECK(calls["cudaStreamSynchronize"] == 3);
}

void a_driver_without_a_call_is_an_error() {
    auto gpu = ready();
    error_of([&] { gpu->open({.kind = GpuHandle::Kind::kFd, .fd = 0}, 1); });
    CHECK(gpu->lost().empty());
}

void a_full_gpu_is_no_other_error() {
    auto gpu = ready();
    failures = {{"cudaMalloc", cudaErrorMemoryAllocation}};
    CHECK(error_of([&] { gpu->allocate(1); }).out_of_memory);
    CHECK(gpu->lost().empty());
}

}  // namespace

int main(int, char** arguments) {
    const std::map<std::string, void (*)()> cases = {
#define CASE(name) {#name, &name}
        CASE(an_odd_error_fails_its_call_and_no_other),
        CASE(a_sticky_error_loses_the_gpu_with_the_call_that_met_it),
        CASE(a_gpu_in_exclusive_use_is_refused_and_may_be_tried_again),
        CASE(what_enter_left_missing_it_makes_the_next_time),
        CASE(memory_whose_range_is_not_known_has_no_size),
        CASE(a_stream_is_quiet_if_it_ended_or_its_context_is_dead),
        CASE(a_driver_without_a_call_is_an_error),
        CASE(a_full_gpu_is_no_other_error),
    };
    cases.at(arguments[1])();
}
