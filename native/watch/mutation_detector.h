// The mutation detector: finds out whether sources have changed since the save began.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "capture/live_memory.h"
#include "watch/extent_pages.h"
#include "io/io_extents.h"

namespace flowstone {

/// Rows that are captured after `save` has returned must not change before. Changes are detected by:
///   pages    every write is detected, if the system reports written pages (extent_pages.h)
///   samples  otherwise a few lines of every chunk of a lazy row are copied when the save starts, and compared with
///            the captured bytes
///   digests  a device digests each chunk of its lazy rows when the save starts; they are compared with the digests of
///            the captured bytes
///   splits   a chunk that is split between two windows is digested by the first and partly captured by the second;
///            both record a digest of that part
/// All members but the constructor: any thread.
class MutationDetector {
public:
    /// Reads the samples of rows on the host from their sources.
    explicit MutationDetector(const WriteExtents& rows, Watching watching = Watching::samples);

    /// The digest of a row's samples, as first read.
    std::uint64_t sample_digest(std::size_t row) const;

    /// Compare captured `bytes`: row bytes [begin, end), counted from the row's start.
    void compare(std::size_t row, std::uint64_t begin, std::uint64_t end, const std::byte* bytes);

    /// Compare the digest of chunk number `chunk` of the row, which was read completely for one window.
    void compare_chunk(std::size_t row, std::uint64_t chunk, std::uint64_t digest);

    /// The device's digest of chunk number `chunk` of the row; nullopt: there is none. Valid from the first copy from
    /// that device.
    std::optional<std::uint64_t> device_digest(std::size_t row, std::uint64_t chunk) const;

    /// Record the digest of row bytes [begin, the end of their chunk), as read by one of the two windows that share the
    /// chunk.
    void note_split(std::size_t row, std::uint64_t begin, std::uint64_t digest) noexcept;

    /// End the watch of row bytes [begin, end), which were captured and will not be read again.
    void settle(std::size_t row, std::uint64_t begin, std::uint64_t end);
    /// The exactly watched rows that were written since the save began, or whose memory was freed; ascending.
    std::vector<std::size_t> changed_rows() const;
    /// End the watch of all rows.
    void release() { pages_.release(); }

    /// The rows that are watched exactly.
    const ExtentPages& pages() const { return pages_; }
    /// The number of bytes in rows that are watched by digests of all their chunks.
    std::uint64_t digested_bytes() const { return digested_bytes_; }
    /// The number of bytes in rows that are watched by samples.
    std::uint64_t sampled_bytes() const { return sampled_bytes_; }

    /// Report that row bytes [begin, end) have changed; or, with an `error`, were freed (EFAULT), or could not be
    /// compared (ENOMEM).
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
    std::vector<std::uint64_t>
        first_digest_;  // per row: index of its first digest among its device's; empty: no device has digests
    mutable std::mutex mutex_;
    std::map<std::pair<std::size_t, std::uint64_t>, std::uint64_t> splits_;  // (row, begin) -> digest
    std::optional<Change> change_;
};

/// For each row a digest of a few of its lines, read now; samples of rows on a device exist already. Rows with equal
/// bytes have equal digests, in any memory. All rows must be lazy. Throws std::system_error (EFAULT) if a row's memory
/// was freed.
std::vector<std::uint64_t> sample_digests(const WriteExtents& rows);

}  // namespace flowstone
