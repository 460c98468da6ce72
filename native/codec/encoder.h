// Encoders: how chunks are encoded between capture and file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bounds.h"
#include "codec/base_cache.h"

namespace flowstone {

inline constexpr std::uint8_t codec_raw = 0;
inline constexpr std::uint64_t encode_room_bytes = 3 * chunk_bytes;

/// A complete captured chunk in a block.
struct CapturedChunk {
    std::uint64_t number;  // among the job's chunks
    std::byte* bytes;
    std::uint32_t length;
    std::uint64_t digest;  // of these bytes
};

/// The result of encoding a chunk.
/// stored  `length` bytes are stored: of the chunk, if `codec` is codec_raw; otherwise of the room, which has fewer
///         bytes, and `codec` decodes them
/// same    no byte is stored: the base's chunk of that number is equal
/// derived no byte is stored: the chunk is derived from other chunks of the job (derived.h)
struct ChunkEncoding {
    enum class Kind : std::uint8_t { stored, same, derived };
    Kind kind = Kind::stored;
    std::uint8_t codec = codec_raw;
    std::uint32_t length = 0;
};

/// How a chunk is stored: in its file, at `offset`; or not at all, if it equals the base's.
struct StoredChunk {
    std::uint64_t offset = 0;
    ChunkEncoding encoded;
    std::uint64_t captured_digest = 0;  // set if it was encoded
};

/// The base's chunk: its digest, of the data if `codec` is codec_raw, otherwise of the stored bytes.
struct BaseChunk {
    std::uint64_t digest = 0;
    std::uint8_t codec = codec_raw;
};
/// By the number of a chunk; nullopt: the base lacks the chunk. The base also lacks chunks beyond the end.
using BaseChunks = std::vector<std::optional<BaseChunk>>;

/// Earlier contents of chunks, and which of them may be a base (codec_xor): contents that are in a file of the
/// checkpoint.
/// cache  null: there are none. Chunks stored without a base are added to it
/// bases  by the number of a chunk, the digest of its base's data; nullopt, and beyond the end: no base
struct Near {
    std::shared_ptr<BaseCache> cache;
    std::vector<std::optional<std::uint64_t>> bases;
};

/// Shared by a job's workers, which call it concurrently.
class Encoder {
public:
    virtual ~Encoder() = default;
    /// Whether chunks are stored unchanged, in their planned places. Then `encode` is never called. Otherwise places
    /// are assigned as lengths become known, and windows hold complete chunks.
    virtual bool is_identity() const { return false; }
    /// Encode one chunk, without changing it. `room` has encode_room_bytes. May throw std::bad_alloc, which fails the
    /// job.
    virtual ChunkEncoding encode(const CapturedChunk& chunk, std::byte* room) const = 0;
};

/// Stores chunks unchanged.
std::shared_ptr<const Encoder> identity_encoder();

/// Leaves out chunks that equal the base's, and stores other chunks unchanged.
std::shared_ptr<const Encoder> delta_encoder(BaseChunks base);

/// Like delta_encoder, but also encodes chunks by byte planes if that makes them shorter (planes.h).
/// widths  length of a chunk's elements in bytes, by the chunk's number; 0: it is stored unchanged
/// near    cached contents of chunks, which serve as bases if the result is shorter
std::shared_ptr<const Encoder> planes_encoder(std::vector<std::uint8_t> widths, BaseChunks base, Near near = {});

/// How a chunk is quantized (quantized.h). block 0: it is not quantized
struct Quantization {
    std::uint8_t element = 0;
    std::uint16_t block = 0;
};

/// Like planes_encoder, but also quantizes some chunks, with a loss of precision, if the error bound holds.
/// quantized  by the chunk's number
std::shared_ptr<const Encoder> quantizing_encoder(std::vector<Quantization> quantized, std::vector<std::uint8_t> widths,
                                                  BaseChunks base, Near near = {});

}  // namespace flowstone
