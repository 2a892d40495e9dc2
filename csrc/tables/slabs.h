// slabs.h: an array that grows by slabs of equal size, so that no element ever moves.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace kvserver {

// push_back() makes at most one slab; it moves a pointer for each kSlab elements now and then.
template <typename T>
class Slabs {
  public:
    static constexpr size_t kSlab = 1024;

    Slabs() = default;
    Slabs(const Slabs&) = delete;
    Slabs& operator=(const Slabs&) = delete;

    T& operator[](size_t at) { return slabs_[at / kSlab][at % kSlab]; }
    const T& operator[](size_t at) const { return slabs_[at / kSlab][at % kSlab]; }
    T& back() { return (*this)[size_ - 1]; }
    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    size_t memory_bytes() const { return slabs_.size() * kSlab * sizeof(T); }

    void push_back(T value) {
        if (size_ == slabs_.size() * kSlab) slabs_.push_back(std::make_unique<T[]>(kSlab));
        (*this)[size_++] = std::move(value);
    }
    void pop_back() { --size_; }

  private:
    std::vector<std::unique_ptr<T[]>> slabs_;
    size_t size_ = 0;
};

}  // namespace kvserver
