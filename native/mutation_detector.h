// The mutation detector: whether sources have changed since the save began.
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

/// Rows that are captured after the caller went on must not have changed by then. The methods:
///   pages    every write is detected, where the system reports written pages (extent_pages.h)
///   samples  otherwise a few lines of every chunk of a lazy row are copied when the save starts, and compared with
///            the captured bytes
///   digests  of each chunk of a lazy row on a device, which that one has made when the save started, are compared with
///            those of what was captured
///   splits   a chunk that is split between two windows is digested by the first and partly captured by the second;
///            both note a digest of that part
/// All members but the constructor: any thread.
class MutationDetector {
public:
    /// Reads the samples of rows on the host from their sources.
    explicit MutationDetector(const WriteExtents& rows, Watching watching = Watching::samples);

    /// The digest of a row's samples, as first read.
    std::uint64_t sample_digest(std::size_t row) const;

    /// Row bytes [begin, end), counted from the row's start, were captured as `bytes`: compare them.
    void compare(std::size_t row, std::uint64_t begin, std::uint64_t end, const std::byte* bytes);

    /// The whole of chunk number `chunk` of the row was read for one window, with this digest: compare it.
    void compare_chunk(std::size_t row, std::uint64_t chunk, std::uint64_t digest);

    /// The digest that a device has made of the whole of chunk number `chunk` of the row; nullopt: it has made none. Valid from the
    /// first copy from that device.
    std::optional<std::uint64_t> device_digest(std::size_t row, std::uint64_t chunk) const;

    /// Note the digest of row bytes [begin, the end of their chunk), as one of the two windows that meet there read
    /// them.
    void note_split(std::size_t row, std::uint64_t begin, std::uint64_t digest) noexcept;

    /// Row bytes [begin, end) were captured, and will not be read from the source again.
    void settle(std::size_t row, std::uint64_t begin, std::uint64_t end);
    /// The rows that are watched exactly and were written since the save began, or are gone; ascending.
    std::vector<std::size_t> changed_rows() const;
    /// No row will be read again.
    void let_go() { pages_.let_go(); }

    /// The rows that are watched exactly.
    const ExtentPages& pages() const { return pages_; }
    /// The number of bytes in rows that are watched by digests of all their chunks.
    std::uint64_t digested_bytes() const { return digested_bytes_; }
    /// The number of bytes in rows that are watched by samples.
    std::uint64_t sampled_bytes() const { return sampled_bytes_; }

    /// Row bytes [begin, end) have changed; or, with an `error`, are gone (EFAULT), or could not be compared (ENOMEM).
    void report(std::size_t row, std::uint64_t begin, std::uint64_t end, int error = 0);

    struct Change {
        std::size_t row;
        std::uint64_t begin;  // bytes, from the row's start
        std::uint64_t end;
        int error;  // errno, if they could not be read
    };
    /// The first reported change.
    std::optional<Change> change() const;

private:
    void place_digests();
    void read_lines(LiveAccess& live);

    const WriteExtents& rows_;
    ExtentPages pages_;
    std::uint64_t digested_bytes_ = 0;
    std::uint64_t sampled_bytes_ = 0;
    std::vector<Line> lines_;               // of rows on the host
    std::vector<const Line*> first_line_;  // per row; null: not sampled
    std::vector<std::uint64_t> first_digest_;  // per row, of its device's; without meaning for others; empty: no device has any
    mutable std::mutex mutex_;
    std::map<std::pair<std::size_t, std::uint64_t>, std::uint64_t> splits_;  // (row, begin) -> digest
    std::optional<Change> change_;
};

/// For each row a digest of a few of its lines, read now; samples of rows on a device exist already. Rows of equal
/// bytes have equal digests, in any memory. All rows must be lazy. Throws std::system_error (EFAULT) if a row's memory
/// is gone.
std::vector<std::uint64_t> sample_digests(const WriteExtents& rows);

}  // namespace flowstone
