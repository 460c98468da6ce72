// The options of a write job.
#pragma once

#include <cstdint>

#include "watch/mutation_detector.h"

namespace flowstone {

/// gap_bytes  untouched blocks between two rows, up to this length, are written as zero; longer runs are skipped
/// blocks     how many arena blocks lazy windows may use at once, until `expedite`; at least one
/// bytes_per_s  how fast lazy windows may begin, until `expedite`; 0 is no limit
/// cap_bytes_per_s  how fast any window may begin, also while a thread waits; 0 is no limit
/// watching  how lazy sources are watched for changes
/// files_ready  false: nothing is written before the call of `files_ready`
struct WriteOptions {
    std::uint64_t gap_bytes = 0;
    std::uint32_t blocks = UINT32_MAX;
    std::uint64_t bytes_per_s = 0;
    std::uint64_t cap_bytes_per_s = 0;
    Watching watching = Watching::samples;
    bool files_ready = true;
};

}  // namespace flowstone
