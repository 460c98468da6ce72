// Chunks that a job need not store, as they follow from others of its chunks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "io_extents.h"

namespace flowstone {

/// Told of the chunks that others follow from, once these are captured; then says of those whether they do. What is compared
/// are digests of captured bytes, so that it holds for what the files have. Any thread.
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
    /// How a chunk follows from others, with its codec; nullopt: it does not, and is to be stored.
    std::optional<std::uint8_t> codec_of(const CapturedChunk& chunk) const;

private:
    /// What follows from a chunk, by Derivation: digests of the captured bytes, and of what they are rounded to.
    struct Source {
        bool wanted[4] = {};
        bool good[4] = {};
        std::uint64_t digest[4] = {};
        std::atomic<bool> noted{false};
    };
    struct Link {
        Derivation derivation = Derivation::none;
        std::uint64_t source = 0;  // the first chunk that it follows from
        std::uint64_t sources = 0;
    };

    void link(const WriteExtent& row, const WriteExtent& source);
    const Source* noted(std::uint64_t chunk) const;

    std::unordered_map<std::uint64_t, std::unique_ptr<Source>> sources_;
    std::unordered_map<std::uint64_t, Link> links_;
};

}  // namespace flowstone
