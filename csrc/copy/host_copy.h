// host_copy.h: copying by a thread of the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy/job.h"

namespace kvserver {

// Copying by this thread (host_copy.cpp). False if the engine's memory was truncated.
// REQUIRES: install_sigbus_guard() was called, begin_job() let it begin.
bool copy_block_guarded(const CopyJob& job, uint64_t index, const L1& l1);
// As memcpy, but past the cache, for bytes that are not read again soon.
void copy_bytes(std::byte* to, const std::byte* from, uint64_t size);
void finish_copies();  // before the end of this thread's copies is reported
void install_sigbus_guard();

}  // namespace kvserver
