// mapping.cpp: memory that another process owns and may truncate.
#include "copy/mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kvserver {

FileMapping::FileMapping(int fd, uint64_t size) : Mapping(size), fd_(fd) {}

FileMapping::~FileMapping() { FileMapping::unmap(); }

void FileMapping::map() {
    struct stat info{};
    if (fstat(fd_, &info) != 0)
        throw std::runtime_error(std::string("fstat of shared memory: ") + strerror(errno));
    if (size_ == 0 || static_cast<uint64_t>(info.st_size) < size_)
        throw std::runtime_error("shared memory holds " + std::to_string(info.st_size) +
                                 " bytes, the registration states " + std::to_string(size_));
    void* address = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (address == MAP_FAILED)
        throw std::runtime_error("mmap of " + std::to_string(size_) +
                                 " shared bytes: " + strerror(errno));
    data_ = static_cast<std::byte*>(address);
}

void FileMapping::unmap() {
    if (data_ != nullptr) munmap(data_, size_);
    data_ = nullptr;
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
}

bool FileMapping::intact() const {
    struct stat info{};
    return fd_ >= 0 && fstat(fd_, &info) == 0 && static_cast<uint64_t>(info.st_size) >= size_;
}

}  // namespace kvserver
