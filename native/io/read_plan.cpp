#include "io/read_plan.h"

#include <algorithm>
#include <cassert>
#include <tuple>
#include <utility>

#include "bounds.h"

namespace flowstone {
namespace {

std::vector<WantedChunk> list_chunks(const ReadExtents& rows) {
    std::vector<WantedChunk> chunks;
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const ReadExtent& row = rows.rows[i];
        for (std::uint64_t chunk = row.first; chunk < row.last; ++chunk) {
            const ChunkPlace place = rows.place_of(row, chunk);
            const bool is_cast = place.codec == codec_cast;
            const std::uint64_t sources = is_cast ? cast::half_count(rows.data_bytes(row, chunk)) : 0;
            const ChunkPlace where = is_cast ? rows.source_of(place, 0) : place;
            chunks.push_back({where.offset, where.length, static_cast<std::uint32_t>(i), where.file,
                              static_cast<std::uint32_t>(chunk), static_cast<std::uint8_t>(sources)});
        }
    }
    const auto before = [](const WantedChunk& a, const WantedChunk& b) {
        return std::tie(a.file, a.begin, a.row) < std::tie(b.file, b.begin, b.row);
    };
    if (!std::is_sorted(chunks.begin(), chunks.end(), before)) std::sort(chunks.begin(), chunks.end(), before);
    return chunks;
}

bool is_in_phase(const ReadExtent& row) {
    return row.device == on_host && row.layout == contiguous && row.address != verify_only &&
        (row.address - row.offset) % block_alignment_bytes == 0;
}

using OtherRanges = std::vector<OtherRange>;

/// A window in the making: the chunks that share it so far.
struct Run {
    std::uint64_t begin;       // of the first chunk
    std::uint64_t needed_end;  // end of the contiguous range
    std::uint32_t file;
    OtherRanges ranges = {};

    bool has(const ChunkPlace& place) const {
        return place.file == file && place.offset >= begin && place.offset + place.length <= needed_end;
    }
    std::uint64_t bytes() const {
        std::uint64_t bytes = block_ceil(needed_end) - block_floor(begin);
        for (const OtherRange& range : ranges) bytes += range.bytes();
        return bytes;
    }
};

class Planner {
public:
    Planner(const ReadExtents& rows, std::uint64_t request_bytes, std::uint64_t block_bytes, bool in_place)
        // A run of chunks is read in place as one range of the file, so it must be consecutive in the file and in the
        // row.
        : rows_(rows),
          in_place_(in_place && rows.stored.empty()),
          limit_(std::max(request_bytes, chunk_bytes + 2 * block_alignment_bytes)),
          block_bytes_(block_bytes) {}

    ReadPlan plan() {
        plan_.chunks = list_chunks(rows_);
        for (std::size_t at = 0; at < plan_.chunks.size();) {
            const WantedChunk& first = plan_.chunks[at];
            const std::size_t direct_last = direct_run(at);
            const bool direct = is_long_enough(at, direct_last);
            Run run{first.begin, direct ? plan_.chunks[direct_last - 1].end() : first.begin, first.file};
            const std::size_t last = direct ? direct_last : shared_run(at, run);
            add(at, last, direct, run);
            at = last;
        }
        return std::move(plan_);
    }

private:
    /// The end of the chunks from `at` on that can be one direct window.
    std::size_t direct_run(std::size_t at) const {
        const WantedChunk& first = plan_.chunks[at];
        if (!in_place_ || !is_in_phase(rows_.rows[first.row])) return at;
        std::size_t last = at + 1;
        for (; last < plan_.chunks.size(); ++last) {
            const WantedChunk& next = plan_.chunks[last];
            if (next.row != first.row || block_ceil(next.end()) - block_floor(first.begin) > limit_) break;
        }
        return last;
    }

    bool is_long_enough(std::size_t first, std::size_t last) const {
        return last > first && plan_.chunks[last - 1].end() - plan_.chunks[first].begin >= direct_read_bytes_min;
    }

    /// Add a stored chunk to the reads of the run: to the contiguous range if it is adjacent and `near`, otherwise as
    /// another range of its file, or as part of an adjacent one.
    void with(Run& run, const ChunkPlace& place, bool near) const {
        if (run.has(place)) return;
        const std::uint64_t needed_end = place.offset + place.length;
        const bool follows = place.file == run.file && place.offset >= run.begin &&
            block_floor(place.offset) <= block_ceil(run.needed_end);
        if (near && follows && block_ceil(needed_end) - block_floor(run.begin) <= limit_) {
            run.needed_end = needed_end;
            return;
        }
        const OtherRange found{place.file, block_floor(place.offset), block_ceil(needed_end), needed_end};
        for (OtherRange& range : run.ranges) {
            if (range.file != found.file || range.begin > found.begin || found.begin > range.end ||
                found.end - range.begin > limit_)
                continue;
            if (range.needed_end < needed_end) {
                range.end = found.end;
                range.needed_end = needed_end;
            }
            return;
        }
        run.ranges.push_back(found);
    }

    /// The number of the stored chunk for a requested chunk.
    std::uint64_t stored_of(const WantedChunk& chunk) const {
        const std::uint64_t own = rows_.rows[chunk.row].chunk + chunk.number;
        return chunk.sources == 0 ? own : rows_.stored[own].offset;
    }

    /// The run with one more chunk, with its base or sources.
    Run with_chunk(Run run, const WantedChunk& chunk) const {
        run.needed_end = std::max(run.needed_end, chunk.end());
        if (rows_.stored.empty()) return run;
        const std::uint64_t stored = stored_of(chunk), sources = std::max<std::uint64_t>(chunk.sources, 1);
        if (sources > 1) with(run, rows_.stored[stored + 1], true);
        for (std::uint64_t i = 0; i < sources && !rows_.bases.empty(); ++i)
            if (const ChunkBase* const base = rows_.base_of(stored + i)) with(run, base->place, false);
        return run;
    }

    /// The end of the chunks from `at` on that share one arena block, with their bases and sources. Stops where a
    /// direct window can begin.
    std::size_t shared_run(std::size_t at, Run& run) const {
        run = with_chunk(std::move(run), plan_.chunks[at]);
        std::uint64_t needed = run.needed_end - run.begin;
        std::uint64_t skipped = 0;
        std::size_t last = at + 1;
        for (; last < plan_.chunks.size(); ++last) {
            const WantedChunk& next = plan_.chunks[last];
            Run both = with_chunk(run, next);
            if (next.file != run.file || both.bytes() > limit_) break;
            // Blocks that are read only because of this gap; the blocks at its ends are read in any case.
            const std::uint64_t gap =
                std::max(block_floor(next.begin), block_ceil(run.needed_end)) - block_ceil(run.needed_end);
            needed += next.length;
            skipped += gap;
            if (gap != 0 && skipped * read_gap_part > needed) break;
            if (in_place_ && next.length >= direct_read_bytes_min && is_in_phase(rows_.rows[next.row])) break;
            run = std::move(both);
        }
        return last;
    }

    void add(std::size_t first, std::size_t last, bool direct, Run& run) {
        ReadWindow window{run.file, block_floor(run.begin), block_ceil(run.needed_end), run.needed_end, first, last,
                          direct};
        window.bytes = window.memory = window.own_bytes();
        window.first_range = plan_.ranges.size();
        for (OtherRange& range : run.ranges) {
            if (window.memory % block_bytes_ + range.bytes() > block_bytes_)
                window.memory = round_up(window.memory, block_bytes_);
            range.at = window.memory;
            window.memory += range.bytes();
            window.bytes += range.bytes();
            plan_.ranges.push_back(range);
        }
        window.last_range = plan_.ranges.size();
        for (std::size_t i = first; i < last && !direct; ++i) locate(plan_.chunks[i], run);
        plan_.windows.push_back(window);
    }

    /// Set the place of a chunk, and of its base or sources, in the window's memory.
    void locate(WantedChunk& chunk, const Run& run) const {
        chunk.memory[0].at = chunk.begin - block_floor(run.begin);
        if (rows_.stored.empty()) return;
        const std::uint64_t stored = stored_of(chunk);
        if (chunk.sources > 1) chunk.memory[1].at = place_in(run, rows_.stored[stored + 1]);
        for (std::uint64_t i = 0; i < std::max<std::uint64_t>(chunk.sources, 1) && !rows_.bases.empty(); ++i)
            if (const ChunkBase* const base = rows_.base_of(stored + i))
                chunk.memory[i].base_at = place_in(run, base->place);
    }

    static std::uint64_t place_in(const Run& run, const ChunkPlace& place) {
        if (run.has(place)) return place.offset - block_floor(run.begin);
        const auto has = [&place](const OtherRange& range) {
            return range.file == place.file && range.begin <= place.offset && place.offset + place.length <= range.end;
        };
        const auto range = std::find_if(run.ranges.begin(), run.ranges.end(), has);
        assert(range != run.ranges.end());
        return range->at + (place.offset - range->begin);
    }

    const ReadExtents& rows_;
    const bool in_place_;
    const std::uint64_t limit_;
    const std::uint64_t block_bytes_;
    ReadPlan plan_;
};

}  // namespace

ReadPlan plan_reads(const ReadExtents& rows, std::uint64_t request_bytes, std::uint64_t block_bytes, bool in_place) {
    return Planner(rows, request_bytes, block_bytes, in_place).plan();
}

}  // namespace flowstone
