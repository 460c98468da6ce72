// The last stage of a write window: its requests.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "io/write_window.h"

namespace flowstone {

/// Submits the requests of captured windows, and ends each window with its last request. Until the files are ready,
/// windows are held back. Any thread.
class WindowSubmitter {
public:
    WindowSubmitter(WriteShared& shared, WindowTracker& tracker)
        : shared_(shared), tracker_(tracker), files_ready_(shared.options.files_ready) {}

    /// Add requests for `part` of the window, at `offset` of its file, each of at most request_bytes.
    void add_ops(std::vector<std::unique_ptr<Op>>& ops, const WriteWindowPtr& window, std::uint64_t offset, iovec part);
    /// Submit now, or once the files are ready.
    void submit(const WriteWindowPtr& window, std::vector<std::unique_ptr<Op>> ops);
    /// End a window in place, which has no requests.
    void end_in_place(const WriteWindowPtr& window);

    bool are_files_ready() const { return files_ready_.load(); }
    /// Record that files are ready. Does not block.
    void mark_files_ready();
    /// Blocks until the files are ready, or the job is stopping.
    void wait_for_files();
    /// Submit held-back windows, as files are ready or the job is stopping. Later windows are not held back.
    void submit_held();

    /// A stage of WindowTask.
    void submit_now(const WriteWindowPtr& window, LiveAccess&) { submit_ops(window); }
    void abandon(const WriteWindowPtr& window) { tracker_.abandon(window); }

private:
    std::unique_ptr<Op> make_op(const WriteWindowPtr& window, std::uint64_t offset, iovec part);
    void submit_ops(const WriteWindowPtr& window);
    void end_op(const WriteWindowPtr& window, std::uint64_t bytes, const Outcome& outcome);

    WriteShared& shared_;
    WindowTracker& tracker_;
    std::atomic<bool> files_ready_;
    std::mutex held_mutex_;
    std::vector<WriteWindowPtr> held_;  // captured before the files were ready; under held_mutex_
};

}  // namespace flowstone
