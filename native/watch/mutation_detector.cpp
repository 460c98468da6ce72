#include "watch/mutation_detector.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#include "bounds.h"
#include "io/write_plan.h"

namespace flowstone {
namespace {

constexpr std::uint64_t quarter = chunk_bytes / lines_per_chunk;

bool is_watched(const WriteExtent& row) { return row.lazy && row.length != 0; }
std::uint64_t line_count(const WriteExtent& row) { return chunk_count(row.length) * lines_per_chunk; }
std::uint64_t line_end(const WriteExtent& row, std::uint64_t begin) {
    return std::min(begin + sizeof(Line), row.length);
}

/// A line of a row.
struct LinePosition {
    std::size_t row = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

}  // namespace

MutationDetector::MutationDetector(const WriteExtents& rows, Watching watching)
    : rows_(rows), pages_(rows, watching), first_line_(rows.rows.size(), nullptr) {
    place_digests();
    std::uint64_t count = 0;
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const WriteExtent& row = rows.rows[i];
        if (!is_watched(row) || pages_.holds(i) || rows.digests_of(row) != nullptr) continue;
        if (row.chunk != no_digest) sampled_bytes_ += row.length;
        if (row.device == on_host) count += line_count(row);
    }
    lines_.resize(count);
    const Line* next = lines_.data();
    std::vector<const Line*> next_sample;
    for (const std::span<const Line> samples : rows.samples) next_sample.push_back(samples.data());
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const WriteExtent& row = rows.rows[i];
        if (!is_watched(row) || pages_.holds(i) || rows.digests_of(row) != nullptr) continue;
        const Line*& first = row.device == on_host ? next : next_sample[static_cast<std::size_t>(row.device)];
        first_line_[i] = first;
        first += line_count(row);
    }
    const LentAccess lent;
    LiveAccess& live = *lent;
    pages_.read_ends(
        live, [this](std::size_t row, const RowBytes& gone, int error) { report(row, gone.begin, gone.end, error); });
    read_lines(live);
}

void MutationDetector::place_digests() {
    if (rows_.digested.empty()) return;
    first_digest_.resize(rows_.rows.size());
    std::vector<std::uint64_t> next(rows_.devices.size(), 0);
    for (std::size_t i = 0; i < rows_.rows.size(); ++i) {
        const WriteExtent& row = rows_.rows[i];
        if (rows_.digests_of(row) == nullptr) continue;
        std::uint64_t& first = next[static_cast<std::size_t>(row.device)];
        first_digest_[i] = first;
        first += chunk_count(row.length);
        digested_bytes_ += row.length;
    }
}

void MutationDetector::read_lines(LiveAccess& live) {
    LiveBatch<LinePosition> batch(live);
    const auto flush = [&] {
        batch.flush([&](const LinePosition& spot, int error) {
            if (error != 0) report(spot.row, spot.begin, spot.end, error);
        });
    };
    Line* next = lines_.data();
    for (std::size_t i = 0; i < rows_.rows.size(); ++i) {
        const WriteExtent& row = rows_.rows[i];
        if (!is_watched(row) || row.device != on_host || pages_.holds(i)) continue;
        for (std::uint64_t line = 0; line < line_count(row); ++line, ++next) {
            const std::uint64_t begin = line_begin(row.length, line, row.seed);
            const LinePosition spot{i, begin, line_end(row, begin)};
            if (!batch.empty() && (!batch.has_room() || batch.end() != next->data() || row.layout != contiguous))
                flush();
            if (row.layout == contiguous) {
                // Each line misses every cache: prefetch, which never faults, while the list is made.
                __builtin_prefetch(row.source() + spot.begin);
                batch.add(next->data(), row.source() + spot.begin, spot.end - spot.begin, spot);
            } else if (const int error = copy_row(rows_, row, spot.begin, spot.end, next->data(), live)) {
                report(i, spot.begin, spot.end, error);
            }
        }
    }
    flush();
}

std::uint64_t MutationDetector::sample_digest(std::size_t row) const {
    const Line* const lines = first_line_[row];
    return lines == nullptr ? 0 : xxh3_64(lines, line_count(rows_.rows[row]) * sizeof(Line));
}

void MutationDetector::compare(std::size_t row, std::uint64_t begin, std::uint64_t end, const std::byte* bytes) {
    if (pages_.holds(row)) {
        if (const std::optional<RowBytes> changed = pages_.compare(row, begin, end, bytes))
            report(row, changed->begin, changed->end);
        return;
    }
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

void MutationDetector::compare_chunk(std::size_t row, std::uint64_t chunk, std::uint64_t digest) {
    const std::optional<std::uint64_t> expected = device_digest(row, chunk);
    if (!expected || *expected == digest) return;
    report(row, chunk * chunk_bytes, std::min((chunk + 1) * chunk_bytes, rows_.rows[row].length));
}

std::optional<std::uint64_t> MutationDetector::device_digest(std::size_t row, std::uint64_t chunk) const {
    const DeviceDigests* const made = rows_.digests_of(rows_.rows[row]);
    return made == nullptr ? std::nullopt : std::optional(made->digest(first_digest_[row] + chunk));
}

void MutationDetector::settle(std::size_t row, std::uint64_t begin, std::uint64_t end) {
    if (!pages_.holds(row)) return;
    if (const std::optional<RowBytes> changed = pages_.settle(row, begin, end))
        report(row, changed->begin, changed->end);
}

std::vector<std::size_t> MutationDetector::changed_rows() const {
    const LentAccess lent;
    return pages_.changed_rows(*lent);
}

void MutationDetector::note_split(std::size_t row, std::uint64_t begin, std::uint64_t digest) noexcept {
    const std::uint64_t end = std::min(rows_.rows[row].length, round_down(begin, chunk_bytes) + chunk_bytes);
    bool differs = false;
    try {
        const std::lock_guard lock(mutex_);
        const auto [found, is_first] = splits_.try_emplace({row, begin}, digest);
        differs = !is_first && found->second != digest;
    } catch (const std::bad_alloc&) { return report(row, begin, end, ENOMEM); }
    if (differs) report(row, begin, end);
}

void MutationDetector::report(std::size_t row, std::uint64_t begin, std::uint64_t end, int error) {
    const std::lock_guard lock(mutex_);
    if (!change_) change_ = Change{row, begin, end, error};
}

std::optional<MutationDetector::Change> MutationDetector::change() const {
    const std::lock_guard lock(mutex_);
    return change_;
}

std::vector<std::uint64_t> sample_digests(const WriteExtents& rows) {
    const MutationDetector watch(rows);
    if (const auto change = watch.change())
        throw std::system_error(change->error, std::generic_category(), "reading live memory");
    std::vector<std::uint64_t> digests(rows.rows.size());
    for (std::size_t i = 0; i < digests.size(); ++i) digests[i] = watch.sample_digest(i);
    return digests;
}

}  // namespace flowstone
