#include "io/write_derived.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bounds.h"
#include "io/window_order.h"

namespace flowstone {
namespace {

using Clock = std::chrono::steady_clock;

bool is_within(const WriteExtent& row, const WriteWindow& window) {
    return row.length != 0 && row.end() > window.begin && row.offset < window.end;
}

}  // namespace

void DerivedWindows::wait_for_sources(const WriteWindow& window) {
    const std::vector<std::uint64_t> sources = shared_.derived->sources_of(chunks_beginning_in(*shared_.rows, window));
    const auto is_over = [&] { return shared_.derived->are_noted(sources) || shared_.core.stopping(); };
    while (!is_over()) shared_.core.arena().wait(Clock::now() + std::chrono::hours(1), is_over);
}

bool DerivedWindows::leave_out(const WriteWindow& window) {
    if (!wait_for_digests(window)) return false;
    struct Chunk {
        std::uint64_t number;
        std::uint64_t digest;
        std::uint8_t codec;
    };
    std::vector<Chunk> chunks;
    for (std::size_t i = window.first_row; i < window.last_row; ++i) {
        const WriteExtent& row = shared_.rows->rows[i];
        if (!is_within(row, window)) continue;
        const std::uint64_t first = chunk_count(std::max(row.offset, window.begin) - row.offset);
        const std::uint64_t last = chunk_count(std::min(row.end(), window.end) - row.offset);
        for (std::uint64_t chunk = first; chunk < last; ++chunk) {
            const std::optional<std::uint64_t> digest = shared_.detector->device_digest(i, chunk);
            const std::optional<std::uint8_t> codec =
                digest ? shared_.derived->codec_of(row.chunk + chunk, *digest) : std::nullopt;
            if (!codec) return false;
            chunks.push_back({row.chunk + chunk, *digest, *codec});
        }
    }
    for (const Chunk& chunk : chunks) {
        shared_.appender->leave_out(chunk.number, chunk.codec, chunk.digest);
        shared_.digests[chunk.number] = chunk.digest;
    }
    return true;
}

/// Wait for the digests of a window's devices; returns whether they digest all of it. If its sources are on the host,
/// no copy of the device may have completed yet, so the digests may not be there.
bool DerivedWindows::wait_for_digests(const WriteWindow& window) {
    const WriteExtents& rows = *shared_.rows;
    for (std::size_t i = window.first_row; i < window.last_row; ++i)
        if (is_within(rows.rows[i], window) && rows.digests_of(rows.rows[i]) == nullptr) return false;
    for (std::size_t i = window.first_row; i < window.last_row; ++i)
        if (is_within(rows.rows[i], window)) wait_for_device(static_cast<std::size_t>(rows.rows[i].device));
    return !shared_.core.stopping();
}

/// Blocks until the work before the device's first copy is done, or the job is stopping.
void DerivedWindows::wait_for_device(std::size_t number) {
    JobCore& core = shared_.core;
    std::atomic<bool>& is_reached = shared_.devices_reached[number];
    if (is_reached || core.stopping()) return;
    const std::shared_ptr<Device>& device = shared_.rows->devices[number];
    auto batch = std::make_unique<CopyBatch>(nullptr, [&core, &device, &is_reached](int error) {
        if (error != 0)
            core.record_outcome(device_fault(*device, error, *core.files().front(), 0, 0));
        else
            is_reached = true;
        core.arena().wake();
        core.end_window();  // last: the job may be destroyed by it
    });
    core.begin_window(false);  // until the device has called back
    device->submit(std::move(batch));
    const auto is_over = [&] { return is_reached || core.stopping(); };
    while (!is_over()) core.arena().wait(Clock::now() + std::chrono::hours(1), is_over);
}

}  // namespace flowstone
