// Rows of which every byte is watched, by the pages that they fill and by digests of their ends.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "live_memory.h"
#include "page_watch.h"
#include "io_extents.h"

namespace flowstone {

/// Which lazy rows are watched exactly; the others are sampled.
enum class Watching : std::uint8_t {
    samples,    // none
    automatic,  // all that can be watched; what was refused once is not tried at every save
    exact,      // all that can be watched: the caller insists
};

/// A range of bytes of a row, from its start.
struct RowBytes {
    std::uint64_t begin;
    std::uint64_t end;
};

/// A row's whole pages are protected. A page that it shares with other memory shows nothing about the row, so the row's
/// bytes in it are digested, at the save and again when they are captured. All members but the constructor: any thread.
class ExtentPages {
public:
    /// Watch from now on: rows on the host that are lazy, contiguous and have digests, where the system allows it.
    ExtentPages(const WriteExtents& rows, Watching watching);
    /// Read the parts that are not whole pages; call it first. gone(row, bytes, error) reports memory that is gone.
    void read_ends(LiveAccess& live, const std::function<void(std::size_t, const RowBytes&, int)>& gone);

    bool holds(std::size_t row) const { return !ends_at_.empty() && ends_at_[row] != none; }
    std::uint64_t exact_bytes() const { return exact_bytes_; }
    /// Of them, those in huge pages, of which the watch costs next to nothing.
    std::uint64_t huge_bytes() const { return pages_ ? pages_->huge_bytes() : 0; }

    /// Keeps the system's part ready for the next save (PageWatch::open); null if no row is held.
    std::shared_ptr<const WrittenPages> open() const { return pages_ ? pages_->pages() : nullptr; }

    /// The first lazy row that is not held, and the reason.
    struct Left {
        std::size_t row;
        std::string reason;
    };
    const std::optional<Left>& left() const { return left_; }

    // For rows that are held:

    /// Bytes [begin, end) of the row were captured as `bytes`: returns a range that differs from the save's begin,
    /// according to the ends' digests. Each bound is that of a block of the file, a part of a chunk, or the row.
    std::optional<RowBytes> compare(std::size_t row, std::uint64_t begin, std::uint64_t end, const std::byte* bytes) const;
    /// Bytes [begin, end) of the row will not be read again: returns pages written since the save. Call once per range.
    std::optional<RowBytes> settle(std::size_t row, std::uint64_t begin, std::uint64_t end);
    /// The rows that were written since the save, or are gone; ascending. Reads the ends again, and releases nothing.
    std::vector<std::size_t> changed_rows(LiveAccess& live) const;
    /// No row will be read again.
    void let_go() { pages_ ? pages_->let_go() : void(); }

private:
    static constexpr std::uint32_t none = ~std::uint32_t{0};
    using Ends = std::array<std::uint64_t, 3>;  // digests
    /// An end of a row, by its position in held_ and in Ends, has this digest, or cannot be read.
    using OnEnd = std::function<void(std::size_t held, std::size_t end, const RowBytes& bytes, std::uint64_t digest, int error)>;

    void digest_ends(LiveAccess& live, const OnEnd& on_end) const;

    const WriteExtents& rows_;
    std::unique_ptr<PageWatch> pages_;
    std::vector<std::uint32_t> ends_at_;  // per row, in ends_; none: not held
    std::vector<Ends> ends_;
    std::vector<std::size_t> held_;  // rows, in the order of ends_
    std::uint64_t exact_bytes_ = 0;
    std::optional<Left> left_;
};

}  // namespace flowstone
