// The order in which the windows of a write begin.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend.h"
#include "derived.h"
#include "write_plan.h"

namespace flowstone {

/// window_bytes  the length of a window, at most
/// gap_bytes     as WriteOptions::gap_bytes
struct WindowLimits {
    std::uint64_t window_bytes;
    std::uint64_t gap_bytes;
};

/// Early windows first. Of each kind those of derived rows begin a few windows after what they follow from, so that the device
/// gets something to write meanwhile, and at the end; the others in the order of the files, by turns of these files' paths.
/// Those of rows that come while the job runs are in the order of the files.
/// derived  of the rows; null: none is
std::vector<WriteWindow> ordered_windows(const WriteExtents& rows, const WindowLimits& limits, const std::vector<std::shared_ptr<const File>>& files,
                                         const DerivedChunks* derived);

/// The chunks that begin in the window, in order.
std::vector<std::uint64_t> chunks_beginning_in(const WriteExtents& rows, const WriteWindow& window);

}  // namespace flowstone
