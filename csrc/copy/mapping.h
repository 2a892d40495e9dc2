// mapping.h: memory that another process owns, mapped here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvserver {

// Memory that another process owns, mapped here: into the host's address space or a GPU's. map()
// and unmap() may be slow: they are run as jobs, by the device that copies to it.
// enable_shared_from_this, here and in every class that Python passes to native code: a shared_ptr
// that comes from Python then does not own the Python object, and a copying thread that drops the
// last one needs no GIL.
class Mapping : public std::enable_shared_from_this<Mapping> {
  public:
    explicit Mapping(uint64_t size) : size_(size) {}
    virtual ~Mapping() = default;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    virtual void map() = 0;  // throws std::runtime_error with the reason
    // Also closes the descriptor or handle that it was made from; idempotent. Throws
    // std::runtime_error if something stays mapped, which then does so for good.
    virtual void unmap() = 0;
    virtual bool intact() const = 0;   // false once the memory is smaller than what was mapped
    virtual bool on_host() const = 0;  // whether a host thread may touch data()
    // The allocation that this mapping is a part of; no copy may span two. REQUIRES: mapped().
    virtual const void* allocation() const { return this; }

    std::byte* data() const { return data_; }
    uint64_t size() const { return size_; }
    bool mapped() const { return data_ != nullptr; }

  protected:
    uint64_t size_;
    std::byte* data_ = nullptr;
};

// A file descriptor, mapped shared. The owner of the file may truncate it at any time, so every
// access must be guarded.
class FileMapping : public Mapping {
  public:
    FileMapping(int fd, uint64_t size);  // takes over fd
    ~FileMapping() override;
    void map() override;
    void unmap() override;
    bool intact() const override;
    bool on_host() const override { return true; }

  protected:
    int fd_;
};

}  // namespace kvserver
