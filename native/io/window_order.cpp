#include "io/window_order.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "bounds.h"
#include "codec/encode.h"
#include "io/path_order.h"

namespace flowstone {
namespace {

using Windows = std::vector<WriteWindow>;

// So many windows keep the workers busy while sources are captured.
constexpr std::size_t derived_lag = 8;

/// The place of each derived window: after how many of `sources`.
std::vector<std::pair<std::size_t, WriteWindow>> places_of(const WriteExtents& rows, const Windows& derived,
                                                           const Windows& sources, const DerivedChunks& links) {
    std::unordered_map<std::uint64_t, std::size_t> begins;  // by chunk, the number of its window
    for (std::size_t i = 0; i < sources.size(); ++i)
        for (const std::uint64_t chunk : chunks_beginning_in(rows, sources[i])) begins.emplace(chunk, i);
    std::vector<std::pair<std::size_t, WriteWindow>> places;
    for (const WriteWindow& window : derived) {
        std::size_t after = 0;
        for (const std::uint64_t chunk : links.sources_of(chunks_beginning_in(rows, window))) {
            const auto found = begins.find(chunk);
            if (found != begins.end())
                after = std::max(after, found->second + 1 + derived_lag);  // if not found, its source is early
        }
        places.emplace_back(after, window);
    }
    std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    return places;
}

/// Append windows that are all early, or all lazy.
void append_ordered(Windows& ordered, const WriteExtents& rows, Windows windows,
                    const std::vector<std::shared_ptr<const File>>& files, const DerivedChunks* links) {
    const auto middle = std::stable_partition(windows.begin(), windows.end(),
                                              [](const WriteWindow& window) { return !window.derived; });
    const Windows derived(middle, windows.end());
    windows.erase(middle, windows.end());
    if (!rows.supply) interleave_paths(windows.begin(), windows.end(), files);
    auto next = windows.cbegin();
    if (links != nullptr) {
        for (const auto& [after, window] : places_of(rows, derived, windows, *links)) {
            const auto end = windows.cbegin() + static_cast<std::ptrdiff_t>(std::min(after, windows.size()));
            ordered.insert(ordered.end(), next, end);
            next = end;
            ordered.push_back(window);
        }
    }
    ordered.insert(ordered.end(), next, windows.cend());
}

}  // namespace

std::vector<std::uint64_t> chunks_beginning_in(const WriteExtents& rows, const WriteWindow& window) {
    std::vector<std::uint64_t> chunks;
    for (std::size_t i = window.first_row; i < window.last_row; ++i) {
        const WriteExtent& row = rows.rows[i];
        if (row.chunk == no_digest || row.end() <= window.begin || row.offset >= window.end) continue;
        const std::uint64_t first = chunk_count(std::max(row.offset, window.begin) - row.offset);
        const std::uint64_t last = chunk_count(std::min(row.end(), window.end) - row.offset);
        for (std::uint64_t chunk = first; chunk < last; ++chunk) chunks.push_back(row.chunk + chunk);
    }
    return chunks;
}

std::vector<WriteWindow> ordered_windows(const WriteExtents& rows, const WindowLimits& limits,
                                         const std::vector<std::shared_ptr<const File>>& files,
                                         const DerivedChunks* derived) {
    Windows windows = plan_windows(rows, limits.window_bytes);
    const Windows encoded = plan_chunk_windows(rows, limits.window_bytes, limits.gap_bytes);
    windows.insert(windows.end(), encoded.begin(), encoded.end());
    for (WriteWindow& window : windows) window.early = is_early(rows, window);
    const auto lazy =
        std::stable_partition(windows.begin(), windows.end(), [](const WriteWindow& window) { return !window.lazy; });
    Windows ordered;
    append_ordered(ordered, rows, {windows.begin(), lazy}, files, derived);
    append_ordered(ordered, rows, {lazy, windows.end()}, files, derived);
    return ordered;
}

}  // namespace flowstone
