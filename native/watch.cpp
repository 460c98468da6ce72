#include "watch.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "bounds.h"
#include "write_plan.h"

namespace flowstone {
namespace {

constexpr std::uint64_t quarter = chunk_bytes / lines_per_chunk;

bool is_watched(const WriteRow& row) { return row.lazy && row.length != 0; }
std::uint64_t line_count(const WriteRow& row) { return chunk_count(row.length) * lines_per_chunk; }
std::uint64_t line_end(const WriteRow& row, std::uint64_t begin) { return std::min(begin + sizeof(Line), row.length); }

/// Copies lines that lie far from each other: many at once are on their way, for each misses every cache there is.
class Sampler {
public:
    void add(const std::byte* source, std::size_t length, Line* out) {
        __builtin_prefetch(source);
        Due& due = due_[next_++ % ahead];
        take(due);
        due = {source, length, out};
    }
    void finish() {
        for (Due& due : due_) take(due);
    }

private:
    struct Due {
        const std::byte* source = nullptr;
        std::size_t length = 0;
        Line* out = nullptr;
    };
    static constexpr std::size_t ahead = 32;

    static void take(Due& due) {
        if (due.out != nullptr) std::memcpy(due.out->data(), due.source, due.length);
        due.out = nullptr;
    }

    std::array<Due, ahead> due_{};
    std::size_t next_ = 0;
};

}  // namespace

Watch::Watch(const WriteRows& rows) : rows_(rows), first_line_(rows.rows.size(), nullptr) {
    std::uint64_t count = 0;
    for (const WriteRow& row : rows.rows)
        if (is_watched(row) && row.device == on_host) count += line_count(row);
    lines_.resize(count);
    Line* next = lines_.data();
    Sampler sampler;
    std::vector<const Line*> next_sample;
    for (const std::span<const Line> samples : rows.samples) next_sample.push_back(samples.data());
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const WriteRow& row = rows.rows[i];
        if (!is_watched(row)) continue;
        if (row.device != on_host) {
            const Line*& samples = next_sample[static_cast<std::size_t>(row.device)];
            first_line_[i] = samples;
            samples += line_count(row);
            continue;
        }
        first_line_[i] = next;
        for (std::uint64_t line = 0; line < line_count(row); ++line, ++next) {
            const std::uint64_t begin = line_begin(row.length, line, row.seed);
            const std::uint64_t end = line_end(row, begin);
            if (row.layout == contiguous)
                sampler.add(row.source() + begin, end - begin, next);
            else
                copy_row(rows, row, begin, end, next->data());
        }
    }
    sampler.finish();
}

std::uint64_t Watch::sample_digest(std::size_t row) const {
    const Line* const lines = first_line_[row];
    return lines == nullptr ? 0 : xxh3_64(lines, line_count(rows_.rows[row]) * sizeof(Line));
}

void Watch::compare(std::size_t row, std::uint64_t begin, std::uint64_t end, const std::byte* bytes) {
    const Line* const lines = first_line_[row];
    if (lines == nullptr) return;
    for (std::uint64_t line = begin / quarter; line * quarter < end; ++line) {
        const std::uint64_t line_low = line_begin(rows_.rows[row].length, line, rows_.rows[row].seed);
        const std::uint64_t low = std::max(begin, line_low);
        const std::uint64_t high = std::min(end, line_end(rows_.rows[row], line_low));
        if (low >= high) continue;
        const std::byte* const sample = lines[line].data() + (low - line_low);
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

std::vector<std::uint64_t> sample_digests(const WriteRows& rows) {
    const Watch watch(rows);
    std::vector<std::uint64_t> digests(rows.rows.size());
    for (std::size_t i = 0; i < digests.size(); ++i) digests[i] = watch.sample_digest(i);
    return digests;
}

}  // namespace flowstone
