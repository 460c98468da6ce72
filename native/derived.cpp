#include "derived.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>

#include "cast.h"
#include "digest.h"

namespace flowstone {
namespace {

constexpr std::size_t at(Derivation derivation) { return static_cast<std::size_t>(derivation); }
constexpr Derivation casts[] = {Derivation::bfloat16, Derivation::float16};

/// The rounded numbers of a chunk in two parts; false: a part ends within a number, or one is NaN.
bool round_parts(std::span<const std::byte> first, std::span<const std::byte> rest, Derivation derivation, std::byte* room) {
    constexpr std::size_t item = sizeof(float);
    if (first.size() % item != 0 || rest.size() % item != 0) return false;
    const auto element = static_cast<cast::Element>(derivation);
    const bool good = cast::round(first.data(), first.size() / item, element, room);
    return cast::round(rest.data(), rest.size() / item, element, room + first.size() / 2) && good;
}

}  // namespace

DerivedChunks::DerivedChunks(const WriteExtents& rows) {
    std::unordered_map<std::uint64_t, const WriteExtent*> found;
    for (const WriteExtent& row : rows.rows)
        if (row.chunk != no_digest && row.length != 0) found.emplace(row.chunk, &row);
    for (const WriteExtent& row : rows.rows) {
        if (row.derivation == Derivation::none) continue;
        const auto source = found.find(row.follows);
        if (source == found.end() || row.chunk == no_digest || row.file < rows.encoded_from)
            throw std::invalid_argument("a derived row is for the encoder, and follows from a row with digests");
        link(row, *source->second);
    }
}

void DerivedChunks::link(const WriteExtent& row, const WriteExtent& source) {
    const bool is_copy = row.derivation == Derivation::copy;
    if (source.derivation != Derivation::none || source.length != row.length * (is_copy ? 1 : 2) || (source.lazy && !row.lazy))
        throw std::invalid_argument("a derived row follows from one of its length, or twice that, which is captured no later and not derived");
    for (std::uint64_t chunk = 0; chunk < chunk_count(row.length); ++chunk) {
        const std::uint64_t bytes = std::min(chunk_bytes, row.length - chunk * chunk_bytes);
        links_[row.chunk + chunk] = {row.derivation, source.chunk + chunk * (is_copy ? 1 : 2), is_copy ? 1 : cast::half_count(bytes)};
    }
    for (std::uint64_t chunk = source.chunk; chunk < source.chunk + chunk_count(source.length); ++chunk) {
        std::unique_ptr<Source>& one = sources_[chunk];
        if (one == nullptr) one = std::make_unique<Source>();
        one->wanted[at(row.derivation)] = true;
    }
}

void DerivedChunks::note(std::uint64_t chunk, std::span<const std::byte> first, std::span<const std::byte> rest, std::uint64_t digest,
                         std::byte* room) {
    const auto found = sources_.find(chunk);
    if (found == sources_.end()) return;
    Source& source = *found->second;
    source.digest[at(Derivation::copy)] = digest;
    source.good[at(Derivation::copy)] = true;
    for (const Derivation derivation : casts) {
        if (!source.wanted[at(derivation)]) continue;
        source.good[at(derivation)] = round_parts(first, rest, derivation, room);
        source.digest[at(derivation)] = xxh3_64(room, (first.size() + rest.size()) / 2);
    }
    source.noted = true;
}

std::vector<std::uint64_t> DerivedChunks::sources_of(std::span<const std::uint64_t> chunks) const {
    std::vector<std::uint64_t> sources;
    for (const std::uint64_t chunk : chunks) {
        const auto found = links_.find(chunk);
        if (found == links_.end()) continue;
        for (std::uint64_t at = 0; at < found->second.sources; ++at) sources.push_back(found->second.source + at);
    }
    return sources;
}

bool DerivedChunks::are_noted(std::span<const std::uint64_t> sources) const {
    return std::all_of(sources.begin(), sources.end(), [this](std::uint64_t chunk) { return noted(chunk) != nullptr; });
}

const DerivedChunks::Source* DerivedChunks::noted(std::uint64_t chunk) const {
    const auto found = sources_.find(chunk);
    return found != sources_.end() && found->second->noted ? found->second.get() : nullptr;
}

std::optional<std::uint8_t> DerivedChunks::codec_of(const CapturedChunk& chunk) const {
    const auto found = links_.find(chunk.number);
    if (found == links_.end()) return std::nullopt;
    const Link& link = found->second;
    const bool is_copy = link.derivation == Derivation::copy;
    for (std::uint64_t half = 0; half < link.sources; ++half) {
        const Source* const source = noted(link.source + half);
        if (source == nullptr || !source->good[at(link.derivation)]) return std::nullopt;
        const std::uint64_t begin = half * cast::half_bytes;
        const std::uint64_t digest = is_copy ? chunk.digest : xxh3_64(chunk.bytes + begin, std::min(cast::half_bytes, chunk.length - begin));
        if (source->digest[at(link.derivation)] != digest) return std::nullopt;
    }
    return is_copy ? codec_raw : codec_cast;
}

}  // namespace flowstone
