// The mutation detector: whether sources are still what they were when the save began.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "live_memory.h"
#include "extent_pages.h"
#include "io_extents.h"

namespace flowstone {

/// Rows captured after the caller went on must not have changed by then. The means:
///   pages    every write is noticed, where the system tells of them (extent_pages.h)
///   samples  else a few lines of every chunk of a lazy row, copied when the save starts, compared with what
///            was captured
///   splits   a chunk that is split between two windows is digested by the first and captured in part by the second;
///            both note a digest of that part
/// All members but the constructor: any thread.
class MutationDetector {
public:
    /// Reads the samples of rows on the host from their sources.
    explicit MutationDetector(const WriteExtents& rows, Watching watching = Watching::samples);

    /// Of the samples of a row, as they were at first.
    std::uint64_t sample_digest(std::size_t row) const;

    /// The job captures row bytes [begin, end), counted from the row's start, as `bytes`.
    void compare(std::size_t row, std::uint64_t begin, std::uint64_t end, const std::byte* bytes);

    /// Row bytes [begin, the end of their chunk) as one of the two windows that meet there saw them.
    void note_split(std::size_t row, std::uint64_t begin, std::uint64_t digest) noexcept;

    /// The job captures row bytes [begin, end), and nothing of them will be read from the source again.
    void settle(std::size_t row, std::uint64_t begin, std::uint64_t end);
    /// Nothing will be read again.
    void let_go() { pages_.let_go(); }

    /// Which rows are watched exactly.
    const ExtentPages& pages() const { return pages_; }
    /// Bytes of the others that are watched.
    std::uint64_t sampled_bytes() const { return sampled_bytes_; }

    /// Row bytes [begin, end) are found to have changed; or, with an `error`, not to be there any more (EFAULT), or not to be
    /// compared (ENOMEM).
    void report(std::size_t row, std::uint64_t begin, std::uint64_t end, int error = 0);

    struct Change {
        std::size_t row;
        std::uint64_t begin;  // bytes, from the row's start
        std::uint64_t end;
        int error;  // errno, where they could not be read
    };
    /// The first that was found.
    std::optional<Change> change() const;

private:
    void read_lines(LiveAccess& live);

    const WriteExtents& rows_;
    ExtentPages pages_;
    std::uint64_t sampled_bytes_ = 0;
    std::vector<Line> lines_;               // of rows on the host
    std::vector<const Line*> first_line_;  // per row; null: not sampled
    mutable std::mutex mutex_;
    std::map<std::pair<std::size_t, std::uint64_t>, std::uint64_t> splits_;  // (row, begin) -> digest
    std::optional<Change> change_;
};

/// For each row a digest of a few lines of it, read now; samples of rows on a device are there already. Rows of equal
/// bytes have equal ones, wherever they lie. All rows are to be lazy. Throws std::system_error (EFAULT) where one is not there.
std::vector<std::uint64_t> sample_digests(const WriteExtents& rows);

}  // namespace flowstone
