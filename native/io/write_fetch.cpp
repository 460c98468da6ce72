#include "io/write_fetch.h"

#include <algorithm>
#include <utility>

#include "bounds.h"

namespace flowstone {

void DeviceFetcher::post(const WriteWindowPtr& window) noexcept {
    shared_.core.workers().post(window->at<&DeviceFetcher::fetch>(*this, window));
}

void DeviceFetcher::fetch(const WriteWindowPtr& window, LiveAccess& live) {
    make_batches(window);
    list_copies(*window, live);
    shared_.check_sources();
    submit_copies(window);
}

void DeviceFetcher::make_batches(const WriteWindowPtr& window) {
    const std::vector<std::shared_ptr<Device>>& devices = shared_.rows->devices;
    window->batches.reserve(devices.size());
    for (std::size_t number = 0; number < devices.size(); ++number) {
        const auto done = [this, window, number](int error) {
            const WriteWindow& planned = window->planned;
            if (error != 0)
                shared_.core.record_outcome(device_fault(*shared_.rows->devices[number], error,
                                                         shared_.core.file(planned.file), planned.begin,
                                                         planned.end - planned.begin));
            else
                shared_.devices_reached[number] = true;
            on_fetched(window);
        };
        window->batches.push_back(std::make_unique<CopyBatch>([this, window] { on_queued(window); }, done));
    }
}

void DeviceFetcher::list_copies(WriteInFlight& window, LiveAccess& live) {
    const WriteExtents& rows = *shared_.rows;
    // Unused if the window ends with a chunk; otherwise it is after the window: see plan_windows.
    window.rest = window.block.bytes() + (shared_.core.arena().block_bytes() - chunk_bytes);
    const auto list = [&](const WriteExtent& row, std::uint64_t begin, std::uint64_t bytes, std::byte* out) {
        CopyBatch& batch = *window.batches[static_cast<std::size_t>(row.device)];
        if (row.layout != contiguous)
            return batch.add(
                {out, row.address, bytes, true, 1, 0, 0, &rows.layouts[static_cast<std::size_t>(row.layout)], begin});
        if (!row.gathered) return batch.add({out, row.address + begin, bytes, true});
        window.gathered.push_back({out, row.source() + begin, bytes});
        batch.waits = true;
    };
    for (const WriteRun& run : shared_.runs_of(window.planned))
        if (!shared_.core.stopping())
            fetch_run(rows, run, window.block.bytes() + (run.begin - window.planned.begin), window.rest, list,
                      *shared_.detector, live);
}

/// Continue when all copies have ended, even failed ones: until then devices use the block.
void DeviceFetcher::submit_copies(const WriteWindowPtr& window) {
    std::vector<std::unique_ptr<CopyBatch>> batches = std::move(window->batches);  // they keep the window alive
    const auto is_used = [](const std::unique_ptr<CopyBatch>& batch) { return batch->waits || !batch->copies.empty(); };
    // Gathered rows may change as soon as the gather is in the stream.
    for (const std::unique_ptr<CopyBatch>& batch : batches)
        batch->early = !window->planned.lazy && !batch->copies.empty();
    window->queueing = window->fetching =
        1 + static_cast<std::size_t>(std::count_if(batches.begin(), batches.end(), is_used));
    for (std::size_t i = 0; i < batches.size(); ++i)
        if (is_used(batches[i])) shared_.rows->devices[i]->submit(std::move(batches[i]));
    on_queued(window);
    on_fetched(window);
}

void DeviceFetcher::on_queued(const WriteWindowPtr& window) {
    if (--window->queueing == 0) tracker_.mark_queued(*window);
}

void DeviceFetcher::on_fetched(const WriteWindowPtr& window) {
    if (--window->fetching == 0) capturer_.post(window);
}

}  // namespace flowstone
