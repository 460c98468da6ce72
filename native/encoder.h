// Encoding: what becomes of a chunk between its capture and its file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace flowstone {

inline constexpr std::uint8_t codec_raw = 0;

/// A whole chunk in a block, as it was captured.
struct CapturedChunk {
    std::uint64_t number;  // among the job's chunks
    std::byte* bytes;
    std::uint32_t length;
    std::uint64_t digest;  // of these bytes
};

/// What an encoder makes of a chunk.
/// stored  its first `length` bytes where it lay, which `codec` reads; as captured, if that is codec_raw
/// same    nothing is stored: the base's chunk of that number holds the same bytes
struct Encoded {
    enum class Kind : std::uint8_t { stored, same };
    Kind kind = Kind::stored;
    std::uint8_t codec = codec_raw;
    std::uint32_t length = 0;
};

/// How a chunk is stored: in its file, from `offset` on; nowhere, if it is the base's.
struct StoredChunk {
    std::uint64_t offset = 0;
    Encoded encoded;
};

/// Shared by a job's workers, which call it at the same time.
class Encoder {
public:
    virtual ~Encoder() = default;
    /// Whether chunks are stored as they are captured, where the plan has put them. Then `encode` is never called, and
    /// nobody pays for it. Else places are given as lengths become known, and windows hold whole chunks.
    virtual bool is_identity() const { return false; }
    /// Encode the chunks of one window in place: `encoded[i]` says what has become of `chunks[i]`, which grows no longer.
    /// `room` has chunk_bytes for the call. May throw std::bad_alloc, which fails the job.
    virtual void encode(std::span<const CapturedChunk> chunks, std::span<Encoded> encoded, std::byte* room) const = 0;
};

/// Chunks are stored as they are.
std::shared_ptr<const Encoder> identity_encoder();

}  // namespace flowstone
