// file_io.h: records' way between L1 and its extents of the data file.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "l2/file_calls.h"
#include "l2/file_device.h"
#include "l2/record.h"

namespace kvserver {

struct IoResult {
    FileOutcome outcome = FileOutcome::kDone;
    std::string what;
};

// REQUIRES: the extents have room for record.file_bytes(), the record's memory is aligned.
// `bytes` counts what was moved; `stop` is looked at before each piece.
// Neighbours are written by few calls; each has an equal share of the extents' pages.
IoResult write_records(const std::vector<std::shared_ptr<const Record>>& records,
                       const DataFile& file, const std::vector<Extent>& extents, FileCalls& calls,
                       const std::atomic<bool>& stop, uint64_t& bytes);
IoResult read_record(const Record& record, const DataFile& file, const std::vector<Extent>& extents,
                     FileCalls& calls, const std::atomic<bool>& stop, uint64_t& bytes);

}  // namespace kvserver
