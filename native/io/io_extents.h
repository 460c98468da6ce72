// I/O extents: a caller's request, as byte ranges of files and their memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bounds.h"
#include "codec/cast.h"
#include "gpu/device.h"
#include "codec/encoder.h"
#include "io/source_supply.h"
#include "capture/copy_kernels.h"

namespace flowstone {

inline constexpr std::int64_t contiguous = -1;  // the layout of a row in one run of memory
inline constexpr std::int32_t on_host = -1;     // the device of a row in host memory

/// A few bytes of a lazy row, as they were when the save began: one cache line, so one cache miss.
using Line = std::array<std::byte, 64>;
inline constexpr std::uint64_t lines_per_chunk = 4;  // 20,000 misses for 5 GB: about a millisecond

/// The mixing function of SplitMix64: results for neighbouring numbers are unrelated.
std::uint64_t scattered(std::uint64_t number);

/// The start of line number `line` of a row. `seed` determines it, uniformly in its quarter of its chunk; if the row
/// ends before that quarter, in the row's last quarter. Invariant: a line is complete if the row has as many bytes; it
/// begins at a multiple of its length, or ends with the row.
std::uint64_t line_begin(std::uint64_t row_bytes, std::uint64_t line, std::uint64_t seed);

/// How a row may be derived from another one: it has the same bytes, or the other row's float32 numbers, rounded.
enum class Derivation : std::uint8_t {
    none,
    copy,
    bfloat16 = static_cast<std::uint8_t>(cast::Element::bfloat16),
    float16 = static_cast<std::uint8_t>(cast::Element::float16)
};

/// `length` bytes for `offset` of file number `file`, from `address`.
struct WriteExtent {
    std::uint64_t offset;
    std::uint64_t length;
    std::uint64_t address;
    std::uint64_t chunk;  // index of the first chunk's digest, or no_digest
    std::int64_t layout;  // index into WriteExtents::layouts, or contiguous
    std::uint32_t file;
    bool lazy = false;  // may be captured after the caller continues; its source is watched
    std::int32_t device = on_host;  // the device in whose memory `address` is
    std::uint64_t seed = 0;  // determines its lines: different for each row and save
    Derivation derivation = Derivation::none;
    bool gathered =
        false;  // the device puts the bytes, contiguous, at `address`, in host memory, before its first copy is over
    std::uint64_t follows = 0;  // index of the first chunk's digest of the row from which it may be derived

    std::uint64_t end() const { return offset + length; }
    const std::byte* source() const { return reinterpret_cast<const std::byte*>(address); }
};

/// Sorted by (file, offset), disjoint within a file.
struct WriteExtents {
    std::vector<WriteExtent> rows;
    std::vector<Layout> layouts;  // gather
    std::uint64_t chunks = 0;     // length of the job's digests
    std::vector<std::shared_ptr<Device>> devices = {};
    // For each device, its lazy rows' lines, in order: lines_per_chunk for every chunk, only of rows without digests.
    // In host memory; valid from the first copy from that device until all is captured.
    std::vector<std::span<const Line>> samples = {};
    // For each device, the digests of the chunks of its lazy rows with shallow layouts, in order, instead of samples;
    // null: there are none. Valid as long as samples.
    std::vector<const DeviceDigests*> digested = {};
    // Set if rows get their bytes while the job runs; then no row is lazy or on a device. Null: all rows have their
    // bytes.
    std::shared_ptr<SourceSupply> supply = nullptr;
    // The encoder of chunks. Null: identity.
    std::shared_ptr<const Encoder> encoder = nullptr;
    // The encoder is for files from this number on. In earlier files, chunks keep their places.
    std::uint32_t encoded_from = 0;

    /// Whether a device that digests can digest the row.
    bool is_digestible(const WriteExtent& row) const {
        return row.layout == contiguous || layouts[static_cast<std::size_t>(row.layout)].is_shallow();
    }

    /// The digests that the row's device has computed; null: none.
    const DeviceDigests* digests_of(const WriteExtent& row) const {
        if (row.device == on_host || !row.lazy || digested.empty()) return nullptr;
        return is_digestible(row) ? digested[static_cast<std::size_t>(row.device)] : nullptr;
    }

    bool keeps_places() const { return first_encoded() == rows.size(); }
    /// The first row of an encoded file; the number of rows, if there is none.
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
    std::uint64_t address = verify_only;  // of the extent's byte 0, or of the box's first element
    std::uint64_t chunk;    // index of chunk 0's digest
    std::uint64_t first;
    std::uint64_t last;
    std::int64_t layout = contiguous;  // or index into ReadExtents::layouts
    std::uint32_t file;
    std::int32_t device = on_host;  // the device in whose memory `address` is

    std::uint64_t end() const { return offset + length; }
    std::byte* target() const { return reinterpret_cast<std::byte*>(address); }
};

/// Where a chunk is stored. A chunk with codec_cast is not stored: `offset` is the index of the digest of its first
/// source chunk, and `length` a cast::Element.
struct ChunkPlace {
    std::uint64_t offset;
    std::uint32_t length;
    std::uint32_t file;
    std::uint8_t codec = codec_raw;
};

/// The base of a chunk with codec_xor.
struct ChunkBase {
    std::uint64_t chunk;        // index of the chunk's digest
    std::uint64_t data_digest;  // of the decoded data
    ChunkPlace place;
    std::uint64_t digest;       // of the base's stored bytes
};

/// Any order; extents may repeat.
struct ReadExtents {
    std::vector<ReadExtent> rows;
    std::vector<Layout> layouts;  // scatter
    std::vector<std::uint64_t> digests;
    std::vector<std::shared_ptr<Device>> devices = {};
    std::vector<ChunkPlace> stored = {};  // for each digest; empty: every chunk is at its logical place in its extent
    std::vector<ChunkBase> bases = {};  // ascending, for each chunk with codec_xor

    std::uint32_t data_bytes(const ReadExtent& row, std::uint64_t chunk) const {
        return static_cast<std::uint32_t>(std::min(chunk_bytes, row.length - chunk * chunk_bytes));
    }
    /// With codec_cast: the source chunk of half number `half` of the chunk.
    const ChunkPlace& source_of(const ChunkPlace& chunk, std::uint64_t half) const {
        return stored[chunk.offset + half];
    }
    ChunkPlace place_of(const ReadExtent& row, std::uint64_t chunk) const {
        if (!stored.empty()) return stored[row.chunk + chunk];
        const std::uint64_t skipped = chunk * chunk_bytes;
        return {row.offset + skipped, data_bytes(row, chunk), row.file};
    }
    /// The base of the stored chunk with that digest; null: it has no base.
    const ChunkBase* base_of(std::uint64_t stored_chunk) const {
        const auto is_before = [stored_chunk](const ChunkBase& one) { return one.chunk < stored_chunk; };
        const auto found = std::partition_point(bases.begin(), bases.end(), is_before);
        return found == bases.end() || found->chunk != stored_chunk ? nullptr : &*found;
    }
};

/// Check the invariants above and all indices, on which plans rely. Throws std::invalid_argument, naming the first bad
/// row. `file_bytes` are the planned sizes.
void check_extents(const WriteExtents& rows, std::span<const std::uint64_t> file_bytes);
void check_extents(const ReadExtents& rows, std::size_t file_count);

/// The numbers of the rows' files, in groups: files with parts of one chunk must be read together. Numbers ascend in
/// each group, and groups ascend by their first file.
std::vector<std::vector<std::uint32_t>> file_groups_of(const ReadExtents& rows);

}  // namespace flowstone
