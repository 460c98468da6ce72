// Rounding float32 to 16 bits, as torch does. docs/FORMAT.md (Codecs, 4, `cast`) has the rule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bounds.h"

namespace flowstone {

/// The codec of chunks that are not stored: rounding float32 numbers elsewhere in the checkpoint gives their data.
inline constexpr std::uint8_t codec_cast = 4;

namespace cast {

enum class Element : std::uint8_t { bfloat16 = 2, float16 = 3 };
enum class Way : std::uint8_t { best, plain };

/// The part of a cast chunk that is rounded from one chunk of float32 numbers.
inline constexpr std::uint64_t half_bytes = chunk_bytes / 2;

inline bool is_element(std::uint32_t number) { return number == 2 || number == 3; }
/// The number of float32 chunks from which a cast chunk of `bytes` is rounded.
inline std::uint64_t half_count(std::uint64_t bytes) { return bytes > half_bytes ? 2 : 1; }

/// Round `count` numbers, at any alignment: to nearest, ties to even. Returns false if one of them is NaN, as its
/// rounding differs between processors.
bool round(const std::byte* singles, std::size_t count, Element element, std::byte* out, Way way = Way::best);

}  // namespace cast
}  // namespace flowstone
