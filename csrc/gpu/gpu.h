// gpu.h: the calls that the server makes on one GPU, and nothing else of any CUDA library.
//
// CudaGpu (gpu_cuda.cpp) implements it by the CUDA runtime and driver. Tests and machines without a
// GPU have a simulated one, whose memory is the host's and whose streams are threads.
//
// Threads: every virtual function is called by native threads without the GIL, from several at
// once; each calls enter() first. None is called by the server's loop.
// Errors: every function that calls the driver throws GpuError, which fails the caller's job and no
// other. After a sticky error, which fails all later calls, lost() is the reason, and finish() is
// the only call still allowed: a lost GPU may still move what was queued on its streams.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy/plane_series.h"
#include "gpu/copy_blocks.h"

namespace kvserver {

struct GpuError : std::runtime_error {
    explicit GpuError(const std::string& what, bool no_memory = false)
        : std::runtime_error(what), out_of_memory(no_memory) {}
    bool out_of_memory;  // of the GPU; worth a smaller try
};

// One part of a copy between host and GPU memory: rows, equally spaced at either end.
struct Piece {
    std::byte* to;
    const std::byte* from;
    uint64_t bytes;  // of a row
    uint64_t rows = 1;
    uint64_t to_pitch = 0;  // from one row's first byte to the next one's; if rows > 1
    uint64_t from_pitch = 0;
};

// An engine's GPU memory, as the engine shares it.
struct GpuHandle {
    enum class Kind : uint8_t { kIpc, kFd };
    Kind kind;
    std::array<std::byte, 64> bytes{};  // kIpc
    int fd = -1;                        // kFd; the caller's
};

struct GpuMemory {
    std::byte* data;
    std::optional<uint64_t> size;  // as the driver reports it, if it does; never as the peer does
};

struct GpuInfo {
    std::string uuid;  // "GPU-...", as nvidia-smi prints it
    std::string name;
    std::string pci;  // "0000:01:00.0"
    uint64_t memory_bytes;
};

class Gpu : public std::enable_shared_from_this<Gpu> {
  public:
    using Stream = void*;
    using Event = void*;
    virtual ~Gpu() = default;

    virtual std::string uuid() const = 0;

    std::string lost() const;  // why no call can succeed any more; empty while it can
    bool is_lost() const { return is_lost_; }

    // Make this thread work with this GPU; the first call makes the context, which is slow.
    virtual void enter() = 0;

    virtual uint64_t free_bytes() = 0;                // GPU memory that is not allocated
    virtual std::byte* allocate(uint64_t bytes) = 0;  // GPU memory
    virtual void free(std::byte* memory) = 0;
    virtual std::byte* allocate_pinned(uint64_t bytes) = 0;  // host memory
    virtual void free_pinned(std::byte* memory) = 0;
    // Register host memory that exists; for all GPUs of this process.
    virtual void pin(std::byte* memory, uint64_t bytes) = 0;
    virtual void unpin(std::byte* memory) = 0;

    // Map another process's memory, at least `bytes` of it. Memory that is open already is not
    // mapped twice. REQUIRES: one close() each, after the last copy was waited for.
    virtual GpuMemory open(const GpuHandle& handle, uint64_t bytes) = 0;
    virtual void close(std::byte* data) = 0;

    virtual Stream make_stream() = 0;
    virtual void free_stream(Stream stream) = 0;
    virtual Event make_event() = 0;  // its waiters sleep; it records the time
    virtual void free_event(Event event) = 0;
    virtual void record(Event event, Stream stream) = 0;
    virtual void wait(Event event) = 0;  // until the recorded event happened
    // Wait until nothing that was queued on the stream moves any more: it has run, or the context
    // is dead, which is known at once. The one call that may be made on a lost GPU; needs no
    // enter(). GpuError: the time is unknown. May never return where the hardware hangs.
    virtual void finish(Stream stream) = 0;
    virtual uint64_t nanos_between(Event first, Event last) = 0;  // REQUIRES: both happened

    // Queue on the stream, in order with what was queued before and after. The pieces of one call
    // are in no order among themselves. `pinned`: all host memory in it is; otherwise the call may
    // take as long as the copy.
    // REQUIRES: no byte is touched twice by one call; no piece spans two registrations of pin() or
    // two allocations of the GPU; its pitches are from `bytes` to kMaxPitch.
    virtual void copy(Stream stream, const std::vector<Piece>& pieces, bool pinned) = 0;
    virtual void copy_blocks(Stream stream, Direction direction, const PackedBlocks& blocks) = 0;

    void lose(const std::string& why);  // the first reason stays

  protected:
    // Throw, and lose the GPU if its context is dead. No list of codes names the sticky errors: a
    // sticky one is returned again by a call that has nothing to do with the failed one.
    [[noreturn]] void fail(const std::string& what, bool no_memory = false);
    virtual bool alive() = 0;  // by such a call, a cheap one; true while there is no context

  private:
    std::atomic<bool> is_lost_{false};
    mutable std::mutex mutex_;
    std::string lost_;
};

// The GPUs that this process may use. GpuError is why there is none: no driver, or too old a one.
std::vector<GpuInfo> cuda_gpus();
// The GPU of this UUID. The first enter() looks for it, and throws if there is none.
std::shared_ptr<Gpu> cuda_gpu(const std::string& uuid);
bool built_with_cuda();

}  // namespace kvserver
