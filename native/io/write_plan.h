// The plan of a write: which file range each request writes, and how it is captured. Pure, except for the capture
// functions, which read sources; safe from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "codec/derived.h"
#include "capture/live_memory.h"
#include "io/io_extents.h"
#include "watch/mutation_detector.h"

namespace flowstone {

/// A 4096-aligned range of one file, at most as long as a request (in a job with devices: as a block). Rows [first_row,
/// last_row) overlap it (some may be empty). Invariant: the windows of a plan are disjoint, ascending, and begin and
/// end with a touched block. (Appended windows begin and end with a chunk, and are not aligned to blocks.)
struct WriteWindow {
    std::uint32_t file;
    std::uint64_t begin;
    std::uint64_t end;
    std::size_t first_row;
    std::size_t last_row;
    bool lazy = false;  // all its rows are lazy
    bool appended = false;  // complete chunks, placed in the file once they are encoded (encode.h)
    bool derived = false;   // all its rows are derived, and captured after their sources
    bool early = false;     // some row is neither lazy nor gathered, so the caller of a save waits until it is read
};

/// The part of a window that one request writes: no gap of untouched blocks longer than gap_bytes.
using WriteRun = WriteWindow;

/// The windows of files in which chunks keep their places. If rows are on devices, a window ends with a chunk; or, if
/// chunks do not end at block bounds, it leaves room in `window_bytes` for the remainder of the chunk that it cuts.
std::vector<WriteWindow> plan_windows(const WriteExtents& rows, std::uint64_t window_bytes);

/// Whether a row of the window may change as soon as the caller of a save continues: it is neither lazy nor gathered by
/// a device.
bool is_early(const WriteExtents& rows, const WriteWindow& window);

/// Whether a row of the window is on a device.
bool needs_fetch(const WriteExtents& rows, const WriteWindow& window);

std::vector<WriteRun> split_runs(const WriteExtents& rows, const WriteWindow& window, std::uint64_t gap_bytes);

// Sources are live memory: bytes that were freed are reported to `detector`, and undefined in the image.

/// Copy row bytes [begin, end), counted from the row's start, to `out`. The row is on the host. Returns the result of
/// LiveAccess::read.
int copy_row(const WriteExtents& rows, const WriteExtent& row, std::uint64_t begin, std::uint64_t end, std::byte* out,
             LiveAccess& live);

/// Like copy_row, for row number `row`, with a temporary LiveAccess. Throws std::invalid_argument for an invalid part.
int copy_part(const WriteExtents& rows, std::size_t row, std::uint64_t begin, std::uint64_t end, std::byte* out);

/// Where captured chunks are recorded. `derived`: null if no chunk is derived.
struct ChunkNotes {
    std::span<std::uint64_t> digests;
    DerivedChunks* derived = nullptr;
};

/// Fill `image` with the run's exact bytes, gaps as zero, and digest every chunk that starts in the run (also if it
/// continues past the run's end). The image is digested, not the source, so the digests are those of the written bytes
/// even if the source changes; `detector` gets the bytes that were read. `rest` is null, or fetch_run has filled
/// `image` and `rest`.
void capture_run(const WriteExtents& rows, const WriteRun& run, std::byte* image, const std::byte* rest,
                 const ChunkNotes& notes, MutationDetector& detector, LiveAccess& live);

/// Queues a copy of `bytes` from a row on a device; their memory must stay valid until it is done.
using Fetch = std::function<void(const WriteExtent& row, std::uint64_t begin, std::uint64_t bytes, std::byte* out)>;

/// Fetch all bytes that capture_run will read: the run's bytes into `image`, and the remainder of a chunk that
/// continues past its end into `rest`, a buffer of one chunk. Rows on the host are copied, rows on devices by `fetch`.
void fetch_run(const WriteExtents& rows, const WriteRun& run, std::byte* image, std::byte* rest, const Fetch& fetch,
               MutationDetector& detector, LiveAccess& live);

/// End the watch of the run's sources, which will not be read again: `detector` checks for changes until now.
void finish_watch(const WriteExtents& rows, const WriteRun& run, MutationDetector& detector);

/// The number of bytes in the run that are from rows.
std::uint64_t row_bytes(const WriteExtents& rows, const WriteRun& run);

}  // namespace flowstone
