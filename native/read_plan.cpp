#include "read_plan.h"

#include <algorithm>
#include <tuple>

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
            const std::size_t last = direct ? direct_last : shared_run(at);
            add(at, last, direct);
            at = last;
        }
        return std::move(plan_);
    }

private:
    bool fits(std::uint64_t begin, std::uint64_t end) const { return block_ceil(end) - block_floor(begin) <= limit_; }

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

    /// End of the chunks from `at` on that share one arena block. Stops where a direct window can begin.
    std::size_t shared_run(std::size_t at) const {
        const WantedChunk& first = plan_.chunks[at];
        std::uint64_t end = first.end();
        std::uint64_t needed = first.length;
        std::uint64_t skipped = 0;
        std::size_t last = at + 1;
        for (; last < plan_.chunks.size(); ++last) {
            const WantedChunk& next = plan_.chunks[last];
            if (next.file != first.file || !fits(first.begin, std::max(end, next.end()))) break;
            // Blocks that are read only because of this gap; those at its ends are read in any case.
            const std::uint64_t gap = std::max(block_floor(next.begin), block_ceil(end)) - block_ceil(end);
            needed += next.length;
            skipped += gap;
            if (gap != 0 && skipped * read_gap_part > needed) break;
            if (in_place_ && next.length >= direct_read_bytes_min && is_in_phase(rows_.rows[next.row])) break;
            end = std::max(end, next.end());
        }
        return last;
    }

    void add(std::size_t first, std::size_t last, bool direct) {
        std::uint64_t needed_end = 0;
        for (std::size_t i = first; i < last; ++i) needed_end = std::max(needed_end, plan_.chunks[i].end());
        const std::uint64_t begin = block_floor(plan_.chunks[first].begin);
        plan_.windows.push_back({plan_.chunks[first].file, begin, block_ceil(needed_end), needed_end, first, last, direct});
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
