#include "io/write_capture.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace flowstone {

void WindowCapturer::post(const WriteWindowPtr& window) noexcept {
    shared_.core.workers().post(window->at<&WindowCapturer::capture>(*this, window));
}

void WindowCapturer::capture(const WriteWindowPtr& window, LiveAccess& live) {
    JobCore& core = shared_.core;
    if (core.stopping()) {
        if (shared_.rows->supply) shared_.rows->supply->end();
        tracker_.release_sources(*window);
        return tracker_.end(window);
    }
    const std::int64_t begin_ns = now_ns();
    for (const WriteInFlight::GatheredRun& run : window->gathered) std::memcpy(run.out, run.source, run.bytes);
    std::vector<std::unique_ptr<Op>> ops;
    const std::uint64_t bytes = capture_runs(window, ops, live);
    core.copied_bytes += bytes;
    if (shared_.derived) core.arena().wake();  // DerivedWindows waits for captured sources
    core.spans.add(Phase::capture, begin_ns, bytes);
    shared_.check_sources();
    tracker_.release_sources(*window);
    if (window->planned.appended && !append(window, ops, bytes, live)) return tracker_.end(window);
    if (window->in_place) return submitter_.end_in_place(window);
    submitter_.submit(window, std::move(ops));
}

/// Where the window's bytes are captured.
std::byte* WindowCapturer::image_of(const WriteInFlight& window) const {
    if (!window.in_place) return window.block.bytes();
    return reinterpret_cast<std::byte*>(shared_.core.file(window.planned.file).mapped + window.planned.begin);
}

/// Returns how many bytes of sources were captured.
std::uint64_t WindowCapturer::capture_runs(const WriteWindowPtr& window, std::vector<std::unique_ptr<Op>>& ops,
                                           LiveAccess& live) {
    std::uint64_t bytes = 0;
    const std::vector<WriteRun> runs = shared_.runs_of(window->planned);
    ops.reserve(runs.size());
    const ChunkNotes notes{shared_.digests, shared_.derived ? &*shared_.derived : nullptr};
    for (const WriteRun& run : runs) {
        std::byte* const image = image_of(*window) + (run.begin - window->planned.begin);
        if (!run.appended && !window->in_place)
            submitter_.add_ops(ops, window, run.begin, {image, run.end - run.begin});
        capture_run(*shared_.rows, run, image, window->rest, notes, *shared_.detector, live);
        bytes += row_bytes(*shared_.rows, run);
        finish_watch(*shared_.rows, run, *shared_.detector);
        if (shared_.rows->supply) report_captured(run);
    }
    return bytes;
}

/// Encode the window, and assign its place in the file. Returns false if no byte is left to write, or the job is
/// stopping.
bool WindowCapturer::append(const WriteWindowPtr& window, std::vector<std::unique_ptr<Op>>& ops, std::uint64_t bytes,
                            LiveAccess& live) {
    if (shared_.core.stopping()) return false;
    const std::int64_t begin_ns = now_ns();
    const Appender::Range range =
        shared_.appender->append(window->planned, window->block.bytes(), live.coding_room(), shared_.digests);
    shared_.core.spans.add(Phase::encode, begin_ns, bytes);
    if (range.bytes == 0) return false;  // the base has all chunks
    submitter_.add_ops(ops, window, range.offset, {window->block.bytes(), range.bytes});
    return true;
}

/// Report to the supply that the run's part of each row was captured.
void WindowCapturer::report_captured(const WriteRun& run) const {
    for (std::size_t i = run.first_row; i < run.last_row; ++i) {
        const WriteExtent& row = shared_.rows->rows[i];
        const std::uint64_t begin = std::max(row.offset, run.begin);
        const std::uint64_t end = std::min(row.end(), run.end);
        if (begin < end) shared_.rows->supply->captured(i, end - begin);
    }
}

}  // namespace flowstone
