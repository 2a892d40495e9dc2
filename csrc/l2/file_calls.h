// file_calls.h: the two calls by which bytes reach a data file, so that tests can put faults below
// all else.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <memory>

namespace kvserver {

// As preadv(2) and pwritev(2): -1 and errno on failure, fewer bytes than wanted are no failure.
// Any thread calls.
class FileCalls : public std::enable_shared_from_this<FileCalls> {
  public:
    virtual ~FileCalls() = default;
    virtual ssize_t read(int fd, const iovec* to, int count, off_t offset);
    virtual ssize_t write(int fd, const iovec* from, int count, off_t offset);
};

}  // namespace kvserver
