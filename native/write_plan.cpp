#include "write_plan.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <memory>

#include "bounds.h"

namespace flowstone {
namespace {

/// Room for one gathered chunk, per thread, because a chunk is gathered at most once at a time.
std::byte* scratch() {
    thread_local const std::unique_ptr<std::byte[]> memory(new std::byte[chunk_bytes]);
    return memory.get();
}

const Layout* layout_of(const WriteRows& rows, const WriteRow& row) {
    return row.layout == contiguous ? nullptr : &rows.layouts[static_cast<std::size_t>(row.layout)];
}

/// Row bytes [begin, end) as one run of memory: the source itself, or `room` filled with them.
const std::byte* row_run(const WriteRows& rows, const WriteRow& row, std::uint64_t begin, std::uint64_t end, std::byte* room) {
    if (row.layout == contiguous) return row.source() + begin;
    copy_row(rows, row, begin, end, room);
    return room;
}

struct Span {
    std::uint64_t low;
    std::uint64_t high;
    bool empty() const { return low >= high; }
};

Span overlap(const WriteRow& row, std::uint64_t begin, std::uint64_t end) {
    return {std::max(row.offset, begin), std::min(row.end(), end)};
}

/// A chunk of a row, and the part of it that a run holds; bytes counted from the row's start.
struct ChunkShare {
    std::size_t row;
    std::uint64_t chunk;
    std::uint64_t begin;  // of the chunk
    std::uint64_t end;
    std::uint64_t low;  // of the part
    std::uint64_t high;

    bool starts_here() const { return low == begin; }
    bool ends_here() const { return high == end; }
};

/// The chunks that a share [low, high) of a row touches.
template <class Each> void for_chunks(const WriteRows& rows, std::size_t row_index, Span share, Each each) {
    const WriteRow& row = rows.rows[row_index];
    const std::uint64_t low = share.low - row.offset;
    const std::uint64_t high = share.high - row.offset;
    for (std::uint64_t chunk = low / chunk_bytes; chunk * chunk_bytes < high; ++chunk) {
        const std::uint64_t begin = chunk * chunk_bytes;
        const std::uint64_t end = std::min(begin + chunk_bytes, row.length);
        each(ChunkShare{row_index, chunk, begin, end, std::max(begin, low), std::min(end, high)});
    }
}

/// One chunk's part to its place in the image, digested there while it is in the cache.
void capture_chunk(const WriteRows& rows, const ChunkShare& part, std::byte* image, const std::byte* fetched,
                   std::span<std::uint64_t> digests, Watch& watch) {
    const WriteRow& row = rows.rows[part.row];
    if (fetched == nullptr) copy_row(rows, row, part.low, part.high, image);
    if (row.chunk == no_digest) return;
    watch.compare(part.row, part.low, part.high, image);
    const std::uint64_t bytes = part.high - part.low;
    if (!part.starts_here()) {
        if (part.ends_here()) watch.note_seam(part.row, part.low, xxh3_64(image, bytes));
        return;
    }
    std::uint64_t& digest = digests[row.chunk + part.chunk];
    if (part.ends_here()) {
        digest = xxh3_64(image, bytes);
        return;
    }
    const std::uint64_t rest_bytes = part.end - part.high;
    if (fetched == nullptr) copy_row(rows, row, part.high, part.end, scratch());
    const std::byte* const rest = fetched == nullptr ? scratch() : fetched;
    digest = xxh3_64(image, bytes, rest, rest_bytes);
    watch.note_seam(part.row, part.high, xxh3_64(rest, rest_bytes));
}

/// First row in the run that ends after `offset`.
std::size_t first_row_after(const WriteRows& rows, const WriteRun& run, std::uint64_t offset) {
    const auto begin = rows.rows.begin() + static_cast<std::ptrdiff_t>(run.first_row);
    const auto end = rows.rows.begin() + static_cast<std::ptrdiff_t>(run.last_row);
    const auto found = std::partition_point(begin, end, [&](const WriteRow& row) { return row.end() <= offset; });
    return static_cast<std::size_t>(found - rows.rows.begin());
}

/// Walk the rows of [begin, end) in order: `gap(low, high)` for bytes of no row, `share(row index, span)` for the others.
template <class Gap, class Share>
void walk(const WriteRows& rows, const WriteRun& run, std::uint64_t begin, std::uint64_t end, Gap gap, Share share) {
    std::uint64_t cursor = begin;
    for (std::size_t i = first_row_after(rows, run, begin); i < run.last_row; ++i) {
        const WriteRow& row = rows.rows[i];
        const Span span = overlap(row, begin, end);
        if (span.empty()) continue;
        assert(span.low >= cursor);
        if (cursor < span.low) gap(cursor, span.low);
        share(i, span);
        cursor = span.high;
    }
    if (cursor < end) gap(cursor, end);
}

/// The chunks with digests that a run touches.
template <class Each> void for_digests(const WriteRows& rows, const WriteRun& run, Each each) {
    walk(
        rows, run, run.begin, run.end, [](std::uint64_t, std::uint64_t) {},
        [&](std::size_t row, Span span) {
            if (rows.rows[row].chunk != no_digest) for_chunks(rows, row, span, each);
        });
}

/// Whether the row's bytes can be written from where they lie.
bool is_in_phase(const WriteRow& row) {
    return row.layout == contiguous && (row.address - row.offset) % block_alignment_bytes == 0;
}

DirectRun plan_direct_run(const WriteRows& rows, const WriteRun& run) {
    DirectRun direct{run, {}};
    std::uint64_t cursor = run.begin;
    for (std::size_t i = run.first_row; i < run.last_row; ++i) {
        const WriteRow& row = rows.rows[i];
        const Span span = overlap(row, run.begin, run.end);
        if (span.empty() || !is_in_phase(row)) continue;
        const std::uint64_t low = block_ceil(span.low);
        const std::uint64_t high = block_floor(span.high);
        if (low >= high || high - low < direct_run_bytes_min) continue;
        if (cursor < low) direct.parts.push_back({cursor, low, nullptr});
        direct.parts.push_back({low, high, row.source() + (low - row.offset)});
        cursor = high;
    }
    if (cursor < run.end) direct.parts.push_back({cursor, run.end, nullptr});
    return direct;
}

}  // namespace

void copy_row(const WriteRows& rows, const WriteRow& row, std::uint64_t begin, std::uint64_t end, std::byte* out) {
    assert(row.device == on_host);
    if (const Layout* layout = layout_of(rows, row))
        layout->gather(begin, end, row.source(), out);
    else
        std::memcpy(out, row.source() + begin, end - begin);
}

std::vector<WriteWindow> plan_windows(const WriteRows& rows, std::uint64_t request_bytes) {
    std::vector<WriteWindow> windows;
    const std::vector<WriteRow>& all = rows.rows;
    std::uint32_t file = 0;
    std::uint64_t planned = 0;  // in `file`: blocks before it are in a window
    for (std::size_t i = 0; i < all.size();) {
        if (all[i].file != file) file = all[i].file, planned = 0;
        if (all[i].length == 0 || block_ceil(all[i].end()) <= planned) {
            ++i;
            continue;
        }
        const std::uint64_t begin = std::max(block_floor(all[i].offset), planned);
        const std::uint64_t limit = begin + request_bytes;
        std::uint64_t end = begin;
        std::size_t last = i;
        bool lazy = true;
        for (; last < all.size() && all[last].file == all[i].file && block_floor(all[last].offset) < limit; ++last) {
            if (all[last].length == 0) continue;
            end = std::min(limit, block_ceil(all[last].end()));
            lazy = lazy && all[last].lazy;
        }
        windows.push_back({all[i].file, begin, end, i, last, lazy});
        planned = end;  // a row that goes on past the window comes again, the others are passed over
    }
    return windows;
}

std::vector<WriteRun> split_runs(const WriteRows& rows, const WriteWindow& window, std::uint64_t gap_bytes) {
    std::vector<WriteRun> runs;
    for (std::size_t i = window.first_row; i < window.last_row; ++i) {
        const Span span = overlap(rows.rows[i], window.begin, window.end);
        if (span.empty()) continue;
        const std::uint64_t begin = block_floor(span.low);
        const std::uint64_t end = block_ceil(span.high);
        if (runs.empty() || (begin > runs.back().end && begin - runs.back().end > gap_bytes))
            runs.push_back({window.file, begin, end, i, i + 1, window.lazy});
        else
            runs.back().end = end, runs.back().last_row = i + 1;
    }
    return runs;
}

bool needs_fetch(const WriteRows& rows, const WriteWindow& window) {
    const auto begin = rows.rows.begin() + static_cast<std::ptrdiff_t>(window.first_row);
    const auto end = rows.rows.begin() + static_cast<std::ptrdiff_t>(window.last_row);
    return !rows.devices.empty() && std::any_of(begin, end, [](const WriteRow& row) { return row.device != on_host; });
}

std::optional<DirectPlan> plan_direct(const WriteRows& rows, const WriteWindow& window, std::uint64_t gap_bytes) {
    if (needs_fetch(rows, window)) return std::nullopt;
    DirectPlan plan;
    std::size_t parts = 0;
    for (const WriteRun& run : split_runs(rows, window, gap_bytes)) {
        plan.runs.push_back(plan_direct_run(rows, run));
        parts += plan.runs.back().parts.size();
        for (const DirectPart& part : plan.runs.back().parts)
            (part.source == nullptr ? plan.bounce_bytes : plan.direct_bytes) += part.end - part.begin;
    }
    if (plan.direct_bytes == 0 || plan.bounce_bytes > bounce_bytes_max || parts > direct_parts_max) return std::nullopt;
    return plan;
}

void fetch_run(const WriteRows& rows, const WriteRun& run, std::byte* image, std::byte* rest, const Fetch& fetch) {
    const auto get = [&](const WriteRow& row, std::uint64_t begin, std::uint64_t end, std::byte* out) {
        if (row.device == on_host)
            copy_row(rows, row, begin, end, out);
        else
            fetch(row, begin, end - begin, out);
    };
    walk(
        rows, run, run.begin, run.end, [](std::uint64_t, std::uint64_t) {},
        [&](std::size_t i, Span span) {
            const WriteRow& row = rows.rows[i];
            const std::uint64_t low = span.low - row.offset;
            const std::uint64_t high = span.high - row.offset;
            get(row, low, high, image + (span.low - run.begin));
            // Of a chunk that began before the run, the rest is another window's.
            const std::uint64_t chunk = round_down(high, chunk_bytes);
            if (row.chunk != no_digest && high < row.length && chunk < high && chunk >= low)
                get(row, high, std::min(chunk + chunk_bytes, row.length), rest);
        });
}

void capture_run(const WriteRows& rows, const WriteRun& run, std::byte* image, const std::byte* rest,
                 std::span<std::uint64_t> digests, Watch& watch) {
    walk(
        rows, run, run.begin, run.end,
        [&](std::uint64_t low, std::uint64_t high) { std::memset(image + (low - run.begin), 0, high - low); },
        [&](std::size_t row, Span span) {
            for_chunks(rows, row, span, [&](const ChunkShare& part) {
                capture_chunk(rows, part, image + (rows.rows[row].offset + part.low - run.begin), rest, digests, watch);
            });
        });
}

void digest_run(const WriteRows& rows, const WriteRun& run, std::span<std::uint64_t> digests) {
    for_digests(rows, run, [&](const ChunkShare& part) {
        const WriteRow& row = rows.rows[part.row];
        if (!part.starts_here()) return;
        digests[row.chunk + part.chunk] = xxh3_64(row_run(rows, row, part.begin, part.end, scratch()), part.end - part.begin);
    });
}

void confirm_run(const WriteRows& rows, const WriteRun& run, std::span<const std::uint64_t> digests, Watch& watch) {
    for_digests(rows, run, [&](const ChunkShare& part) {
        const WriteRow& row = rows.rows[part.row];
        const std::uint64_t begin = part.starts_here() ? part.begin : part.low;
        const std::byte* const bytes = row_run(rows, row, begin, part.end, scratch());
        watch.compare(part.row, begin, part.end, bytes);
        if (!part.starts_here()) {
            if (part.ends_here()) watch.note_seam(part.row, part.low, xxh3_64(bytes, part.end - begin));
            return;
        }
        if (xxh3_64(bytes, part.end - begin) != digests[row.chunk + part.chunk]) watch.report(part.row, begin, part.end);
        if (!part.ends_here()) watch.note_seam(part.row, part.high, xxh3_64(bytes + (part.high - begin), part.end - part.high));
    });
}

void image_range(const WriteRows& rows, const WriteRun& run, std::uint64_t begin, std::uint64_t end, std::byte* image) {
    walk(
        rows, run, begin, end,
        [&](std::uint64_t low, std::uint64_t high) { std::memset(image + (low - begin), 0, high - low); },
        [&](std::size_t i, Span span) {
            const WriteRow& row = rows.rows[i];
            copy_row(rows, row, span.low - row.offset, span.high - row.offset, image + (span.low - begin));
        });
}

std::uint64_t row_bytes(const WriteRows& rows, const WriteRun& run) {
    std::uint64_t bytes = 0;
    walk(
        rows, run, run.begin, run.end, [](std::uint64_t, std::uint64_t) {},
        [&](std::size_t, Span span) { bytes += span.high - span.low; });
    return bytes;
}

}  // namespace flowstone
