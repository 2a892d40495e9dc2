// ipc.cpp: memory that another process owns and may truncate, and planes over it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "copy/core.h"

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

void WordMapping::map() {
    const int seals = fcntl(fd_, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        throw std::runtime_error("the state word page must be a memfd sealed with F_SEAL_SHRINK");
    FileMapping::map();
}

Word* WordMapping::word(uint64_t index) const {
    if (!mapped() || index >= size_ / sizeof(Word)) return nullptr;
    return reinterpret_cast<Word*>(data_) + index;
}

PlaneTable::PlaneTable(std::vector<std::shared_ptr<Mapping>> memories, const std::vector<Row>& rows,
                       uint64_t num_blocks)
    : memories_(std::move(memories)), num_blocks_(num_blocks) {
    if (num_blocks == 0) throw std::invalid_argument("a plane table needs at least one block");
    std::vector<const void*> allocation_of;
    for (size_t i = 0; i < rows.size(); ++i) {
        const Row& row = rows[i];
        const std::string name = "plane " + std::to_string(i);
        if (row.memory >= memories_.size())
            throw std::invalid_argument(name + " names memory " + std::to_string(row.memory) +
                                        " of " + std::to_string(memories_.size()));
        const Mapping& memory = *memories_[row.memory];
        if (!memory.mapped()) throw std::invalid_argument(name + ": its memory is not mapped");
        if (row.run == 0) throw std::invalid_argument(name + " has a run of 0 bytes");
        // 128-bit so that hostile numbers cannot wrap around the bound.
        const unsigned __int128 end = static_cast<unsigned __int128>(row.offset) +
                                      static_cast<unsigned __int128>(num_blocks - 1) * row.stride +
                                      row.run;
        if (end > memory.size())
            throw std::invalid_argument(
                name + " ends outside its memory of " + std::to_string(memory.size()) +
                " bytes (offset " + std::to_string(row.offset) + ", stride " +
                std::to_string(row.stride) + ", run " + std::to_string(row.run) + ", " +
                std::to_string(num_blocks) + " blocks)");
        if (num_blocks > 1 && row.stride < row.run)
            throw std::invalid_argument(name + " has blocks that overlap: stride " +
                                        std::to_string(row.stride) + " < run " +
                                        std::to_string(row.run));
        if (row.group >= kMaxGroups)
            throw std::invalid_argument(name + " is of group " + std::to_string(row.group) +
                                        ", there are at most " + std::to_string(kMaxGroups));
        if (row.group >= group_bytes_.size()) group_bytes_.resize(row.group + 1);
        group_bytes_[row.group] += row.run;
        planes_.push_back(
            {memory.data() + row.offset, row.stride, row.run, block_bytes_, row.group});
        allocation_of.push_back(memory.allocation());
        block_bytes_ += row.run;
    }
    if (planes_.empty()) throw std::invalid_argument("a plane table needs at least one plane");
    for (size_t group = 0; group < group_bytes_.size(); ++group)
        if (group_bytes_[group] == 0)
            throw std::invalid_argument("no plane is of group " + std::to_string(group) + " of " +
                                        std::to_string(group_bytes_.size()));
    series_ = plane_series(planes_, allocation_of);
}

bool PlaneTable::intact() const {
    for (const auto& memory : memories_)
        if (!memory->intact()) return false;
    return true;
}

bool PlaneTable::on_host() const {
    return std::all_of(memories_.begin(), memories_.end(),
                       [](const auto& memory) { return memory->on_host(); });
}

WordPage::WordPage(uint64_t words) : count_(words) {
    if (words > SIZE_MAX / sizeof(Word))
        throw std::system_error(EINVAL, std::generic_category(), "state word page");
    fd_ = memfd_create("kvserver-words", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
    const uint64_t size = words * sizeof(Word);
    void* address = MAP_FAILED;
    if (ftruncate(fd_, static_cast<off_t>(size)) == 0 &&
        fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (address == MAP_FAILED) {
        const int error = errno;
        close(fd_);
        throw std::system_error(error, std::generic_category(), "state word page");
    }
    words_ = static_cast<Word*>(address);
}

WordPage::~WordPage() {
    munmap(words_, count_ * sizeof(Word));
    close(fd_);
}

Word& WordPage::at(uint64_t index) const {
    if (index >= count_) throw std::out_of_range("state word index");
    return words_[index];
}

}  // namespace kvserver
