// I/O extents: what a caller requests: byte ranges of files, and their memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bounds.h"
#include "cast.h"
#include "device.h"
#include "encoder.h"
#include "feed.h"
#include "kernels.h"

namespace flowstone {

inline constexpr std::int64_t contiguous = -1;  // the layout of a row in one run of memory
inline constexpr std::int32_t on_host = -1;     // the device of a row in host memory

/// A few bytes of a lazy row, as they were when the save began: one cache line, so one cache miss.
using Line = std::array<std::byte, 64>;
inline constexpr std::uint64_t lines_per_chunk = 4;  // 20,000 misses for 5 GB: about a millisecond

/// The mixing function of SplitMix64: results for neighbouring numbers are unrelated.
std::uint64_t scattered(std::uint64_t number);

/// The begin of line number `line` of a row: chosen by `seed`, uniformly in its quarter of its chunk; in the row's last
/// quarter, if the row ends before that.
/// Invariant: a line is whole, if the row has as many bytes, and begins at a multiple of its length or ends with the
/// row.
std::uint64_t line_begin(std::uint64_t row_bytes, std::uint64_t line, std::uint64_t seed);

/// How a row may follow from another one: it has the same bytes, or is what that one's float32 numbers are rounded to.
enum class Derivation : std::uint8_t { none, copy, bfloat16 = static_cast<std::uint8_t>(cast::Element::bfloat16), float16 = static_cast<std::uint8_t>(cast::Element::float16) };

/// `length` bytes at `offset` of file number `file`, taken from `address`.
struct WriteExtent {
    std::uint64_t offset;
    std::uint64_t length;
    std::uint64_t address;
    std::uint64_t chunk;  // index of the first chunk's digest, or no_digest
    std::int64_t layout;  // index into WriteExtents::layouts, or contiguous
    std::uint32_t file;
    bool lazy = false;  // may be captured after the caller has gone on; its source is watched
    std::int32_t device = on_host;  // whose memory `address` is in
    std::uint64_t seed = 0;  // chooses its lines: different for each row and save
    Derivation derivation = Derivation::none;
    bool gathered = false;  // the device puts the bytes, contiguous, at `address`, in host memory, before its first copy is over
    std::uint64_t follows = 0;  // index of the first chunk's digest of the row that it may follow from

    std::uint64_t end() const { return offset + length; }
    const std::byte* source() const { return reinterpret_cast<const std::byte*>(address); }
};

/// Sorted by (file, offset), disjoint within a file.
struct WriteExtents {
    std::vector<WriteExtent> rows;
    std::vector<Layout> layouts;  // gather
    std::uint64_t chunks = 0;     // length of the job's digests
    std::vector<std::shared_ptr<Device>> devices = {};
    // For each device, its lazy rows' lines, in order: lines_per_chunk for every chunk; of rows without digests alone, where there are
    // some. In host memory; valid from the first copy from that device until all is captured.
    std::vector<std::span<const Line>> samples = {};
    // For each device, the digests of its lazy rows' chunks, in order, in the place of samples, but of rows whose layout is not shallow; null:
    // it has none. Valid as long.
    std::vector<const Digested*> digested = {};
    // Rows whose sources come while the job runs; null: all are there. No row is lazy then, nor on a device.
    std::shared_ptr<Feed> feed = nullptr;
    // What is done to chunks before they are stored. Null: identity.
    std::shared_ptr<const Encoder> encoder = nullptr;
    // The encoder is for files from this number on. In those before, chunks keep their places.
    std::uint32_t encoded_from = 0;

    /// Whether a device that digests can digest the row.
    bool is_digestible(const WriteExtent& row) const { return row.layout == contiguous || layouts[static_cast<std::size_t>(row.layout)].is_shallow(); }

    /// The digests that the row's device has made; null: none.
    const Digested* digests_of(const WriteExtent& row) const {
        if (row.device == on_host || !row.lazy || digested.empty()) return nullptr;
        return is_digestible(row) ? digested[static_cast<std::size_t>(row.device)] : nullptr;
    }

    bool keeps_places() const { return first_encoded() == rows.size(); }
    /// The first row of a file for the encoder; the number of rows, if there is none.
    std::size_t first_encoded() const {
        if (encoder == nullptr || encoder->is_identity()) return rows.size();
        const auto is_before = [this](const WriteExtent& row) { return row.file < encoded_from; };
        return static_cast<std::size_t>(std::partition_point(rows.begin(), rows.end(), is_before) - rows.begin());
    }
};

/// Chunks [first, last) of the extent of `length` bytes at `offset` of file number `file`.
struct ReadExtent {
    std::uint64_t offset;
    std::uint64_t length;
    std::uint64_t address;  // of the extent's byte 0, of the box's first element, or verify_only
    std::uint64_t chunk;    // index of chunk 0's digest
    std::uint64_t first;
    std::uint64_t last;
    std::int64_t layout;    // index into ReadExtents::layouts, or contiguous
    std::uint32_t file;
    std::int32_t device = on_host;  // whose memory `address` is in

    std::uint64_t end() const { return offset + length; }
    std::byte* target() const { return reinterpret_cast<std::byte*>(address); }
};

/// Where a chunk is stored. With codec_cast it is not: `offset` is the index of the digest of the first chunk that it follows
/// from, and `length` a cast::Element.
struct ChunkPlace {
    std::uint64_t offset;
    std::uint32_t length;
    std::uint32_t file;
    std::uint8_t codec = codec_raw;
};

/// What a chunk with codec_xor is decoded with.
struct ChunkBase {
    std::uint64_t chunk;        // index of that one's digest
    std::uint64_t data_digest;  // of the data that results
    ChunkPlace place;
    std::uint64_t digest;       // of the stored bytes there
};

/// Any order; extents may repeat.
struct ReadExtents {
    std::vector<ReadExtent> rows;
    std::vector<Layout> layouts;  // scatter
    std::vector<std::uint64_t> digests;
    std::vector<std::shared_ptr<Device>> devices = {};
    std::vector<ChunkPlace> stored = {};  // for each digest; empty: every chunk is at its logical place in its extent
    std::vector<ChunkBase> bases = {};    // ascending, for each chunk with codec_xor

    std::uint32_t data_bytes(const ReadExtent& row, std::uint64_t chunk) const {
        return static_cast<std::uint32_t>(std::min(chunk_bytes, row.length - chunk * chunk_bytes));
    }
    /// With codec_cast: where half number `half` of the chunk comes from.
    const ChunkPlace& source_of(const ChunkPlace& chunk, std::uint64_t half) const { return stored[chunk.offset + half]; }
    ChunkPlace place_of(const ReadExtent& row, std::uint64_t chunk) const {
        if (!stored.empty()) return stored[row.chunk + chunk];
        const std::uint64_t skipped = chunk * chunk_bytes;
        return {row.offset + skipped, data_bytes(row, chunk), row.file};
    }
    /// Of the stored chunk with that digest; null: it is decoded by itself.
    const ChunkBase* base_of(std::uint64_t stored_chunk) const {
        const auto is_before = [stored_chunk](const ChunkBase& one) { return one.chunk < stored_chunk; };
        const auto found = std::partition_point(bases.begin(), bases.end(), is_before);
        return found == bases.end() || found->chunk != stored_chunk ? nullptr : &*found;
    }
};

/// Check the invariants above and all indices, on which plans rely; throws std::invalid_argument
/// naming the first row that breaks one. `file_bytes` are the planned sizes.
void check_extents(const WriteExtents& rows, std::span<const std::uint64_t> file_bytes);
void check_extents(const ReadExtents& rows, std::size_t file_count);

/// The numbers of the files of the rows, in groups: files that one chunk is computed from have to be read together.
/// Each group ascends, and groups by their first file.
std::vector<std::vector<std::uint32_t>> file_groups_of(const ReadExtents& rows);

}  // namespace flowstone
