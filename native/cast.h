// Rounding float32 to 16 bits, as torch does. docs/FORMAT.md (Codecs, 4, `cast`) has the rule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bounds.h"

namespace flowstone {

/// Nothing is stored of a chunk: it is what float32 numbers elsewhere in the checkpoint are rounded to.
inline constexpr std::uint8_t codec_cast = 4;

namespace cast {

enum class Element : std::uint8_t { bfloat16 = 2, float16 = 3 };
enum class Way : std::uint8_t { best, plain };

/// Of a cast chunk: what follows from one chunk of float32 numbers.
inline constexpr std::uint64_t half_bytes = chunk_bytes / 2;

inline bool is_element(std::uint32_t number) { return number == 2 || number == 3; }
/// How many chunks of float32 numbers a chunk of so many bytes is made from.
inline std::uint64_t half_count(std::uint64_t bytes) { return bytes > half_bytes ? 2 : 1; }

/// Round `count` numbers, at any alignment: to nearest, ties to even. False if one of them is NaN: what becomes of it differs
/// between processors.
bool round(const std::byte* singles, std::size_t count, Element element, std::byte* out, Way way = Way::best);

}  // namespace cast
}  // namespace flowstone
