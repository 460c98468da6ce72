// An order-0 entropy coder: range asymmetric numeral systems (Duda, 2013), with as many interleaved states as two vectors
// of the processor hold (Giesen, "Interleaved entropy coders", 2014). docs/FORMAT.md (Codecs) has the stored form.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowstone::rans {

// In the stored form: constants of the format.
inline constexpr std::size_t lanes = 32;             // symbol i belongs to state i mod lanes
inline constexpr std::uint32_t scale_bits = 12;      // frequencies add up to 2^scale_bits
inline constexpr std::uint32_t state_min = 1U << 15;  // after every symbol; also the first state of an encoder

/// scalar: the definition. best: what this processor does fastest, with the same bytes as result. avx2: what it would do without
/// AVX-512, where it has AVX2; for tests.
enum class Way : std::uint8_t { best, scalar, avx2 };

/// Encode `count` symbols to `out`, where they may take `room` bytes. Returns the length of the result; 0: it would be
/// longer, or all symbols are equal, and nothing is said about the content of `out`.
std::size_t encode(const std::byte* symbols, std::size_t count, std::byte* out, std::size_t room, Way way = Way::best);

/// Decode all of `coded` to `count` symbols. False: no encoder has written these bytes, and `symbols` are undefined.
/// Any bytes are safe: nothing is read or written beyond the two ranges.
bool decode(const std::byte* coded, std::size_t bytes, std::byte* symbols, std::size_t count, Way way = Way::best);

}  // namespace flowstone::rans
