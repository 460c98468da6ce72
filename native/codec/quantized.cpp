#include "codec/quantized.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#define INLINED [[gnu::always_inline]] inline

namespace flowstone::quantized {
namespace {

// The stored form: element type (u8), 0 (u8), elements of a block (u16), elements (u32); a float32 scale for each
// block; a code for each element: sign, 4 bits of exponent, 3 of mantissa, as float8_e4m3fn, never NaN.
constexpr std::size_t header_bytes = 8;
constexpr float code_max = 448;
constexpr float normal_min = 0x1p-6f;
constexpr float bound_share = 1 / 15.F;        // of itself: half a step is 1/16, rounding to 16 bits adds 1/512
constexpr float step_min = 0x1p-9f;
constexpr float floor_share = 1 / 220'000.F;  // of a block's largest element: a step is 1/229,376
constexpr float scale_min = 0x1p-100f;               // below, products are not exact

struct Header {
    std::uint8_t element;
    std::uint8_t zero;
    std::uint16_t block;
    std::uint32_t elements;
};
static_assert(sizeof(Header) == header_bytes);

std::size_t block_count(std::size_t elements, std::size_t block) { return (elements + block - 1) / block; }

// The code below has no tables and no branches, and only 32-bit values, so that compilers vectorise it.

INLINED std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

INLINED float magnitude_of(float value) { return std::bit_cast<float>(bits_of(value) & 0x7FFFFFFF); }

INLINED std::uint32_t chosen(bool condition, std::uint32_t yes, std::uint32_t no) {
    const std::uint32_t mask = 0U - static_cast<std::uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

/// A code's value, without the block's scale.
INLINED float value_of(std::uint32_t code) {
    const std::uint32_t magnitude = code & 0x7F;
    const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * step_min;
    const std::uint32_t normal = (magnitude + ((127 - 7) << 3)) << 20;
    return std::bit_cast<float>(chosen(magnitude < 8, bits_of(small), normal) | (code & 0x80) << 24);
}

/// The nearest code, ties to even; only zero gets a code of zero. `scaled` is at most `code_max`, apart from rounding.
INLINED std::uint32_t code_of(float scaled) {
    constexpr float steps = step_min * 0x1p23f;  // for a float of this size, the last bit is a step
    const std::uint32_t bits = bits_of(scaled), magnitude = bits & 0x7FFFFFFF;
    const std::uint32_t nearest = bits_of(std::bit_cast<float>(magnitude) + steps) - bits_of(steps);
    const std::uint32_t small =
        nearest | (static_cast<std::uint32_t>(nearest == 0) & static_cast<std::uint32_t>(magnitude != 0));
    const std::uint32_t rounded = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    const std::uint32_t normal = chosen(rounded < 0x7E, rounded, 0x7E);
    return chosen(magnitude < bits_of(normal_min), small, normal) | (bits >> 24 & 0x80);
}

INLINED float from_half(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
    const std::uint32_t magnitude = bits & 0x7FFF;
    if (magnitude >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    if (magnitude >= 0x0400) return std::bit_cast<float>(sign | (magnitude + ((127 - 15) << 10)) << 13);
    return std::bit_cast<float>(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
}

/// The nearest, ties to even. Finite values only.
INLINED std::uint16_t to_half(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude < bits_of(0x1p-14f))  // adding 0.5 rounds it to a step of subnormal numbers
        return static_cast<std::uint16_t>(sign | (bits_of(std::bit_cast<float>(magnitude) + 0.5F) - bits_of(0.5F)));
    return static_cast<std::uint16_t>(sign | (magnitude - ((127 - 15) << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

template <Element element> INLINED float load(const std::byte* at) {
    if constexpr (element == Element::float32) {
        float value;
        std::memcpy(&value, at, sizeof value);
        return value;
    } else {
        std::uint16_t bits;
        std::memcpy(&bits, at, sizeof bits);
        return element == Element::bfloat16 ? std::bit_cast<float>(std::uint32_t{bits} << 16) : from_half(bits);
    }
}

/// The same bits as a float of the element type has, once it is stored.
template <Element element> INLINED void store(std::byte* at, float value) {
    if constexpr (element == Element::float32) {
        std::memcpy(at, &value, sizeof value);
    } else {
        const std::uint32_t bits = bits_of(value);
        const std::uint16_t half = element == Element::bfloat16
            ? static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
            : to_half(value);
        std::memcpy(at, &half, sizeof half);
    }
}

template <Element element> INLINED float as_stored(float value) {
    std::array<std::byte, element_bytes(element)> stored;
    store<element>(stored.data(), value);
    return load<element>(stored.data());
}

/// Encode one block, and check the result of decoding. Returns false if the error bound does not hold.
template <Element element> INLINED bool encode_block(const std::byte* data, std::size_t elements, float& scale_at,
                                                     std::uint8_t* __restrict codes) {
    constexpr std::size_t width = element_bytes(element);
    std::uint32_t largest_bits = 0;
    for (std::size_t i = 0; i < elements; ++i) {
        const std::uint32_t magnitude = bits_of(load<element>(data + i * width)) & 0x7FFFFFFF;
        largest_bits = largest_bits < magnitude ? magnitude : largest_bits;
    }
    const float largest = std::bit_cast<float>(largest_bits);
    const float scale = scale_at = largest / code_max;
    if (largest_bits >= 0x7F800000) return false;  // not finite
    if (largest_bits == 0) {
        std::memset(codes, 0, elements);
        return true;
    }
    if (scale < scale_min) return false;
    const float inverse = 1 / scale;
    const std::uint32_t floor = bits_of(largest * floor_share);
    std::uint32_t off = 0;
    for (std::size_t i = 0; i < elements; ++i) {
        const float value = load<element>(data + i * width);
        const std::uint32_t code = code_of(value * inverse);
        codes[i] = static_cast<std::uint8_t>(code);
        const float decoded = as_stored<element>(value_of(code) * scale);
        // Bits of non-negative floats compare like their values.
        const std::uint32_t share = bits_of(magnitude_of(value) * bound_share);
        const std::uint32_t bound = chosen(share < floor, floor, share);
        off |= static_cast<std::uint32_t>(bits_of(magnitude_of(decoded - value)) > bound);
        off |= static_cast<std::uint32_t>((bits_of(decoded) << 1 == 0) != (bits_of(value) << 1 == 0));
    }
    return off == 0;
}

template <Element element> INLINED bool encode_blocks(const std::byte* data, std::size_t elements, std::size_t block,
                                                      std::byte* scales, std::uint8_t* codes) {
    for (std::size_t first = 0; first < elements; first += block) {
        float scale;
        if (!encode_block<element>(data + first * element_bytes(element), std::min(block, elements - first), scale,
                                   codes + first))
            return false;
        std::memcpy(scales + first / block * sizeof scale, &scale, sizeof scale);
    }
    return true;
}

template <Element element> INLINED void decode_blocks(const std::byte* scales, const std::uint8_t* codes,
                                                      std::size_t elements, std::size_t block, std::byte* data) {
    constexpr std::size_t width = element_bytes(element);
    for (std::size_t first = 0; first < elements; first += block) {
        float scale;
        std::memcpy(&scale, scales + first / block * sizeof scale, sizeof scale);
        const std::size_t end = std::min(first + block, elements);
        for (std::size_t i = first; i < end; ++i) store<element>(data + i * width, value_of(codes[i]) * scale);
    }
}

INLINED bool encode_all(const std::byte* data, std::size_t elements, Element element, std::size_t block,
                        std::byte* scales, std::uint8_t* codes) {
    if (element == Element::bfloat16) return encode_blocks<Element::bfloat16>(data, elements, block, scales, codes);
    if (element == Element::float16) return encode_blocks<Element::float16>(data, elements, block, scales, codes);
    return encode_blocks<Element::float32>(data, elements, block, scales, codes);
}

INLINED void decode_all(const std::byte* scales, const std::uint8_t* codes, std::size_t elements, Element element,
                        std::size_t block, std::byte* data) {
    if (element == Element::bfloat16) return decode_blocks<Element::bfloat16>(scales, codes, elements, block, data);
    if (element == Element::float16) return decode_blocks<Element::float16>(scales, codes, elements, block, data);
    return decode_blocks<Element::float32>(scales, codes, elements, block, data);
}

#if defined(__x86_64__)
bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2") != 0;
    return has;
}
// Without FMA, which rounds once less: both implementations must give the same bytes.
[[gnu::target("avx2")]] bool encode_avx2(const std::byte* data, std::size_t elements, Element element,
                                         std::size_t block, std::byte* scales, std::uint8_t* codes) {
    return encode_all(data, elements, element, block, scales, codes);
}
[[gnu::target("avx2")]] void decode_avx2(const std::byte* scales, const std::uint8_t* codes, std::size_t elements,
                                         Element element, std::size_t block, std::byte* data) {
    decode_all(scales, codes, elements, element, block, data);
}
#endif

}  // namespace

std::size_t encode(const std::byte* data, std::size_t bytes, Element element, std::size_t block, std::byte* room,
                   Way way) {
    const std::size_t elements = bytes / element_bytes(element),
                      scales_bytes = block_count(elements, block) * sizeof(float);
    const std::size_t length = header_bytes + scales_bytes + elements;
    if (bytes % element_bytes(element) != 0 || length >= bytes) return 0;
    const Header header{static_cast<std::uint8_t>(element), 0, static_cast<std::uint16_t>(block),
                        static_cast<std::uint32_t>(elements)};
    std::memcpy(room, &header, sizeof header);
    std::byte* const scales = room + header_bytes;
    auto* const codes = reinterpret_cast<std::uint8_t*>(scales + scales_bytes);
#if defined(__x86_64__)
    if (way == Way::best && has_avx2()) return encode_avx2(data, elements, element, block, scales, codes) ? length : 0;
#endif
    return encode_all(data, elements, element, block, scales, codes) ? length : 0;
}

bool decode(const std::byte* stored, std::size_t length, std::byte* data, std::size_t bytes, Way way) {
    Header header;
    if (length < header_bytes) return false;
    std::memcpy(&header, stored, sizeof header);
    if (!is_valid(header.element, header.block) || header.zero != 0) return false;
    const auto element = static_cast<Element>(header.element);
    const std::size_t elements = header.elements, scales_bytes = block_count(elements, header.block) * sizeof(float);
    if (elements * element_bytes(element) != bytes || header_bytes + scales_bytes + elements != length) return false;
    const std::byte* const scales = stored + header_bytes;
    const auto* const codes = reinterpret_cast<const std::uint8_t*>(scales + scales_bytes);
#if defined(__x86_64__)
    if (way == Way::best && has_avx2()) {
        decode_avx2(scales, codes, elements, element, header.block, data);
        return true;
    }
#endif
    decode_all(scales, codes, elements, element, header.block, data);
    return true;
}

}  // namespace flowstone::quantized
