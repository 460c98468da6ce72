// Codec `planes`: bytes with the same position in their elements form a plane; each plane is stored raw, constant or
// entropy coded. docs/FORMAT.md (Codecs) has the stored form.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "codec/rans.h"

namespace flowstone {

inline constexpr std::uint8_t codec_planes = 1;
inline constexpr std::uint8_t codec_xor = 2;  // planes of data XORed with another chunk's data

/// data ^= other
void xor_into(std::byte* data, const std::byte* other, std::size_t bytes);

/// Whether `width` is a length of elements in bytes: 1, 2, 4 or 8.
bool is_plane_width(std::uint64_t width);

namespace planes {

using rans::Way;

/// The length of the buffer that `encode` needs for data of `bytes`.
constexpr std::uint64_t room_bytes(std::uint64_t bytes) { return 2 * bytes; }

/// Samples a few lines of a chunk, to estimate which planes are worth coding.
class Probe {
public:
    Probe();
    /// A bit mask of the planes that are worth coding. `data` has `bytes`, a multiple of `width`.
    std::uint32_t worthwhile(const std::byte* data, std::size_t bytes, std::size_t width) const;

private:
    static constexpr std::size_t elements_max = 1024;
    std::array<float, elements_max + 1> bits_of_;  // n log2 n
};

/// Encode `bytes` of elements of `width` into `room`, coding the planes in `chosen`. Returns the length of the result;
/// 0: it is no shorter than the data. `room` has room_bytes.
std::size_t encode(const std::byte* data, std::size_t bytes, std::size_t width, std::uint32_t chosen, std::byte* room,
                   Way way = Way::best);

/// Decode to exactly `bytes` of `data`. Returns false if no encoder writes such bytes; `data` is then unchanged. `room`
/// is a buffer of `bytes`. Hostile input is safe.
bool decode(const std::byte* stored, std::size_t length, std::byte* data, std::size_t bytes, std::byte* room,
            Way way = Way::best);

}  // namespace planes
}  // namespace flowstone
