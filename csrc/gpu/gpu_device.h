// gpu_device.h: a GPU as a device.
//
// Two lanes, one for loads and one for stores, which share nothing and never wait for each other.
// A job is cut into batches of bounded bytes; a lane keeps a few of them in flight, each in a slot
// of its own with its own stream. Two ways to move a batch; the planes decide which:
//   DMA     by the copy engines, a pitched piece for each series of planes of a block, or for each
//           plane of a stretch of blocks (pieces.h): no SM, no staging.
//   staged  a kernel gathers a store's runs into the slot's staging memory, and few large pieces go
//           to L1; a load the other way round. While one slot's pieces move, another's kernel runs.
//
// Cancels and the state word are looked at before each batch. So the batches in flight, up to
// kMostSlots, are read (or written) after a cancel, and the ticket ends after them.
//
// Ordering. REQUIRES of submit_copy(): the engine's work on these blocks is done. No stream here
// ever waits for another process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "copy/device.h"
#include "copy/map_thread.h"
#include "gpu/gpu.h"

namespace kvserver {

// An engine's GPU memory: a part of one of its allocations.
class GpuMapping final : public Mapping {
  public:
    // Takes over handle.fd.
    GpuMapping(std::shared_ptr<Gpu> gpu, GpuHandle handle, uint64_t offset, uint64_t size);
    ~GpuMapping() override;
    void map() override;
    // Unmaps nothing of a lost GPU: the end of the process does. The same holds for memory that the
    // driver refused to unmap; nothing moves there any more.
    void unmap() override;
    bool intact() const override { return true; }  // its owner cannot shrink it
    bool on_host() const override { return false; }
    const void* allocation() const override { return opened_; }
    const std::shared_ptr<Gpu>& gpu() const { return gpu_; }

  private:
    void close_fd();
    const std::shared_ptr<Gpu> gpu_;
    GpuHandle handle_;
    const uint64_t offset_;
    std::byte* opened_ = nullptr;
};

// Bytes of a batch, and batches in flight in a lane. 8 MiB are ~160 us of PCIe 5 x16, long
// against a launch (~5 us) and short against an engine's step; two slots overlap copy and kernel,
// the others cover the time until the host looks again.
//
// On a GPU that an engine keeps busy a kernel waits for its process' time slice, ~1.6 ms beside
// prefill (LMCache issue 5067): then kSlots batches are ~19 GB/s, kMostSlots more than the link. So
// a lane that stages gets more slots, one by one, while at least as many batches wait as are in
// flight, and as long as kSpareBytes of the GPU's memory stay free. A thread of their own makes the
// slots, and they stay: freeing GPU memory waits for all work of the GPU.
//
// A copy of one batch that arrives behind a longer copy waits for the batches in flight and one
// more. A longer copy has kSlots in flight, or as many as still wait, up to kMostSlots: 32 MiB,
// ~0.6 ms of PCIe 5, where little waits, 96 MiB, ~1.9 ms, in a lane that has grown.
constexpr uint64_t kBatchBytes = 8ull << 20;
constexpr unsigned kSlots = 4;
constexpr unsigned kMostSlots = 12;
constexpr uint64_t kSpareBytes = 512ull << 20;
constexpr uint64_t kGrowthPauseNanos = 1'000'000'000;  // after a try for which there was no memory
// The most block ids of a batch, and the most bytes of ids and planes of a staged batch: they are
// copied with it, from pinned memory of its slot.
constexpr uint64_t kBatchIds = 16384;
constexpr uint64_t kTableBytes = 256ull << 10;

// A copy is staged where a piece of a scattered block carries less than this on average, unless
// there are few. Over one large copy, measured (bench/results): by DMA, idle H100, loads of flat
// pieces of 24 KiB 0.08, of 28 KiB 0.62; stores of 4 KiB 0.07, 16 KiB 0.29, 28 KiB 0.47; both 0.85
// at 64 KiB. Staged: 0.85 to 0.91 at every length. A pitched piece costs about as much as a flat
// one: 160 rows of 4 KiB reach 0.78 and 0.84.
//
// Beside decode on an H200 staging reaches 0.49 to 0.60, and a step takes 1.18 to 1.36 as long; by
// DMA 1.01 to 1.06. There DMA is as fast from 16 KiB on for stores (0.55), 28 KiB for loads (0.50).
constexpr uint64_t kShortLoadBytes = 28ull << 10;
constexpr uint64_t kShortStoreBytes = 16ull << 10;

// So few pieces cost less by DMA (~1.5 us each) than a launch and one more hop.
constexpr uint64_t kFewPieces = 8;

enum class Way : uint8_t { kDma, kStaged };

// Counts of one lane; any thread may read them.
struct LaneCounts {
    std::atomic<uint64_t> dma_bytes{0}, staged_bytes{0};
    std::atomic<uint64_t> unpinned_bytes{0};  // of these, from or to L1 that is not pinned yet
    std::atomic<uint64_t> staging_bytes{0};   // GPU memory for staging
};

struct GpuOptions {
    uint64_t batch_bytes = kBatchBytes;
    std::optional<Way> way = std::nullopt;  // always this one, where it can be
    uint64_t short_store_bytes = kShortStoreBytes;
    uint64_t short_load_bytes = kShortLoadBytes;
    unsigned most_slots = kMostSlots;  // kSlots or more
};

class Lane;

class GpuDevice final : public Device {
  public:
    GpuDevice(std::shared_ptr<HostRegion> region, uint64_t page_bytes, std::shared_ptr<Gpu> gpu,
              GpuOptions options);
    ~GpuDevice() override;

    int completion_fd() const override { return completions_.fd(); }
    std::vector<Completion> drain() override { return completions_.drain(); }
    std::string lost() const override { return gpu_->lost(); }
    void submit_copy(std::shared_ptr<CopyJob> job) override;
    void cancel(uint64_t ticket) override;
    void submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) override;
    void submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) override;

    const std::shared_ptr<Gpu>& gpu() const { return gpu_; }
    const LaneCounts& counts(Direction direction) const;
    uint64_t mapped_bytes() const { return mapped_bytes_; }

  private:
    Completion run_map(const MapJob& job);

    const L1 l1_;
    const std::shared_ptr<Gpu> gpu_;
    CompletionQueue completions_;
    std::unique_ptr<Lane> stores_, loads_;
    std::atomic<uint64_t> mapped_bytes_{0};
    MapThread maps_;  // uses what is above
};

}  // namespace kvserver
