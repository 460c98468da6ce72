#include "watch/extent_pages.h"

#include <algorithm>

#include "bounds.h"

namespace flowstone {
namespace {

/// The pages that contain only bytes of the row.
Reach whole_pages(const WriteExtent& row) {
    return {round_up(row.address, page_bytes()), round_down(row.address + row.length, page_bytes())};
}

/// The ends of the row, divided at the bounds where captures are compared: rows have the same alignment in the file as
/// in memory, and windows are complete blocks of the file. Some may be empty.
std::array<RowBytes, 3> ends_of(const WriteExtent& row) {
    const Reach own = whole_pages(row);
    const std::uint64_t tail = own.end - row.address, piece = round_down(row.length, look_bytes);
    const std::uint64_t cut = piece > tail ? piece : row.length;
    return {{{0, own.begin - row.address}, {tail, cut}, {cut, row.length}}};
}

/// The reason why a lazy row cannot be watched on any system; null if it can.
const char* unfit(const WriteExtent& row) {
    if (row.layout != contiguous) return "strided";
    if (row.device != on_host) return "on a device";
    if ((row.address - row.offset) % block_alignment_bytes != 0) return "not aligned with the file's pages";
    return whole_pages(row).begin >= whole_pages(row).end ? "less than a page" : nullptr;
}

/// Not watched are rows without digests (headers, which no other code changes), and rows with digests of a device.
bool is_watched(const WriteExtents& rows, const WriteExtent& row) {
    return row.lazy && row.length != 0 && row.chunk != no_digest && rows.digests_of(row) == nullptr;
}

constexpr const char* not_own = "in memory that others can write (a file's, or shared), or watch";

}  // namespace

ExtentPages::ExtentPages(const WriteExtents& rows, Watching watching) : rows_(rows) {
    const auto leave = [&](std::size_t row, std::string reason) {
        if (!left_) left_ = UnheldRow{row, std::move(reason)};
    };
    std::vector<std::size_t> wanted;
    std::vector<Reach> reaches;
    std::string refusal = "as asked for";
    std::shared_ptr<const WrittenPages> open;
    if (watching != Watching::samples && std::any_of(rows.rows.begin(), rows.rows.end(), [&](const WriteExtent& row) {
            return is_watched(rows, row);
        })) {
        refusal.clear();
        open = PageWatch::open(refusal);
    }
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const WriteExtent& row = rows.rows[i];
        if (!is_watched(rows, row)) continue;
        if (!refusal.empty() || unfit(row) != nullptr) {
            leave(i, refusal.empty() ? unfit(row) : refusal);
            continue;
        }
        wanted.push_back(i);
        reaches.push_back(whole_pages(row));
    }
    if (wanted.empty()) return;
    const PageWatch::OnRefusal refused =
        watching == Watching::exact ? PageWatch::OnRefusal::retry : PageWatch::OnRefusal::skip;
    pages_ = std::make_unique<PageWatch>(reaches, refused);
    ends_at_.assign(rows.rows.size(), none);
    for (std::size_t n = 0; n < wanted.size(); ++n) {
        if (!pages_->holds(n)) {
            leave(wanted[n], not_own);
            continue;
        }
        ends_at_[wanted[n]] = static_cast<std::uint32_t>(held_.size());
        held_.push_back(wanted[n]);
        exact_bytes_ += rows.rows[wanted[n]].length;
    }
    ends_.resize(held_.size());
}

void ExtentPages::digest_ends(LiveAccess& live, const OnEnd& on_end) const {
    struct Piece {
        std::size_t held = 0;
        std::size_t end = 0;
        RowBytes bytes{0, 0};
        const std::byte* copy = nullptr;
    };
    LiveBatch<Piece> batch(live);
    const auto flush = [&] {
        batch.flush([&](const Piece& piece, int error) {
            const std::uint64_t digest = error != 0 ? 0 : xxh3_64(piece.copy, piece.bytes.end - piece.bytes.begin);
            on_end(piece.held, piece.end, piece.bytes, digest, error);
        });
    };
    for (std::size_t n = 0; n < held_.size(); ++n) {
        const WriteExtent& row = rows_.rows[held_[n]];
        const std::array<RowBytes, 3> ends = ends_of(row);
        for (std::size_t i = 0; i < ends.size(); ++i) {
            const std::uint64_t bytes = ends[i].end - ends[i].begin;
            if (bytes == 0) continue;
            if (!batch.has_room() || batch.bytes() + bytes > LiveAccess::bounce_bytes) flush();
            std::byte* const copy = batch.empty() ? live.bounce() : batch.end();
            batch.add(copy, row.source() + ends[i].begin, bytes, {n, i, ends[i], copy});
        }
    }
    flush();
}

void ExtentPages::read_ends(LiveAccess& live, const std::function<void(std::size_t, const RowBytes&, int)>& gone) {
    digest_ends(live, [&](std::size_t held, std::size_t end, const RowBytes& bytes, std::uint64_t digest, int error) {
        if (error != 0)
            gone(held_[held], bytes, error);
        else
            ends_[held][end] = digest;
    });
}

std::vector<std::size_t> ExtentPages::changed_rows(LiveAccess& live) const {
    std::vector<bool> changed(held_.size(), false);
    digest_ends(live, [&](std::size_t held, std::size_t end, const RowBytes&, std::uint64_t digest, int error) {
        if (error != 0 || digest != ends_[held][end]) changed[held] = true;
    });
    std::vector<std::size_t> rows;
    for (std::size_t n = 0; n < held_.size(); ++n)
        if (changed[n] || pages_->first_written(whole_pages(rows_.rows[held_[n]]))) rows.push_back(held_[n]);
    return rows;
}

std::optional<RowBytes> ExtentPages::compare(std::size_t row, std::uint64_t begin, std::uint64_t end,
                                             const std::byte* bytes) const {
    const std::array<RowBytes, 3> ends = ends_of(rows_.rows[row]);
    const Ends& known = ends_[ends_at_[row]];
    for (std::size_t i = 0; i < ends.size(); ++i)
        if (ends[i].begin < ends[i].end && begin <= ends[i].begin && ends[i].end <= end &&
            xxh3_64(bytes + (ends[i].begin - begin), ends[i].end - ends[i].begin) != known[i])
            return ends[i];
    return std::nullopt;
}

std::optional<RowBytes> ExtentPages::settle(std::size_t row_index, std::uint64_t begin, std::uint64_t end) {
    const WriteExtent& row = rows_.rows[row_index];
    const Reach own = whole_pages(row);
    const std::uint64_t low = std::max(row.address + begin, own.begin), high = std::min(row.address + end, own.end);
    if (low >= high) return std::nullopt;
    // Both windows check a page that they share.
    const std::optional<Reach> found =
        pages_->first_written({round_down(low, page_bytes()), round_up(high, page_bytes())});
    pages_->release(low, high);
    if (!found) return std::nullopt;
    return RowBytes{found->begin - row.address, found->end - row.address};
}

}  // namespace flowstone
