// Windows of complete chunks, which are encoded, and appended to their file once their length is known.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "codec/derived.h"
#include "codec/encoder.h"
#include "io/write_plan.h"

namespace flowstone {

// This header concerns only files that are encoded: see WriteExtents::encoded_from.

/// Check rows for use with an encoder: rows without digests must fill the first blocks of their file. Throws
/// std::invalid_argument.
void check_encodable(const WriteExtents& rows);

/// Windows for an encoder: each has complete chunks, at least one, as many as `window_bytes` and gaps up to `gap_bytes`
/// allow (`appended`). Rows without digests get windows in their planned places.
std::vector<WriteWindow> plan_chunk_windows(const WriteExtents& rows, std::uint64_t window_bytes,
                                            std::uint64_t gap_bytes);

/// The places of chunks without an encoder: as planned.
std::vector<StoredChunk> planned_chunks(const WriteExtents& rows);

/// Encodes captured windows, and assigns each the next free place in its file. Any thread.
class Appender {
public:
    /// A range of a file, in blocks.
    struct Range {
        std::uint64_t offset;
        std::uint64_t bytes;
    };

    /// derived  the derived chunks of the rows; null: none
    Appender(const WriteExtents& rows, std::size_t files, const DerivedChunks* derived = nullptr);

    /// Encode a window whose image is `image`. The stored chunks end up consecutive at the image's start, padded with
    /// zeros to a block; they go to the returned range of the file. `digests` are then those of the stored bytes.
    /// `room` has encode_room_bytes.
    Range append(const WriteWindow& window, std::byte* image, std::byte* room, std::span<std::uint64_t> digests);
    /// Record a derived chunk, which has that digest, and needs neither capture nor place.
    void leave_out(std::uint64_t chunk, std::uint8_t codec, std::uint64_t digest);

    /// How each chunk is stored; complete once all windows are appended.
    const std::vector<StoredChunk>& stored() const { return stored_; }
    /// The end of each file, in blocks; for files that are not encoded, the end of the last row.
    std::vector<std::uint64_t> file_ends() const;

private:
    std::uint64_t take(std::uint32_t file, std::uint64_t bytes);

    ChunkEncoding encode(const CapturedChunk& chunk, std::byte* room) const;

    const WriteExtents& rows_;
    const DerivedChunks* const derived_;
    std::vector<StoredChunk> stored_;
    mutable std::mutex mutex_;
    std::vector<std::uint64_t> ends_;
};

}  // namespace flowstone
