// gpu_ways.h: other ways to move a request's blocks between a GPU and pinned host memory, for the
// benchmark to compare with. No part of kvserver; bench/gpu_ways.py builds it and calls it.
//
// The first two are written after a description of how connectors with paged kernels do it: a
// kernel with one CTA for each K or V, block and layer, 16-byte streaming accesses, four chunks a
// launch; the copy and the kernel one after the other on one stream, through one staging buffer.
// Chunks lie as [plane][block][run].
#pragma once

#include <cstddef>
#include <cstdint>

namespace ways {

enum class Way : int32_t {
    kByBlocks,  // the kernel is given block ids
    kBySlots,   // and here a slot for each token, which it looks up one by one
    kMemcpy,    // no kernel: cudaMemcpyAsync for each run. In host memory: [block][plane][run]
    kDirect,    // kvserver's own kernel, over pinned host memory instead of staging. As above
};

// One request. Plane p's block b is `run` bytes at bases[p] + b * run.
struct Request {
    const uint64_t* bases;
    uint64_t num_planes;
    uint64_t run;
    uint64_t block_tokens;
    const uint32_t* blocks;
    uint64_t num_blocks;  // of `blocks`; whole chunks
    uint64_t chunk_blocks;
    std::byte* host;  // num_blocks * num_planes * run bytes, pinned
};

constexpr uint64_t kLaunchChunks = 4;

}  // namespace ways

extern "C" {
// Both return an error's text, or null. `direction`: 0 stores, 1 loads; returns when the bytes are
// there.
const char* ways_open(const ways::Request* request, void** opened);
const char* ways_run(void* opened, ways::Way way, int32_t direction);
void ways_close(void* opened);
}
