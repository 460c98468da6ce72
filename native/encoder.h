// Encoding: what is done to a chunk between its capture and its file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bounds.h"
#include "kept.h"

namespace flowstone {

inline constexpr std::uint8_t codec_raw = 0;
inline constexpr std::uint64_t encode_room_bytes = 3 * chunk_bytes;

/// A whole chunk in a block, as captured.
struct CapturedChunk {
    std::uint64_t number;  // among the job's chunks
    std::byte* bytes;
    std::uint32_t length;
    std::uint64_t digest;  // of these bytes
};

/// The result of encoding a chunk.
/// stored  `length` bytes: of the chunk, if `codec` is codec_raw; else of the room, fewer, and `codec` decodes them
/// same    nothing is stored: the base's chunk of that number has the same bytes
/// derived nothing is stored: it follows from other chunks of the job (derived.h)
struct Encoded {
    enum class Kind : std::uint8_t { stored, same, derived };
    Kind kind = Kind::stored;
    std::uint8_t codec = codec_raw;
    std::uint32_t length = 0;
};

/// How a chunk is stored: in its file, from `offset` on; or not at all, if it is the base's.
struct StoredChunk {
    std::uint64_t offset = 0;
    Encoded encoded;
    std::uint64_t captured_digest = 0;  // if an encoder got it
};

/// What the base has of a chunk: the digest of its bytes, as they were captured if `codec` is codec_raw.
struct BaseChunk {
    std::uint64_t digest = 0;
    std::uint8_t codec = codec_raw;
};
/// By the number of a chunk; nullopt: the base has none. Chunks beyond the end are not in the base either.
using BaseChunks = std::vector<std::optional<BaseChunk>>;

/// What chunks were, and which of them may be a base (codec_xor): those that lie in a file of the checkpoint.
/// kept   null: none may. Chunks that are stored by themselves are kept from then on
/// bases  by the number of a chunk, the digest of its base's data; nullopt: it has none. None beyond the end
struct Near {
    std::shared_ptr<KeptChunks> kept;
    std::vector<std::optional<std::uint64_t>> bases;
};

/// Shared by a job's workers, which call it concurrently.
class Encoder {
public:
    virtual ~Encoder() = default;
    /// Whether chunks are stored as captured, where the plan has put them. Then `encode` is never called, at no cost.
    /// Otherwise places are assigned as lengths become known, and windows hold whole chunks.
    virtual bool is_identity() const { return false; }
    /// Encode one chunk, which stays as it is. `room` has encode_room_bytes. May throw std::bad_alloc, which fails the
    /// job.
    virtual Encoded encode(const CapturedChunk& chunk, std::byte* room) const = 0;
};

/// Stores chunks unchanged.
std::shared_ptr<const Encoder> identity_encoder();

/// Stores chunks unchanged, but for those of which the base has one with the same bytes.
std::shared_ptr<const Encoder> delta_encoder(BaseChunks base);

/// The same, and codes those that are worth it (planes.h).
/// widths  length of a chunk's elements in bytes, by the chunk's number; 0: it is stored unchanged
/// near    chunks whose bytes were kept, to be coded with these as base where that is shorter
std::shared_ptr<const Encoder> planes_encoder(std::vector<std::uint8_t> widths, BaseChunks base, Near near = {});

/// How a chunk is quantized (quantized.h). block 0: it is not
struct Quantization {
    std::uint8_t element = 0;
    std::uint16_t block = 0;
};

/// The same, and quantizes some chunks, where the bound holds; those lose precision.
/// quantized  by the chunk's number
std::shared_ptr<const Encoder> quantizing_encoder(std::vector<Quantization> quantized, std::vector<std::uint8_t> widths, BaseChunks base,
                                                  Near near = {});

}  // namespace flowstone
