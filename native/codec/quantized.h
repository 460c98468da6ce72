// Codec `quantized`: floating-point elements to 8 bits, with a scale for each block of them. Not lossless.
// docs/FORMAT.md (Codecs) has the stored form.
#pragma once

#include <cstddef>
#include <cstdint>
#include "codec/rans.h"

namespace flowstone {

inline constexpr std::uint8_t codec_quantized = 3;

namespace quantized {

using rans::Way;

/// The types of elements.
enum class Element : std::uint8_t { float32 = 0, bfloat16 = 1, float16 = 2 };

inline constexpr std::size_t block_elements_min = 16;
inline constexpr std::size_t block_elements_max = 4096;

constexpr std::size_t element_bytes(Element element) { return element == Element::float32 ? 4 : 2; }

/// Whether chunks can be quantized with these parameters. element: a number of Element; block: elements that share a
/// scale
constexpr bool is_valid(std::uint8_t element, std::size_t block) {
    return element <= static_cast<std::uint8_t>(Element::float16) && block >= block_elements_min &&
        block <= block_elements_max;
}

/// Encode `bytes` of elements into `room`, which has as many. The error of an element is at most 1/15 of the element,
/// or 1/220,000 of the largest element of its block, whichever is more; zero stays zero, and no other element becomes
/// zero. Returns the length of the result; 0: the bound cannot be kept (an element is not finite, a block is nearly
/// zero, the element type is too coarse), or the result is no shorter.
/// block  elements that share a scale
std::size_t encode(const std::byte* data, std::size_t bytes, Element element, std::size_t block, std::byte* room,
                   Way way = Way::best);

/// Decode to exactly `bytes` of `data`. Returns false if no encoder writes such bytes. Hostile input is safe.
bool decode(const std::byte* stored, std::size_t length, std::byte* data, std::size_t bytes, Way way = Way::best);

}  // namespace quantized
}  // namespace flowstone
