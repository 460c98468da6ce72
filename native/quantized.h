// Codec `quantized`: floating-point elements to 8 bits, with a scale for each block of them. Not lossless.
// docs/FORMAT.md (Codecs) has the stored form.
#pragma once

#include <cstddef>
#include <cstdint>
#include "rans.h"

namespace flowstone {

inline constexpr std::uint8_t codec_quantized = 3;

namespace quantized {

using rans::Way;

/// What elements may be.
enum class Element : std::uint8_t { float32 = 0, bfloat16 = 1, float16 = 2 };

inline constexpr std::size_t block_elements_min = 16;
inline constexpr std::size_t block_elements_max = 4096;

constexpr std::size_t element_bytes(Element element) { return element == Element::float32 ? 4 : 2; }

/// Whether chunks can be quantized like that. element: one of Element; block: elements that share a scale
constexpr bool is_valid(std::uint8_t element, std::size_t block) {
    return element <= static_cast<std::uint8_t>(Element::float16) && block >= block_elements_min && block <= block_elements_max;
}

/// Encode `bytes` of elements into `room`, which has as many. Each is off by at most 1/15 of itself, or by 1/220,000 of
/// the largest of its block, whichever is more; zero stays zero, and nothing else becomes zero. Returns the length of
/// the result; 0: that cannot be held (an element is not finite, a block is next to zero, the element type cannot say
/// it), or the result is no shorter.
/// block  elements that share a scale
std::size_t encode(const std::byte* data, std::size_t bytes, Element element, std::size_t block, std::byte* room, Way way = Way::best);

/// Decode to exactly `bytes` of `data`. False: no encoder has written this. Any stored bytes are safe.
bool decode(const std::byte* stored, std::size_t length, std::byte* data, std::size_t bytes, Way way = Way::best);

}  // namespace quantized
}  // namespace flowstone
