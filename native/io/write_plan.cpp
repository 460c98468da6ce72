#include "io/write_plan.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "bounds.h"

namespace flowstone {
namespace {

const Layout* layout_of(const WriteExtents& rows, const WriteExtent& row) {
    return row.layout == contiguous ? nullptr : &rows.layouts[static_cast<std::size_t>(row.layout)];
}

struct Span {
    std::uint64_t low;
    std::uint64_t high;
    bool empty() const { return low >= high; }
};

Span overlap(const WriteExtent& row, std::uint64_t begin, std::uint64_t end) {
    return {std::max(row.offset, begin), std::min(row.end(), end)};
}

/// A chunk of a row, and the part of it in a run; bytes count from the row's start.
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

/// Call `each` for the chunks that overlap [low, high) of a row.
template <class Each> void for_chunks(const WriteExtents& rows, std::size_t row_index, Span share, Each each) {
    const WriteExtent& row = rows.rows[row_index];
    const std::uint64_t low = share.low - row.offset;
    const std::uint64_t high = share.high - row.offset;
    for (std::uint64_t chunk = low / chunk_bytes; chunk * chunk_bytes < high; ++chunk) {
        const std::uint64_t begin = chunk * chunk_bytes;
        const std::uint64_t end = std::min(begin + chunk_bytes, row.length);
        each(ChunkShare{row_index, chunk, begin, end, std::max(begin, low), std::min(end, high)});
    }
}

/// Read row bytes, or report that they were freed.
bool read_row(const WriteExtents& rows, std::size_t row, std::uint64_t begin, std::uint64_t end, std::byte* out,
              MutationDetector& detector, LiveAccess& live) {
    const int error = copy_row(rows, rows.rows[row], begin, end, out, live);
    if (error != 0) detector.report(row, begin, end, error);
    return error == 0;
}

/// Makes a run's image. Short parts are copied in batches; a chunk is digested while it is in the cache.
class Capture {
public:
    Capture(const WriteExtents& rows, const std::byte* fetched, const ChunkNotes& notes, MutationDetector& detector,
            LiveAccess& live)
        : rows_(rows), fetched_(fetched), notes_(notes), detector_(detector), live_(live), batch_(live) {}
    ~Capture() { flush(); }
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;

    void gap(std::byte* image, std::uint64_t bytes) {
        // Zeros are read like sources, so that a batch can continue across them.
        if (!batch_.empty() && batch_.has_room() && image == batch_.end() && bytes <= sizeof zeros)
            batch_.add(image, zeros, bytes, {});
        else
            std::memset(image, 0, bytes);
    }

    void share(const ChunkShare& part, std::byte* image) {
        const WriteExtent& row = rows_.rows[part.row];
        const std::uint64_t bytes = part.high - part.low;
        const bool is_short =
            bytes < short_bytes && row.layout == contiguous && fetched_ == nullptr && part.ends_here();
        if (!batch_.empty() &&
            (!is_short || !batch_.has_room() || image != batch_.end() || batch_.bytes() + bytes > batch_bytes))
            flush();
        if (is_short)
            batch_.add(image, row.source() + part.low, bytes, {part, image});
        else if (fetched_ == nullptr && row.layout == contiguous && row.chunk != no_digest)
            stream(part, image);
        else if (fetched_ != nullptr || read_row(rows_, part.row, part.low, part.high, image, detector_, live_))
            take(part, image);
    }

private:
    struct Item {
        ChunkShare part;
        const std::byte* image = nullptr;  // null: a gap
    };
    static constexpr std::uint64_t short_bytes = std::uint64_t{64} << 10;
    static constexpr std::uint64_t batch_bytes = std::uint64_t{256} << 10;  // in the cache together with its sources
    static constexpr std::byte zeros[block_alignment_bytes] = {};

    void flush() {
        batch_.flush([&](const Item& item, int error) {
            if (item.image == nullptr) return;
            if (error != 0)
                detector_.report(item.part.row, item.part.low, item.part.high, error);
            else
                take(item.part, item.image);
        });
    }

    /// The part is in the image.
    void take(const ChunkShare& part, const std::byte* image) {
        if (rows_.rows[part.row].chunk == no_digest) return;
        const std::uint64_t bytes = part.high - part.low;
        if (part.ends_here()) return note(part, image, nullptr, xxh3_64(image, bytes));
        Digester digester;
        digester.update(image, bytes);
        finish(part, image, digester);
    }

    void stream(const ChunkShare& part, std::byte* image) {
        const WriteExtent& row = rows_.rows[part.row];
        Digester digester;
        if (const int error =
                live_.read(image, row.source() + part.low, part.high - part.low, row.length - part.high, digester))
            return detector_.report(part.row, part.low, part.high, error);
        finish(part, image, digester);
    }

    /// The digester has read the part: it also reads the rest of the chunk beyond the run.
    void finish(const ChunkShare& part, const std::byte* image, Digester& digester) {
        const std::byte* rest = nullptr;
        if (part.starts_here() && !part.ends_here()) {
            rest = fetched_;
            if (rest == nullptr) {
                rest = live_.chunk_room();
                if (!read_row(rows_, part.row, part.high, part.end, live_.chunk_room(), detector_, live_)) return;
            }
            digester.update(rest, part.end - part.high);
            detector_.note_split(part.row, part.high, xxh3_64(rest, part.end - part.high));
        }
        note(part, image, rest, digester.value());
    }

    /// `rest`: the remainder of the chunk beyond the run, if the chunk starts here.
    void note(const ChunkShare& part, const std::byte* image, const std::byte* rest, std::uint64_t digest) {
        detector_.compare(part.row, part.low, part.high, image);
        if (part.starts_here()) {
            detector_.compare_chunk(part.row, part.chunk, digest);
            const std::uint64_t number = rows_.rows[part.row].chunk + part.chunk;
            notes_.digests[number] = digest;
            if (notes_.derived != nullptr)
                notes_.derived->note(number, {image, part.high - part.low}, {rest, part.end - part.high}, digest,
                                     live_.coding_room() + chunk_bytes);
        } else if (part.ends_here())
            detector_.note_split(part.row, part.low, digest);
    }

    const WriteExtents& rows_;
    const std::byte* const fetched_;
    const ChunkNotes notes_;
    MutationDetector& detector_;
    LiveAccess& live_;
    LiveBatch<Item> batch_;
};

/// First row in the run that ends after `offset`.
std::size_t first_row_after(const WriteExtents& rows, const WriteRun& run, std::uint64_t offset) {
    const auto begin = rows.rows.begin() + static_cast<std::ptrdiff_t>(run.first_row);
    const auto end = rows.rows.begin() + static_cast<std::ptrdiff_t>(run.last_row);
    const auto found = std::partition_point(begin, end, [&](const WriteExtent& row) { return row.end() <= offset; });
    return static_cast<std::size_t>(found - rows.rows.begin());
}

/// The last offset up to `limit` at which a window that begins at `begin`, in row number `first`, cuts no chunk; or an
/// offset that leaves room for the remainder of a chunk.
std::uint64_t end_of_chunk(std::span<const WriteExtent> rows, std::size_t first, std::uint64_t begin,
                           std::uint64_t limit) {
    const auto from = rows.begin() + static_cast<std::ptrdiff_t>(first);
    const auto ends_before = [&](const WriteExtent& row) { return row.file == from->file && row.end() <= limit; };
    const auto cut = std::partition_point(from, rows.end(), ends_before);
    if (cut == rows.end() || cut->file != from->file || cut->offset >= limit || cut->chunk == no_digest) return limit;
    const std::uint64_t end = cut->offset + round_down(limit - cut->offset, chunk_bytes);
    return end % block_alignment_bytes == 0 && end > begin ? end : limit - chunk_bytes;
}

/// Walk [begin, end) in order: `gap(low, high)` for bytes of no row, `share(row index, span)` for a row's.
template <class Gap, class Share>
void walk(const WriteExtents& rows, const WriteRun& run, std::uint64_t begin, std::uint64_t end, Gap gap, Share share) {
    std::uint64_t cursor = begin;
    for (std::size_t i = first_row_after(rows, run, begin); i < run.last_row; ++i) {
        const WriteExtent& row = rows.rows[i];
        const Span span = overlap(row, begin, end);
        if (span.empty()) continue;
        assert(span.low >= cursor);
        if (cursor < span.low) gap(cursor, span.low);
        share(i, span);
        cursor = span.high;
    }
    if (cursor < end) gap(cursor, end);
}

}  // namespace

int copy_row(const WriteExtents& rows, const WriteExtent& row, std::uint64_t begin, std::uint64_t end, std::byte* out,
             LiveAccess& live) {
    assert(row.device == on_host);
    if (const Layout* layout = layout_of(rows, row)) return layout->gather(begin, end, row.source(), out, live);
    return live.read(out, row.source() + begin, end - begin);
}

int copy_part(const WriteExtents& rows, std::size_t row, std::uint64_t begin, std::uint64_t end, std::byte* out) {
    if (row >= rows.rows.size() || begin > end || end > rows.rows[row].length || rows.rows[row].device != on_host)
        throw std::invalid_argument("copy: not a part of a row on the host");
    LiveAccess live;
    return copy_row(rows, rows.rows[row], begin, end, out, live);
}

std::vector<WriteWindow> plan_windows(const WriteExtents& rows, std::uint64_t window_bytes) {
    std::vector<WriteWindow> windows;
    const std::span<const WriteExtent> all(rows.rows.data(), rows.first_encoded());
    std::uint32_t file = 0;
    std::uint64_t planned = 0;  // in `file`: earlier blocks are in a window already
    for (std::size_t i = 0; i < all.size();) {
        if (all[i].file != file) file = all[i].file, planned = 0;
        if (all[i].length == 0 || block_ceil(all[i].end()) <= planned) {
            ++i;
            continue;
        }
        const std::uint64_t begin = std::max(block_floor(all[i].offset), planned);
        std::uint64_t limit = begin + window_bytes;
        if (!rows.devices.empty()) limit = end_of_chunk(all, i, begin, limit);
        std::uint64_t end = begin;
        std::size_t last = i;
        bool lazy = true;
        for (; last < all.size() && all[last].file == all[i].file && block_floor(all[last].offset) < limit; ++last) {
            if (all[last].length == 0) continue;
            end = std::min(limit, block_ceil(all[last].end()));
            lazy = lazy && all[last].lazy;
        }
        windows.push_back({all[i].file, begin, end, i, last, lazy});
        planned = end;  // a row that continues past the window is handled again; others are skipped
    }
    return windows;
}

std::vector<WriteRun> split_runs(const WriteExtents& rows, const WriteWindow& window, std::uint64_t gap_bytes) {
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

bool is_early(const WriteExtents& rows, const WriteWindow& window) {
    if (window.lazy) return false;
    const auto begin = rows.rows.begin() + static_cast<std::ptrdiff_t>(window.first_row);
    const auto end = rows.rows.begin() + static_cast<std::ptrdiff_t>(window.last_row);
    return std::any_of(begin, end,
                       [](const WriteExtent& row) { return row.length != 0 && !row.lazy && !row.gathered; });
}

bool needs_fetch(const WriteExtents& rows, const WriteWindow& window) {
    const auto begin = rows.rows.begin() + static_cast<std::ptrdiff_t>(window.first_row);
    const auto end = rows.rows.begin() + static_cast<std::ptrdiff_t>(window.last_row);
    return !rows.devices.empty() &&
        std::any_of(begin, end, [](const WriteExtent& row) { return row.device != on_host; });
}

void fetch_run(const WriteExtents& rows, const WriteRun& run, std::byte* image, std::byte* rest, const Fetch& fetch,
               MutationDetector& detector, LiveAccess& live) {
    const auto get = [&](std::size_t row, std::uint64_t begin, std::uint64_t end, std::byte* out) {
        if (rows.rows[row].device == on_host)
            (void)read_row(rows, row, begin, end, out, detector, live);
        else
            fetch(rows.rows[row], begin, end - begin, out);
    };
    walk(
        rows, run, run.begin, run.end, [](std::uint64_t, std::uint64_t) {},
        [&](std::size_t i, Span span) {
            const WriteExtent& row = rows.rows[i];
            const std::uint64_t low = span.low - row.offset;
            const std::uint64_t high = span.high - row.offset;
            get(i, low, high, image + (span.low - run.begin));
            // If a chunk began before the run, its remainder belongs to another window.
            const std::uint64_t chunk = round_down(high, chunk_bytes);
            if (row.chunk != no_digest && high < row.length && chunk < high && chunk >= low)
                get(i, high, std::min(chunk + chunk_bytes, row.length), rest);
        });
}

void capture_run(const WriteExtents& rows, const WriteRun& run, std::byte* image, const std::byte* rest,
                 const ChunkNotes& notes, MutationDetector& detector, LiveAccess& live) {
    Capture capture(rows, rest, notes, detector, live);
    walk(
        rows, run, run.begin, run.end,
        [&](std::uint64_t low, std::uint64_t high) { capture.gap(image + (low - run.begin), high - low); },
        [&](std::size_t row, Span span) {
            for_chunks(rows, row, span, [&](const ChunkShare& part) {
                capture.share(part, image + (rows.rows[row].offset + part.low - run.begin));
            });
        });
}

void finish_watch(const WriteExtents& rows, const WriteRun& run, MutationDetector& detector) {
    walk(
        rows, run, run.begin, run.end, [](std::uint64_t, std::uint64_t) {},
        [&](std::size_t row, Span span) {
            detector.settle(row, span.low - rows.rows[row].offset, span.high - rows.rows[row].offset);
        });
}

std::uint64_t row_bytes(const WriteExtents& rows, const WriteRun& run) {
    std::uint64_t bytes = 0;
    walk(
        rows, run, run.begin, run.end, [](std::uint64_t, std::uint64_t) {},
        [&](std::size_t, Span span) { bytes += span.high - span.low; });
    return bytes;
}

}  // namespace flowstone
