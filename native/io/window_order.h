// The order in which the windows of a write begin.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/backend.h"
#include "codec/derived.h"
#include "io/write_plan.h"

namespace flowstone {

/// window_bytes  most length of a window
/// gap_bytes     see WriteOptions::gap_bytes
struct WindowLimits {
    std::uint64_t window_bytes;
    std::uint64_t gap_bytes;
};

/// The windows of a write, early ones first. Both early and lazy windows are in the order of the files, with the files'
/// paths taking turns. Windows of derived rows begin a few windows after their sources, so that the device has windows
/// to write meanwhile. With a supply, windows are in the order of the files. derived: the derived chunks of the rows;
/// null: none
std::vector<WriteWindow> ordered_windows(const WriteExtents& rows, const WindowLimits& limits,
                                         const std::vector<std::shared_ptr<const File>>& files,
                                         const DerivedChunks* derived);

/// The chunks that begin in the window, in order.
std::vector<std::uint64_t> chunks_beginning_in(const WriteExtents& rows, const WriteWindow& window);

}  // namespace flowstone
