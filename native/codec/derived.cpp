#include "codec/derived.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>

#include "codec/cast.h"
#include "codec/digest.h"

namespace flowstone {
namespace {

/// The rounded numbers of a chunk that is in two parts; empty: a part ends within a number, or one number is NaN.
std::span<const std::byte> round_parts(std::span<const std::byte> first, std::span<const std::byte> rest,
                                       Derivation derivation, std::byte* room) {
    constexpr std::size_t item = sizeof(float);
    if (first.size() % item != 0 || rest.size() % item != 0) return {};
    const auto element = static_cast<cast::Element>(derivation);
    if (!cast::round(first.data(), first.size() / item, element, room)) return {};
    if (!cast::round(rest.data(), rest.size() / item, element, room + first.size() / 2)) return {};
    return {room, (first.size() + rest.size()) / 2};
}

}  // namespace

void DerivedChunks::RoundedChunk::add(std::uint64_t half, std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    is_good_ = is_good_ && !bytes.empty();
    if (!is_good_) {
        first_.reset();
        second_ = {};
    } else if (halves_ == 1) {
        digest_ = xxh3_64(bytes.data(), bytes.size());
    } else if (half == 0) {
        first_ = std::make_unique<Digester>();
        first_->update(bytes.data(), bytes.size());
        if (!second_.empty()) end(second_);
    } else if (first_ != nullptr) {
        end(bytes);
    } else {
        second_.assign(bytes.begin(), bytes.end());
    }
}

void DerivedChunks::RoundedChunk::end(std::span<const std::byte> second) {
    first_->update(second.data(), second.size());
    digest_ = first_->value();
    first_.reset();
    second_ = {};
}

DerivedChunks::DerivedChunks(const WriteExtents& rows) {
    std::unordered_map<std::uint64_t, const WriteExtent*> found;
    for (const WriteExtent& row : rows.rows)
        if (row.chunk != no_digest && row.length != 0) found.emplace(row.chunk, &row);
    for (const WriteExtent& row : rows.rows) {
        if (row.derivation == Derivation::none) continue;
        const auto source = found.find(row.follows);
        if (source == found.end() || row.chunk == no_digest || row.file < rows.encoded_from)
            throw std::invalid_argument("a derived row must be encoded, and derive from a row with digests");
        link(row, *source->second);
    }
}

void DerivedChunks::link(const WriteExtent& row, const WriteExtent& source) {
    const bool is_copy = row.derivation == Derivation::copy;
    if (source.derivation != Derivation::none || source.length != row.length * (is_copy ? 1 : 2) ||
        (source.lazy && !row.lazy))
        throw std::invalid_argument(
            "a derived row follows from one of its length, or twice that, which is captured no later and not derived");
    for (std::uint64_t chunk = 0; chunk < chunk_count(row.length); ++chunk) {
        const std::uint64_t bytes = std::min(chunk_bytes, row.length - chunk * chunk_bytes);
        const std::uint64_t first = source.chunk + chunk * (is_copy ? 1 : 2),
                            halves = is_copy ? 1 : cast::half_count(bytes);
        links_[row.chunk + chunk] = {first, halves, is_copy ? nullptr : rounded(row.derivation, first, halves)};
        (void)this->source(first);
    }
}

/// Several rows may be rounded from one source in the same way: they share the rounded chunks.
std::shared_ptr<DerivedChunks::RoundedChunk> DerivedChunks::rounded(Derivation derivation, std::uint64_t first,
                                                                    std::uint64_t halves) {
    for (const Part& part : source(first).parts)
        if (part.whole->derivation == derivation) return part.whole;
    auto made = std::make_shared<RoundedChunk>(derivation, halves);
    for (std::uint64_t half = 0; half < halves; ++half) source(first + half).parts.push_back({made, half});
    return made;
}

DerivedChunks::Source& DerivedChunks::source(std::uint64_t chunk) {
    std::unique_ptr<Source>& one = sources_[chunk];
    if (one == nullptr) one = std::make_unique<Source>();
    return *one;
}

void DerivedChunks::note(std::uint64_t chunk, std::span<const std::byte> first, std::span<const std::byte> rest,
                         std::uint64_t digest, std::byte* room) {
    const auto found = sources_.find(chunk);
    if (found == sources_.end()) return;
    Source& source = *found->second;
    source.digest = digest;
    for (const Part& part : source.parts)
        part.whole->add(part.half, round_parts(first, rest, part.whole->derivation, room));
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

std::optional<std::uint8_t> DerivedChunks::codec_of(std::uint64_t chunk, std::uint64_t digest) const {
    const auto found = links_.find(chunk);
    if (found == links_.end()) return std::nullopt;
    const Link& link = found->second;
    for (std::uint64_t at = 0; at < link.sources; ++at)
        if (noted(link.source + at) == nullptr) return std::nullopt;
    const std::optional<std::uint64_t> expected =
        link.rounded == nullptr ? noted(link.source)->digest : link.rounded->digest();
    if (expected != digest) return std::nullopt;
    return link.rounded == nullptr ? codec_raw : codec_cast;
}

}  // namespace flowstone
