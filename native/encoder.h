// Encoding: what is done to a chunk between its capture and its file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace flowstone {

inline constexpr std::uint8_t codec_raw = 0;

/// A whole chunk in a block, as captured.
struct CapturedChunk {
    std::uint64_t number;  // among the job's chunks
    std::byte* bytes;
    std::uint32_t length;
    std::uint64_t digest;  // of these bytes
};

/// The result of encoding a chunk.
/// stored  the first `length` bytes of its memory, which `codec` decodes; unchanged, if that is codec_raw
/// same    nothing is stored: the base's chunk of that number has the same bytes
struct Encoded {
    enum class Kind : std::uint8_t { stored, same };
    Kind kind = Kind::stored;
    std::uint8_t codec = codec_raw;
    std::uint32_t length = 0;
};

/// How a chunk is stored: in its file, from `offset` on; or not at all, if it is the base's.
struct StoredChunk {
    std::uint64_t offset = 0;
    Encoded encoded;
};

/// Shared by a job's workers, which call it concurrently.
class Encoder {
public:
    virtual ~Encoder() = default;
    /// Whether chunks are stored as captured, where the plan has put them. Then `encode` is never called, at no cost.
    /// Otherwise places are assigned as lengths become known, and windows hold whole chunks.
    virtual bool is_identity() const { return false; }
    /// Encode the chunks of one window in place: `encoded[i]` describes the result for `chunks[i]`, which may not grow.
    /// `room` has chunk_bytes, for use during the call. May throw std::bad_alloc, which fails the job.
    virtual void encode(std::span<const CapturedChunk> chunks, std::span<Encoded> encoded, std::byte* room) const = 0;
};

/// Stores chunks unchanged.
std::shared_ptr<const Encoder> identity_encoder();

/// Stores chunks unchanged, but for those of which the base has one with the same bytes.
/// digests  of the base's chunks, by number; nullopt: it has none with that number
std::shared_ptr<const Encoder> delta_encoder(std::vector<std::optional<std::uint64_t>> digests);

}  // namespace flowstone
