// From rows to windows: which file ranges one request writes, and how they are captured.
// Pure but for the capture functions, which read sources; safe from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "live_memory.h"
#include "io_extents.h"
#include "mutation_detector.h"

namespace flowstone {

/// A 4096-aligned range of one file, at most request_bytes long. Rows [first_row, last_row) are
/// those that touch it (among them perhaps empty ones).
/// Invariant: the windows of a plan are disjoint, ascending, and begin and end with a touched block. (Those that are
/// appended begin and end with a chunk, and keep to no block.)
struct WriteWindow {
    std::uint32_t file;
    std::uint64_t begin;
    std::uint64_t end;
    std::size_t first_row;
    std::size_t last_row;
    bool lazy = false;  // all its rows are
    bool appended = false;  // whole chunks, whose place in the file is known once they are encoded (encode.h)
};

/// The part of a window that one request writes: no gap of untouched blocks longer than gap_bytes.
using WriteRun = WriteWindow;

std::vector<WriteWindow> plan_windows(const WriteExtents& rows, std::uint64_t request_bytes);

/// Whether a row of the window lies on a device.
bool needs_fetch(const WriteExtents& rows, const WriteWindow& window);

std::vector<WriteRun> split_runs(const WriteExtents& rows, const WriteWindow& window, std::uint64_t gap_bytes);

// Sources are live memory: what is not there any more is reported to `detector`, and is then anything in the image.

/// Row bytes [begin, end), counted from the row's start, to `out`. The row is on the host. 0, or why not (LiveAccess::read).
int copy_row(const WriteExtents& rows, const WriteExtent& row, std::uint64_t begin, std::uint64_t end, std::byte* out, LiveAccess& live);

/// The same of row number `row`, for who has nothing to copy with. Throws std::invalid_argument where there is no such part.
int copy_part(const WriteExtents& rows, std::size_t row, std::uint64_t begin, std::uint64_t end, std::byte* out);

/// Make `image` the run's exact bytes, gaps zero, and digest every chunk that starts in the run
/// (also where it goes on past the run's end). What is digested is the image, not the source, so the
/// digests are those of what will be written whatever happens to the source; `detector` is told what was seen.
/// `rest` is null, or fetch_run has filled both.
void capture_run(const WriteExtents& rows, const WriteRun& run, std::byte* image, const std::byte* rest,
                 std::span<std::uint64_t> digests, MutationDetector& detector, LiveAccess& live);

/// To copy `bytes` from a row on a device, later; until then their place must stay.
using Fetch = std::function<void(const WriteExtent& row, std::uint64_t begin, std::uint64_t bytes, std::byte* out)>;

/// All that capture_run will look at: the run's bytes into `image`, and those of the chunk that goes on past its end into
/// `rest`, with room for a chunk. Rows on the host are copied, those on devices are left to `fetch`.
void fetch_run(const WriteExtents& rows, const WriteRun& run, std::byte* image, std::byte* rest, const Fetch& fetch, MutationDetector& detector,
               LiveAccess& live);

/// The sources of the run will not be read again: `detector` looks for what changed them until now.
void settle_run(const WriteExtents& rows, const WriteRun& run, MutationDetector& detector);

/// Source bytes in the run.
std::uint64_t row_bytes(const WriteExtents& rows, const WriteRun& run);

}  // namespace flowstone
