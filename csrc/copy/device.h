// device.h: the contract of a device: it moves bytes between an engine's memory and L1.
//
// Nothing in csrc/ knows tensors, layers, messages or namespaces: addresses and integers only.
//
// Two kinds of memory:
//   L0  an engine's KV cache, seen as planes. Block `id` of plane p is the `run` bytes at
//       p.base + id * p.stride.
//   L1  one region of equal pages. A slot is a list of extents, runs of neighbouring pages; inside
//       a slot, bytes are laid out [block][plane][run], so the bytes of one block are contiguous
//       but where an extent ends.
//
// Who may write what: a store reads L0 and writes the pages of its slots; a load reads the pages
// and writes L0. The caller (the server loop) keeps slots alive and unshared until the job's
// Completion was drained; it keeps mappings alive as long. A device never allocates L1.
//
// Threads: every public function may be called from any thread. Jobs are run by a device's own
// threads, which never touch Python.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copy/job.h"

namespace kvserver {

// A backend that moves bytes: the CPU's threads, a GPU's streams, a test's stand-in.
//
// Tickets. Every ticket that a submit_ function accepted ends exactly once, by one Completion, also
//   after cancel() and after the device was lost. A submit_ function that throws accepted nothing
//   and moved no word. A device may run, finish and report tickets in any order: no caller may rely
//   on an earlier ticket, and loads and stores never wait for each other. Tickets that are open
//   when a device is destroyed do not end; from then on it writes nothing.
// Words. Only begin_job(), before the first byte, and end_job(), after the last one, move a word.
//   The Completion is pushed after the word was moved. A word in PENDING that cannot begin is
//   FAILED.
// Cancel. cancel(), or the worker by the word, requests it. The device looks at least once a block,
//   or as often as its hardware lets it. Then it ends the ticket as kCancelled, unless the whole
//   copy had counted by then. Until the ticket ends the device may read (a store) or write (a load)
//   the ticket's blocks and pages; afterwards it touches neither. An unknown ticket is ignored: it
//   has ended.
// Parts. A device may report a store's first slots while it copies others: their bytes were whole
//   while the word was RUNNING and the deadline had not passed. drain_parts() may also name tickets
//   that ended meanwhile. Whoever drains calls drain() first, which resets completion_fd().
// Failure. A ticket that ends as anything but kDone may have moved any part of its bytes; `bytes`
//   is their number. Its pages, but for reported slots, and for a load its blocks, contain garbage.
// Loss. When the hardware is lost for good, every open ticket ends as kDeviceLost, after the
//   device made sure that none of its bytes still moves. Where the device cannot, the ticket stays
//   open until the process ends. Later copies and maps end as kDeviceLost at once. Unmaps are still
//   carried out, and end as kDone. lost() is the reason from then on.
// Time. No function waits for a copy, a map or the hardware: all return at once and may be called
//   by the loop. Only the destructor waits, until each running copy is at its next block.
class Device {
  public:
    virtual ~Device() = default;

    virtual int completion_fd() const = 0;  // readable while drain() would return something
    virtual std::vector<Completion> drain() = 0;
    virtual std::vector<Part> drain_parts() { return {}; }
    virtual std::string lost() const = 0;  // why no copy can succeed any more; empty while it can

    // Throws std::invalid_argument by check_job().
    virtual void submit_copy(std::shared_ptr<CopyJob> job) = 0;
    virtual void cancel(uint64_t ticket) = 0;
    // A map that fails leaves nothing mapped. An unmap that fails has ended as well: see Mapping.
    // REQUIRES of an unmap: no open copy uses the mappings.
    virtual void submit_map(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) = 0;
    virtual void submit_unmap(uint64_t ticket, std::vector<std::shared_ptr<Mapping>> mappings) = 0;
};

}  // namespace kvserver
