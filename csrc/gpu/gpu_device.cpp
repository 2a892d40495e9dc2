// gpu_device.cpp: the device: its two lanes, and mapping of engines' memory.
#include "gpu/gpu_device.h"

#include <unistd.h>

#include <stdexcept>
#include <utility>

#include "gpu/gpu_lane.h"

namespace kvserver {

// ---- mappings -------------------------------------------------------------------------------

GpuMapping::GpuMapping(std::shared_ptr<Gpu> gpu, GpuHandle handle, uint64_t offset, uint64_t size)
    : Mapping(size), gpu_(std::move(gpu)), handle_(handle), offset_(offset) {}

GpuMapping::~GpuMapping() { close_fd(); }

void GpuMapping::map() {
    if (size_ == 0 || offset_ > UINT64_MAX - size_)
        throw std::runtime_error("a window of " + std::to_string(size_) + " bytes at " +
                                 std::to_string(offset_) + " of GPU memory");
    const GpuMemory memory = gpu_->open(handle_, offset_ + size_);
    close_fd();
    opened_ = memory.data;
    if (memory.size && offset_ + size_ > *memory.size) {
        unmap();
        throw std::runtime_error("the GPU memory holds " + std::to_string(*memory.size) +
                                 " bytes, the registration states " +
                                 std::to_string(offset_ + size_));
    }
    data_ = opened_ + offset_;
}

void GpuMapping::unmap() {
    close_fd();
    data_ = nullptr;
    std::byte* opened = std::exchange(opened_, nullptr);
    if (opened == nullptr || gpu_->is_lost()) return;
    try {
        gpu_->close(opened);
    } catch (const GpuError& error) {
        if (!gpu_->is_lost()) throw;
    }
}

void GpuMapping::close_fd() {
    if (handle_.fd >= 0) ::close(handle_.fd);
    handle_.fd = -1;
}

// ---- the device -----------------------------------------------------------------------------

GpuDevice::GpuDevice(std::shared_ptr<HostRegion> region, uint64_t page_bytes,
                     std::shared_ptr<Gpu> gpu, GpuOptions options)
    : l1_{std::move(region), page_bytes}, gpu_(std::move(gpu)), maps_([this](const MapJob& job) {
          completions_.push(run_map(job));
          if (gpu_->is_lost()) {
              stores_->gpu_lost();
              loads_->gpu_lost();
          }
      }) {
    check_l1(l1_);
    if (options.batch_bytes == 0) throw std::invalid_argument("a batch needs at least one byte");
    if (options.most_slots < kSlots)
        throw std::invalid_argument("a lane has at least " + std::to_string(kSlots) + " slots");
    stores_ = std::make_unique<Lane>(l1_, gpu_, completions_, options);
    loads_ = std::make_unique<Lane>(l1_, gpu_, completions_, options);
}

GpuDevice::~GpuDevice() = default;

void GpuDevice::submit_copy(std::shared_ptr<CopyJob> job) {
    check_job(*job, l1_);
    for (const auto& memory : job->planes->memories()) {
        const auto* own = dynamic_cast<const GpuMapping*>(memory.get());
        if (own == nullptr || own->gpu() != gpu_)
            throw std::invalid_argument("planes that are not this GPU's memory");
    }
    Lane& lane = job->direction == Direction::kStore ? *stores_ : *loads_;
    lane.submit(std::move(job));
}

void GpuDevice::cancel(uint64_t ticket) {
    stores_->cancel(ticket);
    loads_->cancel(ticket);
}

const LaneCounts& GpuDevice::counts(Direction direction) const {
    return direction == Direction::kStore ? stores_->counts() : loads_->counts();
}

void GpuDevice::submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) {
    maps_.add({ticket, false, std::move(mappings)});
}

void GpuDevice::submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) {
    maps_.add({ticket, true, std::move(mappings)});
}

Completion GpuDevice::run_map(const MapJob& job) {
    if (gpu_->is_lost() && !job.unmap) return refuse_map_job(job, gpu_->lost());
    uint64_t before = 0, after = 0;
    for (const auto& mapping : job.mappings)
        if (mapping->mapped() && !mapping->on_host()) before += mapping->size();
    Completion end{};
    try {
        if (!gpu_->is_lost()) gpu_->enter();
        end = run_map_job(job);
    } catch (const GpuError& error) {
        end = refuse_map_job(job, error.what());
        end.outcome = Outcome::kFailed;
    }
    if (end.outcome == Outcome::kFailed && !job.unmap && gpu_->is_lost())
        end.outcome = Outcome::kDeviceLost;
    for (const auto& mapping : job.mappings)
        if (mapping->mapped() && !mapping->on_host()) after += mapping->size();
    mapped_bytes_ += after - before;
    return end;
}

}  // namespace kvserver
