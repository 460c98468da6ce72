#include "codec/planes.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>

#include "bounds.h"

#if defined(__x86_64__)
#include <immintrin.h>
// GCC 12 takes the undefined operands of its own intrinsics for uninitialized variables (PR 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define FLOWSTONE_VBMI_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi")))
#endif

namespace flowstone {

void xor_into(std::byte* data, const std::byte* other, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) data[i] ^= other[i];
}

bool is_plane_width(std::uint64_t width) { return width == 1 || width == 2 || width == 4 || width == 8; }

namespace planes {
namespace {

constexpr std::size_t width_max = 8;
enum class Mode : std::uint8_t { raw, constant, coded };

template <class Byte> using Planes = std::array<Byte*, width_max>;

// Loops over dense arrays, which compilers turn into shuffles.

template <std::size_t width>
inline void split_from(const std::byte* data, std::size_t begin, std::size_t end, const Planes<std::byte>& planes) {
    for (std::size_t i = begin; i < end; ++i)
        for (std::size_t p = 0; p < width; ++p) planes[p][i] = data[i * width + p];
}

template <std::size_t width>
inline void merge_from(const Planes<const std::byte>& planes, std::size_t begin, std::size_t end, std::byte* data) {
    for (std::size_t i = begin; i < end; ++i)
        for (std::size_t p = 0; p < width; ++p) data[i * width + p] = planes[p][i];
}

#if defined(__x86_64__)

bool has_vbmi() {
    static const bool found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi");
    return found;
}

constexpr std::size_t vector_bytes = 64;

/// For vpermb: byte p * (64 / width) + i of the result is byte i * width + p, and back.
template <std::size_t width> struct Orders {
    alignas(vector_bytes) std::array<std::uint8_t, vector_bytes> apart{}, together{};
    constexpr Orders() {
        constexpr std::size_t elements = vector_bytes / width;
        for (std::size_t i = 0; i < elements; ++i)
            for (std::size_t p = 0; p < width; ++p) {
                apart[p * elements + i] = static_cast<std::uint8_t>(i * width + p);
                together[i * width + p] = static_cast<std::uint8_t>(p * elements + i);
            }
    }
};
template <std::size_t width> inline constexpr Orders<width> orders{};

template <class Byte> FLOWSTONE_VBMI_TARGET inline __m512i load(Byte* bytes) { return _mm512_loadu_si512(bytes); }

/// Split elements [0, the result), a multiple of 64: first separate the planes in each vector, then store the parts of
/// vectors in their planes.
template <std::size_t width> FLOWSTONE_VBMI_TARGET std::size_t split_vbmi(const std::byte* data, std::size_t count,
                                                                          const Planes<std::byte>& planes) {
    const __m512i order = _mm512_load_si512(orders<width>.apart.data());
    std::size_t i = 0;
    for (; i + vector_bytes <= count; i += vector_bytes) {
        __m512i parts[width];
        for (std::size_t v = 0; v < width; ++v)
            parts[v] = _mm512_permutexvar_epi8(order, load(data + i * width + v * vector_bytes));
        if constexpr (width == 2) {
            _mm512_storeu_si512(planes[0] + i, _mm512_shuffle_i64x2(parts[0], parts[1], 0x44));
            _mm512_storeu_si512(planes[1] + i, _mm512_shuffle_i64x2(parts[0], parts[1], 0xEE));
        } else {
            static_assert(width == 4);
            const __m512i low01 = _mm512_shuffle_i64x2(parts[0], parts[1], 0x44),
                          low23 = _mm512_shuffle_i64x2(parts[2], parts[3], 0x44);
            const __m512i high01 = _mm512_shuffle_i64x2(parts[0], parts[1], 0xEE),
                          high23 = _mm512_shuffle_i64x2(parts[2], parts[3], 0xEE);
            _mm512_storeu_si512(planes[0] + i, _mm512_shuffle_i64x2(low01, low23, 0x88));
            _mm512_storeu_si512(planes[1] + i, _mm512_shuffle_i64x2(low01, low23, 0xDD));
            _mm512_storeu_si512(planes[2] + i, _mm512_shuffle_i64x2(high01, high23, 0x88));
            _mm512_storeu_si512(planes[3] + i, _mm512_shuffle_i64x2(high01, high23, 0xDD));
        }
    }
    return i;
}

/// The reverse.
template <std::size_t width> FLOWSTONE_VBMI_TARGET std::size_t merge_vbmi(const Planes<const std::byte>& planes,
                                                                          std::size_t count, std::byte* data) {
    const __m512i order = _mm512_load_si512(orders<width>.together.data());
    std::size_t i = 0;
    for (; i + vector_bytes <= count; i += vector_bytes) {
        __m512i parts[width];
        if constexpr (width == 2) {
            const __m512i a = load(planes[0] + i), b = load(planes[1] + i);
            parts[0] = _mm512_shuffle_i64x2(a, b, 0x44);
            parts[1] = _mm512_shuffle_i64x2(a, b, 0xEE);
        } else {
            static_assert(width == 4);
            const __m512i a = load(planes[0] + i), b = load(planes[1] + i), c = load(planes[2] + i),
                          d = load(planes[3] + i);
            const __m512i low_ab = _mm512_shuffle_i64x2(a, b, 0x44), low_cd = _mm512_shuffle_i64x2(c, d, 0x44);
            const __m512i high_ab = _mm512_shuffle_i64x2(a, b, 0xEE), high_cd = _mm512_shuffle_i64x2(c, d, 0xEE);
            parts[0] = _mm512_shuffle_i64x2(low_ab, low_cd, 0x88);
            parts[1] = _mm512_shuffle_i64x2(low_ab, low_cd, 0xDD);
            parts[2] = _mm512_shuffle_i64x2(high_ab, high_cd, 0x88);
            parts[3] = _mm512_shuffle_i64x2(high_ab, high_cd, 0xDD);
        }
        for (std::size_t v = 0; v < width; ++v)
            _mm512_storeu_si512(data + i * width + v * vector_bytes, _mm512_permutexvar_epi8(order, parts[v]));
    }
    return i;
}

#endif

template <std::size_t width>
void split_as(const std::byte* data, std::size_t count, const Planes<std::byte>& planes, Way way) {
    std::size_t done = 0;
#if defined(__x86_64__)
    if constexpr (width == 2 || width == 4)
        if (way == Way::best && has_vbmi()) done = split_vbmi<width>(data, count, planes);
#endif
    static_cast<void>(way);
    split_from<width>(data, done, count, planes);
}

template <std::size_t width>
void merge_as(const Planes<const std::byte>& planes, std::size_t count, std::byte* data, Way way) {
    std::size_t done = 0;
#if defined(__x86_64__)
    if constexpr (width == 2 || width == 4)
        if (way == Way::best && has_vbmi()) done = merge_vbmi<width>(planes, count, data);
#endif
    static_cast<void>(way);
    merge_from<width>(planes, done, count, data);
}

void split(const std::byte* data, std::size_t count, std::size_t width, const Planes<std::byte>& planes, Way way) {
    switch (width) {
        case 1: return split_as<1>(data, count, planes, way);
        case 2: return split_as<2>(data, count, planes, way);
        case 4: return split_as<4>(data, count, planes, way);
        default: return split_as<8>(data, count, planes, way);
    }
}

void merge(const Planes<const std::byte>& planes, std::size_t count, std::size_t width, std::byte* data, Way way) {
    switch (width) {
        case 1: return merge_as<1>(planes, count, data, way);
        case 2: return merge_as<2>(planes, count, data, way);
        case 4: return merge_as<4>(planes, count, data, way);
        default: return merge_as<8>(planes, count, data, way);
    }
}

bool is_constant(const std::byte* plane, std::size_t count) { return std::memcmp(plane, plane + 1, count - 1) == 0; }

/// Append a plane that was chosen for coding. Returns the length; 0: the coded plane is no shorter, or does not fit.
std::size_t append_chosen(const std::byte* plane, std::size_t count, std::byte* out, std::size_t room, Mode& mode,
                          Way way) {
    if (room == 0) return 0;
    if (is_constant(plane, count)) {
        mode = Mode::constant;
        *out = *plane;
        return 1;
    }
    mode = Mode::coded;
    room = std::min(room, count);
    std::uint32_t length = 0;
    if (room <= sizeof(length)) return 0;
    length = static_cast<std::uint32_t>(rans::encode(plane, count, out + sizeof(length), room - sizeof(length), way));
    std::memcpy(out, &length, sizeof(length));
    return length == 0 ? 0 : sizeof(length) + length;
}

// A plane is coded if its symbols have at most this many bits on average: less than a tenth of its length would not be
// worth the time. (Estimates from 1024 symbols are up to 0.18 too low.)
constexpr double paying_bits_max = 7.1;

}  // namespace

Probe::Probe() {
    bits_of_[0] = 0;
    for (std::size_t n = 1; n <= elements_max; ++n)
        bits_of_[n] = static_cast<float>(static_cast<double>(n) * std::log2(static_cast<double>(n)));
}

std::uint32_t Probe::worthwhile(const std::byte* data, std::size_t bytes, std::size_t width) const {
    constexpr std::size_t runs = 32;
    const std::size_t count = bytes / width, looked_at = std::min(count, elements_max);
    const std::size_t run = (looked_at + runs - 1) / runs, distance = count / runs;
    std::array<std::array<std::uint16_t, 256>, width_max> counts{};
    std::size_t total = 0;
    for (std::size_t r = 0; r < runs; ++r)
        for (std::size_t i = r * distance; i < std::min(count, r * distance + run); ++i, ++total)
            for (std::size_t p = 0; p < width; ++p) ++counts[p][static_cast<std::size_t>(data[i * width + p])];
    std::uint32_t chosen = 0;
    for (std::size_t p = 0; p < width && total != 0; ++p) {
        double same = 0;
        for (const std::uint16_t n : counts[p]) same += static_cast<double>(bits_of_[n]);
        const double bits = std::log2(static_cast<double>(total)) - same / static_cast<double>(total);
        if (bits <= paying_bits_max) chosen |= 1U << p;
    }
    return chosen;
}

/// [width][a mode for each plane][raw planes][constant and coded planes]. Raw planes are split directly into the
/// result, other planes into the buffer after the result.
std::size_t encode(const std::byte* data, std::size_t bytes, std::size_t width, std::uint32_t chosen, std::byte* room,
                   Way way) {
    assert(is_plane_width(width) && bytes % width == 0);
    const std::size_t count = bytes / width;
    if (bytes <= 1 + width || (chosen & ((1U << width) - 1)) == 0) return 0;
    std::array<Mode, width_max> modes{};
    Planes<std::byte> planes{};
    std::size_t end = 1 + width;
    std::byte* apart = room + bytes;
    for (std::size_t p = 0; p < width; ++p) {
        std::byte*& to = (chosen >> p & 1) != 0 ? apart : planes[p];
        if (&to == &apart) {
            planes[p] = apart;
            apart += count;
            continue;
        }
        if (end + count > bytes) return 0;
        planes[p] = room + end;
        end += count;
    }
    split(data, count, width, planes, way);
    for (std::size_t p = 0; p < width; ++p) {
        if ((chosen >> p & 1) == 0) continue;
        const std::size_t added = append_chosen(planes[p], count, room + end, bytes - end, modes[p], way);
        if (added == 0) return encode(data, bytes, width, chosen & ~(1U << p), room, way);
        end += added;
    }
    if (end >= bytes) return 0;
    room[0] = static_cast<std::byte>(width);
    for (std::size_t p = 0; p < width; ++p) room[1 + p] = static_cast<std::byte>(modes[p]);
    return end;
}

bool decode(const std::byte* stored, std::size_t length, std::byte* data, std::size_t bytes, std::byte* room, Way way) {
    if (length == 0 || bytes == 0) return false;
    const auto width = static_cast<std::size_t>(stored[0]);
    if (!is_plane_width(width) || bytes % width != 0 || length < 1 + width) return false;
    const std::size_t count = bytes / width;
    Planes<const std::byte> planes{};
    std::size_t at = 1 + width;
    for (std::size_t p = 0; p < width; ++p) {
        if (stored[1 + p] > static_cast<std::byte>(Mode::coded)) return false;
        if (stored[1 + p] != static_cast<std::byte>(Mode::raw)) continue;
        if (length - at < count) return false;
        planes[p] = stored + at;
        at += count;
    }
    for (std::size_t p = 0; p < width; ++p) {
        if (planes[p] != nullptr) continue;
        std::byte* const plane = room + p * count;
        planes[p] = plane;
        if (stored[1 + p] == static_cast<std::byte>(Mode::constant)) {
            if (at == length) return false;
            std::memset(plane, static_cast<int>(stored[at++]), count);
            continue;
        }
        std::uint32_t coded;
        if (length - at < sizeof(coded)) return false;
        std::memcpy(&coded, stored + at, sizeof(coded));
        at += sizeof(coded);
        if (length - at < coded || !rans::decode(stored + at, coded, plane, count, way)) return false;
        at += coded;
    }
    if (at != length) return false;
    merge(planes, count, width, data, way);
    return true;
}

}  // namespace planes
}  // namespace flowstone
