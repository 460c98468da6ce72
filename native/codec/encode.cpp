#include "codec/encode.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "bounds.h"
#include "codec/digest.h"
#include "codec/planes.h"
#include "codec/quantized.h"

namespace flowstone {
namespace {

class Identity final : public Encoder {
public:
    bool is_identity() const override { return true; }
    ChunkEncoding encode(const CapturedChunk& chunk, std::byte*) const override {
        return {ChunkEncoding::Kind::stored, codec_raw, chunk.length};
    }
};

class Delta : public Encoder {
public:
    explicit Delta(BaseChunks base) : base_(std::move(base)) {}
    ChunkEncoding encode(const CapturedChunk& chunk, std::byte*) const override {
        return {has(chunk, codec_raw, chunk.digest) ? ChunkEncoding::Kind::same : ChunkEncoding::Kind::stored,
                codec_raw, chunk.length};
    }

protected:
    /// Whether the base's chunk, stored with that codec, has this digest of its stored bytes.
    bool has(const CapturedChunk& chunk, std::uint8_t codec, std::uint64_t digest) const {
        if (chunk.number >= base_.size() || !base_[chunk.number]) return false;
        return base_[chunk.number]->codec == codec && base_[chunk.number]->digest == digest;
    }
    bool has_encoded(const CapturedChunk& chunk) const {
        return chunk.number < base_.size() && base_[chunk.number] && base_[chunk.number]->codec != codec_raw;
    }

private:
    const BaseChunks base_;
};

class Planes : public Delta {
public:
    Planes(std::vector<std::uint8_t> widths, BaseChunks base, Near near)
        : Delta(std::move(base)), widths_(std::move(widths)), near_(std::move(near)) {
        for (const std::uint8_t width : widths_)
            if (width != 0 && !is_plane_width(width))
                throw std::invalid_argument("widths must be 1, 2, 4 or 8 bytes, or 0");
    }
    ChunkEncoding encode(const CapturedChunk& chunk, std::byte* room) const override {
        const ChunkEncoding unchanged = Delta::encode(chunk, room);
        const std::size_t width = chunk.number < widths_.size() ? widths_[chunk.number] : 0;
        if (unchanged.kind == ChunkEncoding::Kind::same || width == 0 || chunk.length % width != 0) return unchanged;
        if (near_.cache == nullptr || chunk.number >= near_.cache->size()) return encode_alone(chunk, width, room);
        CachedBase& base = (*near_.cache)[chunk.number];
        const std::lock_guard lock(base.mutex);
        if (const std::uint32_t length = encode_near(chunk, width, base, room))
            return {ChunkEncoding::Kind::stored, codec_xor, length};
        const ChunkEncoding alone = encode_alone(chunk, width, room);
        near_.cache->put(base, chunk.bytes, chunk.length, chunk.digest, alone.length);
        return alone;
    }

private:
    ChunkEncoding encode_alone(const CapturedChunk& chunk, std::size_t width, std::byte* room) const {
        const std::size_t length = planes_of(chunk.bytes, chunk.length, width, room);
        if (length == 0) return {ChunkEncoding::Kind::stored, codec_raw, chunk.length};
        const bool is_same = has_encoded(chunk) && has(chunk, codec_planes, xxh3_64(room, length));
        return {is_same ? ChunkEncoding::Kind::same : ChunkEncoding::Kind::stored, codec_planes,
                static_cast<std::uint32_t>(length)};
    }

    std::size_t planes_of(const std::byte* bytes, std::uint32_t length, std::size_t width, std::byte* room) const {
        return planes::encode(bytes, length, width, probe_.worthwhile(bytes, length, width), room);
    }

    /// Encode the chunk with the cached bytes as base. Returns the length; 0: there is no base, or the chunk should
    /// become a new base.
    std::uint32_t encode_near(const CapturedChunk& chunk, std::size_t width, CachedBase& base, std::byte* room) const {
        const auto& bases = near_.bases;
        const bool is_base = chunk.number < bases.size() && bases[chunk.number] && *bases[chunk.number] == base.digest;
        if (!is_base || base.bytes == nullptr || base.length != chunk.length) return 0;
        if (xxh3_64(base.bytes.get(), base.length) != base.digest)
            return 0;  // the cached bytes do not match their digest: the chunk becomes a new base
        std::byte* const left = room + planes::room_bytes(chunk_bytes);
        std::memcpy(left, chunk.bytes, chunk.length);
        xor_into(left, base.bytes.get(), chunk.length);
        const auto length = static_cast<std::uint32_t>(planes_of(left, chunk.length, width, room));
        if (length == 0 || length * near_part >= base.stored * (near_part - 1)) return 0;
        // The older a base, the longer the differences to it. A new base costs its stored length, minus that of a
        // difference. It is due once later differences have together exceeded the first one by that much (the
        // ski-rental rule).
        if (base.first == 0) base.first = length;
        base.more += length > base.first ? length - base.first : 0;
        return base.more > base.stored - base.first ? 0 : length;
    }

    static constexpr std::uint64_t near_part =
        16;  // a base must make a chunk's stored bytes shorter by at least this part (1/16)
    const std::vector<std::uint8_t> widths_;
    const Near near_;
    const planes::Probe probe_;
};

class Quantizing final : public Planes {
public:
    Quantizing(std::vector<Quantization> quantized, std::vector<std::uint8_t> widths, BaseChunks base, Near near)
        : Planes(std::move(widths), std::move(base), std::move(near)), quantized_(std::move(quantized)) {
        for (const Quantization& how : quantized_)
            if (how.block != 0 && !quantized::is_valid(how.element, how.block))
                throw std::invalid_argument("quantization has an unknown element or an invalid block length");
    }
    ChunkEncoding encode(const CapturedChunk& chunk, std::byte* room) const override {
        const Quantization how = chunk.number < quantized_.size() ? quantized_[chunk.number] : Quantization{};
        if (how.block == 0 || has(chunk, codec_raw, chunk.digest)) return Planes::encode(chunk, room);
        const std::size_t length =
            quantized::encode(chunk.bytes, chunk.length, static_cast<quantized::Element>(how.element), how.block, room);
        if (length == 0) return Planes::encode(chunk, room);
        const bool is_same = has_encoded(chunk) && has(chunk, codec_quantized, xxh3_64(room, length));
        return {is_same ? ChunkEncoding::Kind::same : ChunkEncoding::Kind::stored, codec_quantized,
                static_cast<std::uint32_t>(length)};
    }

private:
    const std::vector<Quantization> quantized_;
};

/// each(row, number of the chunk in the row, begin and end in the file)
template <class Each> void for_chunks(const WriteExtent& row, Each each) {
    for (std::uint64_t chunk = 0; chunk < chunk_count(row.length); ++chunk) {
        const std::uint64_t begin = row.offset + chunk * chunk_bytes;
        each(chunk, begin, std::min(begin + chunk_bytes, row.end()));
    }
}

/// The chunks of a window of complete chunks.
std::vector<CapturedChunk> captured_chunks(const WriteExtents& rows, const WriteWindow& window, std::byte* image,
                                           std::span<const std::uint64_t> digests) {
    std::vector<CapturedChunk> chunks;
    for (std::size_t i = window.first_row; i < window.last_row; ++i) {
        const WriteExtent& row = rows.rows[i];
        std::uint64_t begin = std::max(row.offset, window.begin);
        for (std::uint64_t chunk = (begin - row.offset) / chunk_bytes; begin < std::min(row.end(), window.end);
             ++chunk) {
            const std::uint64_t end = std::min(row.offset + (chunk + 1) * chunk_bytes, row.end());
            assert(begin == row.offset + chunk * chunk_bytes && end <= window.end);
            const std::uint64_t number = row.chunk + chunk;
            chunks.push_back(
                {number, image + (begin - window.begin), static_cast<std::uint32_t>(end - begin), digests[number]});
            begin = end;
        }
    }
    return chunks;
}

}  // namespace

std::shared_ptr<const Encoder> identity_encoder() { return std::make_shared<const Identity>(); }

std::shared_ptr<const Encoder> delta_encoder(BaseChunks base) { return std::make_shared<const Delta>(std::move(base)); }

std::shared_ptr<const Encoder> planes_encoder(std::vector<std::uint8_t> widths, BaseChunks base, Near near) {
    return std::make_shared<const Planes>(std::move(widths), std::move(base), std::move(near));
}

std::shared_ptr<const Encoder> quantizing_encoder(std::vector<Quantization> quantized, std::vector<std::uint8_t> widths,
                                                  BaseChunks base, Near near) {
    return std::make_shared<const Quantizing>(std::move(quantized), std::move(widths), std::move(base),
                                              std::move(near));
}

void check_encodable(const WriteExtents& rows) {
    const WriteExtent* before = nullptr;
    for (std::size_t i = rows.first_encoded(); i < rows.rows.size(); ++i) {
        const WriteExtent& row = rows.rows[i];
        if (row.chunk != no_digest) {
            before = &row;
            continue;
        }
        const bool whole = row.offset % block_alignment_bytes == 0 && row.length % block_alignment_bytes == 0;
        if (!whole || (before != nullptr && before->file == row.file))
            throw std::invalid_argument("row " + std::to_string(i) +
                                        ": with an encoder, rows without digests fill the first blocks of their file");
    }
}

std::vector<WriteWindow> plan_chunk_windows(const WriteExtents& rows, std::uint64_t window_bytes,
                                            std::uint64_t gap_bytes) {
    const std::uint64_t limit = std::max(window_bytes, chunk_bytes);
    std::vector<WriteWindow> windows;
    for (std::size_t i = rows.first_encoded(); i < rows.rows.size(); ++i) {
        const WriteExtent& row = rows.rows[i];
        if (row.chunk == no_digest) {
            for (std::uint64_t at = row.offset; at < row.end(); at += limit)
                windows.push_back({row.file, at, std::min(at + limit, row.end()), i, i + 1, row.lazy, false});
            continue;
        }
        const bool is_derived = row.derivation != Derivation::none;
        for_chunks(row, [&](std::uint64_t, std::uint64_t begin, std::uint64_t end) {
            WriteWindow* const open = windows.empty() || !windows.back().appended ? nullptr : &windows.back();
            if (open == nullptr || open->file != row.file || end - open->begin > limit ||
                begin - open->end > gap_bytes || open->derived != is_derived) {
                windows.push_back({row.file, begin, end, i, i + 1, row.lazy, true, is_derived});
                return;
            }
            open->end = end;
            open->last_row = i + 1;
            open->lazy = open->lazy && row.lazy;
        });
    }
    return windows;
}

std::vector<StoredChunk> planned_chunks(const WriteExtents& rows) {
    std::vector<StoredChunk> stored(rows.chunks);
    for (const WriteExtent& row : rows.rows)
        if (row.chunk != no_digest)
            for_chunks(row, [&](std::uint64_t chunk, std::uint64_t begin, std::uint64_t end) {
                stored[row.chunk + chunk] = {
                    begin, {ChunkEncoding::Kind::stored, codec_raw, static_cast<std::uint32_t>(end - begin)}, 0};
            });
    return stored;
}

Appender::Appender(const WriteExtents& rows, std::size_t files, const DerivedChunks* derived)
    : rows_(rows), derived_(derived), stored_(planned_chunks(rows)), ends_(files, 0) {
    const std::size_t first = rows.first_encoded();
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const WriteExtent& row = rows.rows[i];
        if (i < first || row.chunk == no_digest) ends_[row.file] = std::max(ends_[row.file], block_ceil(row.end()));
    }
}

Appender::Range Appender::append(const WriteWindow& window, std::byte* image, std::byte* room,
                                 std::span<std::uint64_t> digests) {
    const std::vector<CapturedChunk> chunks = captured_chunks(rows_, window, image, digests);
    std::uint64_t bytes = 0;
    for (const CapturedChunk& chunk : chunks) {
        const ChunkEncoding encoded = encode(chunk, room);
        stored_[chunk.number] = {bytes, encoded, chunk.digest};
        if (encoded.kind != ChunkEncoding::Kind::stored) continue;
        if (encoded.codec == codec_raw) {
            assert(encoded.length == chunk.length);
            std::memmove(image + bytes, chunk.bytes, encoded.length);
        } else {
            assert(encoded.length < chunk.length);
            digests[chunk.number] = xxh3_64(room, encoded.length);
            std::memcpy(image + bytes, room, encoded.length);
        }
        bytes += encoded.length;
    }
    std::memset(image + bytes, 0, block_ceil(bytes) - bytes);
    const Range range{take(window.file, block_ceil(bytes)), block_ceil(bytes)};
    for (const CapturedChunk& chunk : chunks) stored_[chunk.number].offset += range.offset;
    return range;
}

void Appender::leave_out(std::uint64_t chunk, std::uint8_t codec, std::uint64_t digest) {
    stored_[chunk] = {0, {ChunkEncoding::Kind::derived, codec, 0}, digest};
}

ChunkEncoding Appender::encode(const CapturedChunk& chunk, std::byte* room) const {
    if (derived_ != nullptr)
        if (const std::optional<std::uint8_t> codec = derived_->codec_of(chunk.number, chunk.digest))
            return {ChunkEncoding::Kind::derived, *codec, 0};
    return rows_.encoder->encode(chunk, room);
}

std::uint64_t Appender::take(std::uint32_t file, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t offset = ends_[file];
    ends_[file] += bytes;
    return offset;
}

std::vector<std::uint64_t> Appender::file_ends() const {
    const std::lock_guard lock(mutex_);
    return ends_;
}

}  // namespace flowstone
