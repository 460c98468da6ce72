// The first stage of a write window with rows on devices: its bytes are copied into its block.
#pragma once

#include "io/write_capture.h"
#include "io/write_window.h"

namespace flowstone {

/// Copies a window's rows on the host, and queues copies of its rows on devices; then the window is captured. Runs on
/// the workers, and on the devices' threads.
class DeviceFetcher {
public:
    DeviceFetcher(WriteShared& shared, WindowTracker& tracker, WindowCapturer& capturer)
        : shared_(shared), tracker_(tracker), capturer_(capturer) {}

    /// Have a worker fetch the window.
    void post(const WriteWindowPtr& window) noexcept;

    /// A stage of WindowTask.
    void fetch(const WriteWindowPtr& window, LiveAccess& live);
    void abandon(const WriteWindowPtr& window) { tracker_.abandon(window); }

private:
    void make_batches(const WriteWindowPtr& window);
    void list_copies(WriteInFlight& window, LiveAccess& live);
    void submit_copies(const WriteWindowPtr& window);
    void on_queued(const WriteWindowPtr& window);
    void on_fetched(const WriteWindowPtr& window);

    WriteShared& shared_;
    WindowTracker& tracker_;
    WindowCapturer& capturer_;
};

}  // namespace flowstone
