// Rows that are watched exactly: by write protection of the pages that they fill, and by digests of their ends.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "capture/live_memory.h"
#include "watch/page_watch.h"
#include "io/io_extents.h"

namespace flowstone {

/// Which lazy rows are watched exactly; the others are sampled.
enum class Watching : std::uint8_t {
    samples,    // no row
    automatic,  // all rows that can be watched; refused memory is not retried at every save
    exact,      // all rows that can be watched, retrying refused memory, as the caller requires it
};

/// A range of bytes of a row, from its start.
struct RowBytes {
    std::uint64_t begin;
    std::uint64_t end;
};

/// Complete pages of a row are protected. A page that the row shares with other memory shows nothing about the row, so
/// the row's bytes in it (its ends) are digested, at the save and again when they are captured. All members but the
/// constructor: any thread.
class ExtentPages {
public:
    /// Watch rows from now on: rows on the host that are lazy, contiguous and have digests, if the system allows it.
    ExtentPages(const WriteExtents& rows, Watching watching);
    /// Read the ends of rows; call it first. gone(row, bytes, error) reports memory that was freed.
    void read_ends(LiveAccess& live, const std::function<void(std::size_t, const RowBytes&, int)>& gone);

    bool holds(std::size_t row) const { return !ends_at_.empty() && ends_at_[row] != none; }
    std::uint64_t exact_bytes() const { return exact_bytes_; }
    /// The watched bytes in huge pages, which cost almost nothing to watch.
    std::uint64_t huge_bytes() const { return pages_ ? pages_->huge_bytes() : 0; }

    /// A reference that keeps the system's resources for the next save (PageWatch::open); null if no row is held.
    std::shared_ptr<const WrittenPages> open() const { return pages_ ? pages_->pages() : nullptr; }

    /// The first lazy row that is not held, and the reason.
    struct UnheldRow {
        std::size_t row;
        std::string reason;
    };
    const std::optional<UnheldRow>& left() const { return left_; }

    // For rows that are held:

    /// Compare captured `bytes` of the row's range [begin, end) with the ends' digests from the beginning of the save;
    /// returns a range that differs. Bounds are those of a block of the file, a part of a chunk, or the row.
    std::optional<RowBytes> compare(std::size_t row, std::uint64_t begin, std::uint64_t end,
                                    const std::byte* bytes) const;
    /// End the watch of the row's range [begin, end), which will not be read again; returns pages written since the
    /// save. Call it once per range.
    std::optional<RowBytes> settle(std::size_t row, std::uint64_t begin, std::uint64_t end);
    /// The rows that were written since the save, or whose memory was freed; ascending. Reads the ends again, and
    /// releases no memory.
    std::vector<std::size_t> changed_rows(LiveAccess& live) const;
    /// End the watch of all rows.
    void release() { pages_ ? pages_->release() : void(); }

private:
    static constexpr std::uint32_t none = ~std::uint32_t{0};
    using Ends = std::array<std::uint64_t, 3>;  // digests
    /// Called with an end of a row, by its position in held_ and in Ends, and its digest, or the error from reading it.
    using OnEnd =
        std::function<void(std::size_t held, std::size_t end, const RowBytes& bytes, std::uint64_t digest, int error)>;

    void digest_ends(LiveAccess& live, const OnEnd& on_end) const;

    const WriteExtents& rows_;
    std::unique_ptr<PageWatch> pages_;
    std::vector<std::uint32_t> ends_at_;  // per row, in ends_; none: not held
    std::vector<Ends> ends_;
    std::vector<std::size_t> held_;  // rows, in the order of ends_
    std::uint64_t exact_bytes_ = 0;
    std::optional<UnheldRow> left_;
};

}  // namespace flowstone
