// Windows of derived rows: when a job begins them, and which ones it can leave out.
#pragma once

#include <cstddef>

#include "io/write_window.h"

namespace flowstone {

/// Only for the coordinator of a job with derived rows.
class DerivedWindows {
public:
    explicit DerivedWindows(WriteShared& shared) : shared_(shared) {}

    /// Blocks until all sources of the window's rows are captured, or the job is stopping. All sources have got their
    /// blocks before, so this waits for no memory.
    void wait_for_sources(const WriteWindow& window);

    /// Leave the window out if every chunk of it is derived, according to the digests that its device computed when the
    /// save began. Returns whether it is left out. Each digest is compared with a digest made from captured source
    /// bytes, which the files contain and from which a reader computes the chunk. So later work of the device cannot
    /// cause a false match.
    bool leave_out(const WriteWindow& window);

private:
    bool wait_for_digests(const WriteWindow& window);
    void wait_for_device(std::size_t number);

    WriteShared& shared_;
};

}  // namespace flowstone
