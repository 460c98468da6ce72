#include "watch.h"

#include <algorithm>
#include <cstring>

#include "bounds.h"
#include "write_plan.h"

namespace flowstone {
namespace {

/// Spreads line numbers over the places they may take, so that no stride of the data hides from all of them.
std::uint64_t scattered(std::uint64_t number) {
    number *= 0x9E3779B97F4A7C15U;  // 2^64 / golden ratio
    return number ^ (number >> 29);
}

}  // namespace

Watch::Watch(const WriteRows& rows) : rows_(rows), first_line_(rows.rows.size(), unwatched) {
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const WriteRow& row = rows.rows[i];
        if (!row.lazy || row.length == 0) continue;
        first_line_[i] = lines_.size();
        const std::uint64_t count = chunk_count(row.length) * lines_per_chunk;
        for (std::uint64_t line = 0; line < count; ++line) {
            const Place where = place(row.length, line);
            copy_row(rows, row, where.begin, where.end, lines_.emplace_back().data());
        }
    }
}

/// A line somewhere in its quarter of its chunk; empty where the row ends before.
Watch::Place Watch::place(std::uint64_t row_bytes, std::uint64_t line) {
    constexpr std::uint64_t quarter = chunk_bytes / lines_per_chunk;
    const std::uint64_t low = std::min(line * quarter, row_bytes);
    const std::uint64_t high = std::min(low + quarter, row_bytes);
    if (high - low <= line_bytes) return {low, high};
    const std::uint64_t begin = low + scattered(line) % (high - low - line_bytes + 1);
    return {begin, begin + line_bytes};
}

void Watch::compare(std::size_t row, std::uint64_t begin, std::uint64_t end, const std::byte* bytes) {
    if (first_line_[row] == unwatched) return;
    constexpr std::uint64_t quarter = chunk_bytes / lines_per_chunk;
    for (std::uint64_t line = begin / quarter; line * quarter < end; ++line) {
        const Place where = place(rows_.rows[row].length, line);
        const std::uint64_t low = std::max(begin, where.begin);
        const std::uint64_t high = std::min(end, where.end);
        if (low >= high) continue;
        const std::byte* const sample = lines_[first_line_[row] + line].data() + (low - where.begin);
        if (std::memcmp(bytes + (low - begin), sample, high - low) != 0) report(row, low, high);
    }
}

void Watch::note_seam(std::size_t row, std::uint64_t begin, std::uint64_t digest) {
    bool differs = false;
    {
        const std::lock_guard lock(mutex_);
        const auto [found, is_first] = seams_.try_emplace({row, begin}, digest);
        differs = !is_first && found->second != digest;
    }
    if (differs) report(row, begin, std::min(rows_.rows[row].length, round_down(begin, chunk_bytes) + chunk_bytes));
}

void Watch::report(std::size_t row, std::uint64_t begin, std::uint64_t end) {
    const std::lock_guard lock(mutex_);
    if (!change_) change_ = Change{row, begin, end};
}

std::optional<Watch::Change> Watch::change() const {
    const std::lock_guard lock(mutex_);
    return change_;
}

}  // namespace flowstone
