#include "read_plan.h"

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
            const auto add = [&](const ChunkPlace& where, std::uint8_t half) {
                chunks.push_back({where.offset, where.length, static_cast<std::uint32_t>(i), where.file, static_cast<std::uint32_t>(chunk), half});
            };
            if (place.codec != codec_cast) {
                add(place, 0);
                continue;
            }
            for (std::uint8_t half = 0; half < cast::half_count(rows.data_bytes(row, chunk)); ++half)
                add(rows.source_of(place, half), static_cast<std::uint8_t>(half + 1));
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

using BaseRanges = std::vector<BaseRange>;

class Planner {
public:
    Planner(const ReadExtents& rows, std::uint64_t request_bytes, bool in_place)
        // In place, a run of chunks is read as one range of the file, so it must be consecutive there as in the row.
        : rows_(rows), in_place_(in_place && rows.stored.empty()), limit_(std::max(request_bytes, chunk_bytes + 2 * block_alignment_bytes)) {}

    ReadPlan plan() {
        plan_.chunks = list_chunks(rows_);
        for (std::size_t at = 0; at < plan_.chunks.size();) {
            const std::size_t direct_last = direct_run(at);
            const bool direct = is_long_enough(at, direct_last);
            BaseRanges ranges;
            const std::size_t last = direct ? direct_last : shared_run(at, ranges);
            add(at, last, direct, ranges);
            at = last;
        }
        return std::move(plan_);
    }

private:
    bool fits(std::uint64_t begin, std::uint64_t end, const BaseRanges& ranges = {}) const {
        std::uint64_t bytes = block_ceil(end) - block_floor(begin);
        for (const BaseRange& range : ranges) bytes += range.bytes();
        return bytes <= limit_;
    }

    /// End of the chunks from `at` on that can be one direct window.
    std::size_t direct_run(std::size_t at) const {
        const WantedChunk& first = plan_.chunks[at];
        if (!in_place_ || !is_in_phase(rows_.rows[first.row])) return at;
        std::size_t last = at + 1;
        for (; last < plan_.chunks.size(); ++last) {
            const WantedChunk& next = plan_.chunks[last];
            if (next.row != first.row || !fits(first.begin, next.end())) break;
        }
        return last;
    }

    bool is_long_enough(std::size_t first, std::size_t last) const {
        return last > first && plan_.chunks[last - 1].end() - plan_.chunks[first].begin >= direct_read_bytes_min;
    }

    /// The ranges, and that of the chunk's base; parts of a file that touch are one.
    BaseRanges with_base(BaseRanges ranges, const WantedChunk& chunk) const {
        const ChunkBase* const base = base_of(chunk);
        if (base == nullptr) return ranges;
        const std::uint64_t needed_end = base->place.offset + base->place.length;
        const BaseRange found{base->place.file, block_floor(base->place.offset), block_ceil(needed_end), needed_end};
        const auto touches = [&found](const BaseRange& range) {
            return range.file == found.file && range.begin <= found.begin && found.begin <= range.end;
        };
        const auto range = std::find_if(ranges.begin(), ranges.end(), touches);
        if (range == ranges.end()) {
            ranges.push_back(found);
        } else if (range->needed_end < needed_end) {
            range->end = found.end;
            range->needed_end = needed_end;
        }
        return ranges;
    }

    const ChunkBase* base_of(const WantedChunk& chunk) const {
        if (rows_.bases.empty()) return nullptr;
        const std::uint64_t own = rows_.rows[chunk.row].chunk + chunk.number;
        return rows_.base_of(chunk.half == 0 ? own : rows_.stored[own].offset + chunk.half - 1);
    }

    /// End of the chunks from `at` on that share one arena block, with their bases. Stops where a direct window can
    /// begin.
    std::size_t shared_run(std::size_t at, BaseRanges& ranges) const {
        const WantedChunk& first = plan_.chunks[at];
        ranges = with_base({}, first);
        std::uint64_t end = first.end();
        std::uint64_t needed = first.length;
        std::uint64_t skipped = 0;
        std::size_t last = at + 1;
        for (; last < plan_.chunks.size(); ++last) {
            const WantedChunk& next = plan_.chunks[last];
            BaseRanges both = with_base(ranges, next);
            if (next.file != first.file || !fits(first.begin, std::max(end, next.end()), both)) break;
            // Blocks that are read only because of this gap; those at its ends are read in any case.
            const std::uint64_t gap = std::max(block_floor(next.begin), block_ceil(end)) - block_ceil(end);
            needed += next.length;
            skipped += gap;
            if (gap != 0 && skipped * read_gap_part > needed) break;
            if (in_place_ && next.length >= direct_read_bytes_min && is_in_phase(rows_.rows[next.row])) break;
            end = std::max(end, next.end());
            ranges = std::move(both);
        }
        return last;
    }

    void add(std::size_t first, std::size_t last, bool direct, BaseRanges& ranges) {
        std::uint64_t needed_end = 0;
        for (std::size_t i = first; i < last; ++i) needed_end = std::max(needed_end, plan_.chunks[i].end());
        const std::uint64_t begin = block_floor(plan_.chunks[first].begin);
        ReadWindow window{plan_.chunks[first].file, begin, block_ceil(needed_end), needed_end, first, last, direct};
        window.bytes = window.own_bytes();
        window.first_range = plan_.ranges.size();
        for (BaseRange& range : ranges) {
            range.at = window.bytes;
            window.bytes += range.bytes();
            plan_.ranges.push_back(range);
        }
        window.last_range = plan_.ranges.size();
        for (std::size_t i = first; i < last; ++i) place_base(plan_.chunks[i], ranges);
        plan_.windows.push_back(window);
    }

    void place_base(WantedChunk& chunk, const BaseRanges& ranges) {
        const ChunkBase* const base = base_of(chunk);
        if (base == nullptr) return;
        const ChunkPlace& place = base->place;
        const auto has = [&place](const BaseRange& range) {
            return range.file == place.file && range.begin <= place.offset && place.offset + place.length <= range.end;
        };
        const auto range = std::find_if(ranges.begin(), ranges.end(), has);
        assert(range != ranges.end());
        chunk.base_at = range->at + (place.offset - range->begin);
    }

    const ReadExtents& rows_;
    const bool in_place_;
    const std::uint64_t limit_;
    ReadPlan plan_;
};

}  // namespace

ReadPlan plan_reads(const ReadExtents& rows, std::uint64_t request_bytes, bool in_place) {
    return Planner(rows, request_bytes, in_place).plan();
}

}  // namespace flowstone
