#include "codec/cast.h"

#include <algorithm>
#include <bit>
#include <cstring>

#define INLINED [[gnu::always_inline]] inline

namespace flowstone::cast {
namespace {

// Without tables and branches, so that compilers vectorise it.

INLINED std::uint32_t chosen(bool condition, std::uint32_t yes, std::uint32_t no) {
    const std::uint32_t mask = 0U - static_cast<std::uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

INLINED std::uint32_t bfloat16_of(std::uint32_t bits) { return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; }

INLINED std::uint32_t float16_of(std::uint32_t bits) {
    constexpr std::uint32_t infinity = 0x7C00, bias = (127 - 15) << 10, normal_min = (127 - 14) << 23;
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    const std::uint32_t rounded = ((magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13) - bias;
    const std::uint32_t normal = chosen(rounded < infinity, rounded, infinity);
    // For a float near 1/2, the last bit is one step of the subnormal numbers.
    const std::uint32_t small =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(chosen(magnitude < normal_min, magnitude, 0)) + 0.5F) -
        std::bit_cast<std::uint32_t>(0.5F);
    return (bits >> 16 & 0x8000) | chosen(magnitude < normal_min, small, normal);
}

template <Element element> INLINED bool round_all(const std::byte* singles, std::size_t count, std::byte* out) {
    constexpr std::size_t batch = 1024;  // in the cache, aligned
    alignas(64) std::uint32_t bits[batch];
    alignas(64) std::uint16_t rounded[batch];
    std::uint32_t largest = 0;
    for (std::size_t at = 0; at < count; at += batch) {
        const std::size_t some = std::min(batch, count - at);
        std::memcpy(bits, singles + at * sizeof *bits, some * sizeof *bits);
        for (std::size_t i = 0; i < some; ++i) {
            largest = std::max(largest, bits[i] & 0x7FFFFFFF);
            rounded[i] =
                static_cast<std::uint16_t>(element == Element::bfloat16 ? bfloat16_of(bits[i]) : float16_of(bits[i]));
        }
        std::memcpy(out + at * sizeof *rounded, rounded, some * sizeof *rounded);
    }
    return largest <= 0x7F800000;
}

INLINED bool round_to(const std::byte* singles, std::size_t count, Element element, std::byte* out) {
    if (element == Element::bfloat16) return round_all<Element::bfloat16>(singles, count, out);
    return round_all<Element::float16>(singles, count, out);
}

#if defined(__x86_64__)
bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2") != 0;
    return has;
}
[[gnu::target("avx2")]] bool round_avx2(const std::byte* singles, std::size_t count, Element element, std::byte* out) {
    return round_to(singles, count, element, out);
}
#endif

}  // namespace

bool round(const std::byte* singles, std::size_t count, Element element, std::byte* out, Way way) {
#if defined(__x86_64__)
    if (way == Way::best && has_avx2()) return round_avx2(singles, count, element, out);
#else
    (void)way;
#endif
    return round_to(singles, count, element, out);
}

}  // namespace flowstone::cast
