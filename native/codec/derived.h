// Derived chunks: a job need not store them, as they can be computed from its other chunks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "codec/digest.h"
#include "io/io_extents.h"

namespace flowstone {

/// Gets each source chunk once it is captured, and computes the digest that a chunk derived from it must have. If the
/// derived chunk's own digest, of its captured bytes or computed by a device, is equal, it need not be stored. Sources
/// are captured bytes, so the files contain them. Any thread.
///
/// Windows of derived rows begin once all their sources are captured: see `are_noted`.
class DerivedChunks {
public:
    /// Throws std::invalid_argument for a row that cannot be derived from the given source.
    explicit DerivedChunks(const WriteExtents& rows);

    /// Record a captured chunk: its bytes are `first`, then `rest`. `room`: a buffer of half a chunk.
    void note(std::uint64_t chunk, std::span<const std::byte> first, std::span<const std::byte> rest,
              std::uint64_t digest, std::byte* room);
    /// The source chunks of these chunks.
    std::vector<std::uint64_t> sources_of(std::span<const std::uint64_t> chunks) const;
    /// Whether all these source chunks were recorded by `note`.
    bool are_noted(std::span<const std::uint64_t> sources) const;
    /// The codec of a derived chunk with that number and digest; nullopt: it is not derived, and must be stored.
    std::optional<std::uint8_t> codec_of(std::uint64_t chunk, std::uint64_t digest) const;

private:
    /// The digest of the chunk that one or two source chunks are rounded to. Its halves are added in any order.
    class RoundedChunk {
    public:
        RoundedChunk(Derivation derivation, std::uint64_t halves) : derivation(derivation), halves_(halves) {}
        /// `bytes`: the rounded bytes of half number `half`; empty: it cannot be rounded.
        void add(std::uint64_t half, std::span<const std::byte> bytes);
        /// The digest, after all halves were added; nullopt: a half cannot be rounded.
        std::optional<std::uint64_t> digest() const { return is_good_ ? std::optional(digest_) : std::nullopt; }

        const Derivation derivation;

    private:
        void end(std::span<const std::byte> second);

        const std::uint64_t halves_;
        std::mutex mutex_;
        bool is_good_ = true;
        std::unique_ptr<Digester> first_;  // of the first half, until the second is added
        std::vector<std::byte> second_;  // kept until the first half is added: windows may be captured out of order
        std::uint64_t digest_ = 0;
    };
    struct Part {
        std::shared_ptr<RoundedChunk> whole;
        std::uint64_t half;
    };
    /// A source chunk.
    struct Source {
        std::vector<Part> parts;  // the chunks that are rounded from it
        std::uint64_t digest = 0;  // of the captured bytes
        std::atomic<bool> noted{false};
    };
    struct Link {
        std::uint64_t source = 0;  // its first source chunk
        std::uint64_t sources = 0;
        std::shared_ptr<const RoundedChunk> rounded;  // null: a copy
    };

    void link(const WriteExtent& row, const WriteExtent& source);
    std::shared_ptr<RoundedChunk> rounded(Derivation derivation, std::uint64_t first, std::uint64_t halves);
    Source& source(std::uint64_t chunk);
    const Source* noted(std::uint64_t chunk) const;

    std::unordered_map<std::uint64_t, std::unique_ptr<Source>> sources_;
    std::unordered_map<std::uint64_t, Link> links_;
};

}  // namespace flowstone
