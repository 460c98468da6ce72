// An order-0 entropy coder: range asymmetric numeral systems (Duda, 2013), with as many interleaved states as two
// vectors of the processor hold (Giesen, "Interleaved entropy coders", 2014). docs/FORMAT.md (Codecs) has the stored
// form.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowstone::rans {

// Constants of the format.
inline constexpr std::size_t lanes = 32;             // symbol i belongs to state i mod lanes
inline constexpr std::uint32_t scale_bits = 12;      // frequencies add up to 2^scale_bits
inline constexpr std::uint32_t state_min = 1U << 15;  // after every symbol; also the first state of an encoder

/// scalar: the reference implementation. best: the fastest one on this processor, with the same result. avx2: for
/// tests, the one without AVX-512, if the processor has AVX2.
enum class Way : std::uint8_t { best, scalar, avx2 };

/// Encode `count` symbols to `out`, a buffer of `room` bytes. Returns the length of the result; 0: it does not fit, or
/// all symbols are equal; `out` is then undefined.
std::size_t encode(const std::byte* symbols, std::size_t count, std::byte* out, std::size_t room, Way way = Way::best);

/// Decode all of `coded` to `count` symbols. Returns false if no encoder writes such bytes; `symbols` are then
/// undefined. Hostile input is safe: no byte outside of the two ranges is read or written.
bool decode(const std::byte* coded, std::size_t bytes, std::byte* symbols, std::size_t count, Way way = Way::best);

}  // namespace flowstone::rans
