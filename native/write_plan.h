// From rows to windows: which file range each request writes, and how it is captured.
// Pure but for the capture functions, which read sources; safe from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "derived.h"
#include "live_memory.h"
#include "io_extents.h"
#include "mutation_detector.h"

namespace flowstone {

/// A 4096-aligned range of one file, at most as long as a request; of a job with devices, as a block. Rows [first_row, last_row) are those that overlap it
/// (possibly with empty ones among them).
/// Invariant: the windows of a plan are disjoint, ascending, and begin and end with a touched block. (Appended windows
/// begin and end with a chunk, and are not aligned to blocks.)
struct WriteWindow {
    std::uint32_t file;
    std::uint64_t begin;
    std::uint64_t end;
    std::size_t first_row;
    std::size_t last_row;
    bool lazy = false;  // all its rows are
    bool appended = false;  // whole chunks, placed in the file once they are encoded (encode.h)
    bool derived = false;   // all its rows may follow from others, and are captured after these
    bool early = false;     // the caller of a save waits until it is read: some row is neither lazy nor gathered
};

/// The part of a window that one request writes: no gap of untouched blocks longer than gap_bytes.
using WriteRun = WriteWindow;

/// Of the files in which chunks keep their places. Where rows are on devices, a window ends with a chunk; where chunks do not
/// end with a block of the file, it leaves room behind it, in `window_bytes`, for the rest of the one that it cuts.
std::vector<WriteWindow> plan_windows(const WriteExtents& rows, std::uint64_t window_bytes);

/// Whether a row of the window changes as soon as the caller of a save goes on: it is not lazy, nor put aside by a device.
bool is_early(const WriteExtents& rows, const WriteWindow& window);

/// Whether a row of the window is on a device.
bool needs_fetch(const WriteExtents& rows, const WriteWindow& window);

std::vector<WriteRun> split_runs(const WriteExtents& rows, const WriteWindow& window, std::uint64_t gap_bytes);

// Sources are live memory: bytes that are gone are reported to `detector`, and are undefined in the image.

/// Copy row bytes [begin, end), counted from the row's start, to `out`. The row is on the host. Returns as
/// LiveAccess::read.
int copy_row(const WriteExtents& rows, const WriteExtent& row, std::uint64_t begin, std::uint64_t end, std::byte* out, LiveAccess& live);

/// The same for row number `row`, without a LiveAccess of the caller's. Throws std::invalid_argument for an invalid
/// part.
int copy_part(const WriteExtents& rows, std::size_t row, std::uint64_t begin, std::uint64_t end, std::byte* out);

/// Who is told of captured chunks. `derived`: null if none follows from another.
struct ChunkNotes {
    std::span<std::uint64_t> digests;
    DerivedChunks* derived = nullptr;
};

/// Fill `image` with the run's exact bytes, gaps as zero, and digest every chunk that starts in the run (also if it
/// continues past the run's end). The image is digested, not the source, so the digests are those of the written bytes
/// whatever happens to the source; `detector` gets what was read. `rest` is null, or fetch_run has filled both.
void capture_run(const WriteExtents& rows, const WriteRun& run, std::byte* image, const std::byte* rest, const ChunkNotes& notes,
                 MutationDetector& detector, LiveAccess& live);

/// Copies `bytes` from a row on a device, later; their memory must stay valid until then.
using Fetch = std::function<void(const WriteExtent& row, std::uint64_t begin, std::uint64_t bytes, std::byte* out)>;

/// Fetch all that capture_run will read: the run's bytes into `image`, and the rest of the chunk that continues past
/// its end into `rest`, which has room for a chunk. Rows on the host are copied, those on devices are left to `fetch`.
void fetch_run(const WriteExtents& rows, const WriteRun& run, std::byte* image, std::byte* rest, const Fetch& fetch, MutationDetector& detector,
               LiveAccess& live);

/// The sources of the run will not be read again: `detector` checks for changes until now.
void settle_run(const WriteExtents& rows, const WriteRun& run, MutationDetector& detector);

/// Bytes from sources in the run.
std::uint64_t row_bytes(const WriteExtents& rows, const WriteRun& run);

}  // namespace flowstone
