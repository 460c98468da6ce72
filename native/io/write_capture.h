// The middle stage of a write window: its bytes are captured, digested and encoded.
#pragma once

#include <cstddef>

#include "io/write_submit.h"
#include "io/write_window.h"

namespace flowstone {

/// Captures windows into their block, or into the mapped file, and passes them to the submitter. Runs on the workers.
class WindowCapturer {
public:
    WindowCapturer(WriteShared& shared, WindowTracker& tracker, WindowSubmitter& submitter)
        : shared_(shared), tracker_(tracker), submitter_(submitter) {}

    /// Have a worker capture the window.
    void post(const WriteWindowPtr& window) noexcept;

    /// A stage of WindowTask.
    void capture(const WriteWindowPtr& window, LiveAccess& live);
    void abandon(const WriteWindowPtr& window) { tracker_.abandon(window); }

private:
    std::byte* image_of(const WriteInFlight& window) const;
    std::uint64_t capture_runs(const WriteWindowPtr& window, std::vector<std::unique_ptr<Op>>& ops, LiveAccess& live);
    bool append(const WriteWindowPtr& window, std::vector<std::unique_ptr<Op>>& ops, std::uint64_t bytes,
                LiveAccess& live);
    void report_captured(const WriteRun& run) const;

    WriteShared& shared_;
    WindowTracker& tracker_;
    WindowSubmitter& submitter_;
};

}  // namespace flowstone
