#include "io/write_window.h"

#include <algorithm>
#include <utility>

namespace flowstone {

WriteShared::WriteShared(JobCore& core, std::shared_ptr<const WriteExtents> rows, const WriteOptions& options,
                         std::shared_ptr<MutationDetector> detector)
    : core(core),
      rows(std::move(rows)),
      options(options),
      digests(this->rows->chunks, 0),
      detector(detector ? std::move(detector) : std::make_shared<MutationDetector>(*this->rows, options.watching)),
      devices_reached(this->rows->devices.size()) {
    const auto is_derived = [](const WriteExtent& row) { return row.derivation != Derivation::none; };
    if (std::any_of(this->rows->rows.begin(), this->rows->rows.end(), is_derived)) derived.emplace(*this->rows);
    if (!this->rows->keeps_places()) appender.emplace(*this->rows, core.files().size(), derived_chunks());
}

std::vector<WriteRun> WriteShared::runs_of(const WriteWindow& window) const {
    const bool is_mapped = core.file(window.file).mapped != 0;
    return window.appended ? std::vector{window}
                           : split_runs(*rows, window, is_mapped ? UINT64_MAX : options.gap_bytes);
}

void WriteShared::check_sources() const {
    const std::optional<MutationDetector::Change> change = detector->change();
    if (!change) return;
    const WriteExtent& row = rows->rows[change->row];
    core.record_outcome(Fault{"capture", change->error, core.file(row.file).path, row.offset + change->begin,
                              change->end - change->begin});
}

void WindowTracker::begin(const WriteInFlight& window) {
    if (window.planned.lazy) ++lazy_windows_;
    shared_.core.begin_window(true);
}

void WindowTracker::mark_queued(WriteInFlight& window) {
    if (std::exchange(window.queued, true)) return;
    if (window.planned.early) shared_.core.release_early();
    shared_.core.queue_sources();
}

void WindowTracker::release_sources(WriteInFlight& window) {
    if (std::exchange(window.released, true)) return;
    // The result is not needed any more: end the watch, which would make later writes slower.
    if (shared_.core.stopping()) shared_.detector->release();
    mark_queued(window);
    shared_.core.release_sources();
}

void WindowTracker::end(const WriteWindowPtr& window) {
    if (window->planned.lazy) --lazy_windows_;
    window->block.release();
    shared_.core.arena().wake();
    shared_.core.end_window();  // last: the job may be destroyed by it
}

void WindowTracker::abandon(const WriteWindowPtr& window) {
    shared_.core.record_outcome(shared_.core.no_memory());
    window->batches.clear();  // they keep the window alive
    release_sources(*window);
    end(window);
}

}  // namespace flowstone
