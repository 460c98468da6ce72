// Chunks that a job need not store, as they follow from others of its chunks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "digest.h"
#include "io_extents.h"

namespace flowstone {

/// Told of the chunks that others follow from, once these are captured; then says what those have to be. What that is made of
/// are captured bytes, so that it holds for what the files have. A chunk that follows has the digest of what it is decoded to: it
/// is told by its own captured bytes, or by those that a device has digested. Any thread.
///
/// Windows of derived rows are begun once all that they follow from is captured: see `are_noted`.
class DerivedChunks {
public:
    /// Throws std::invalid_argument for a row that cannot follow from another one as it says.
    explicit DerivedChunks(const WriteExtents& rows);

    /// A chunk was captured: `first`, then `rest`. `room` has half a chunk, and is changed.
    void note(std::uint64_t chunk, std::span<const std::byte> first, std::span<const std::byte> rest, std::uint64_t digest, std::byte* room);
    /// The chunks that these follow from.
    std::vector<std::uint64_t> sources_of(std::span<const std::uint64_t> chunks) const;
    /// Whether these chunks, which others follow from, were noted.
    bool are_noted(std::span<const std::uint64_t> sources) const;
    /// How a chunk of that number and digest follows from others, with its codec; nullopt: it does not, and is to be stored.
    std::optional<std::uint8_t> codec_of(std::uint64_t chunk, std::uint64_t digest) const;

private:
    /// What one or two chunks are rounded to: the bytes of one chunk. Its halves come in any order.
    class Rounded {
    public:
        Rounded(Derivation derivation, std::uint64_t halves) : derivation(derivation), halves_(halves) {}
        /// `bytes`: of half number `half`; empty: it cannot be rounded.
        void add(std::uint64_t half, std::span<const std::byte> bytes);
        /// Once all halves were added; nullopt: it cannot be rounded.
        std::optional<std::uint64_t> digest() const { return is_good_ ? std::optional(digest_) : std::nullopt; }

        const Derivation derivation;

    private:
        void end(std::span<const std::byte> second);

        const std::uint64_t halves_;
        std::mutex mutex_;
        bool is_good_ = true;
        std::unique_ptr<Digester> first_;  // of the first half, until the second comes
        std::vector<std::byte> second_;    // until the first comes: only of two windows that meet there the later one may be faster
        std::uint64_t digest_ = 0;
    };
    struct Part {
        std::shared_ptr<Rounded> whole;
        std::uint64_t half;
    };
    /// A chunk that others follow from.
    struct Source {
        std::vector<Part> parts;   // what it is rounded to
        std::uint64_t digest = 0;  // of the captured bytes
        std::atomic<bool> noted{false};
    };
    struct Link {
        std::uint64_t source = 0;  // the first chunk that it follows from
        std::uint64_t sources = 0;
        std::shared_ptr<const Rounded> rounded;  // null: a copy
    };

    void link(const WriteExtent& row, const WriteExtent& source);
    std::shared_ptr<Rounded> rounded(Derivation derivation, std::uint64_t first, std::uint64_t halves);
    Source& source(std::uint64_t chunk);
    const Source* noted(std::uint64_t chunk) const;

    std::unordered_map<std::uint64_t, std::unique_ptr<Source>> sources_;
    std::unordered_map<std::uint64_t, Link> links_;
};

}  // namespace flowstone
