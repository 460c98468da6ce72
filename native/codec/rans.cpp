#include "codec/rans.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
// GCC 12 takes the undefined operands of its own intrinsics for uninitialized variables (PR 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define FLOWSTONE_AVX2_TARGET __attribute__((target("avx2,popcnt")))
#define FLOWSTONE_AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,bmi2,popcnt")))
#endif

namespace flowstone::rans {
namespace {

using Byte = std::uint8_t;

constexpr std::uint32_t scale = 1U << scale_bits;
constexpr std::uint32_t word_bits = 16;
// A state may not pass 2^31 - 1, up to which the division by multiplication below is exact.
constexpr std::uint32_t over_bits = 31 - scale_bits;
constexpr std::size_t bitmap_bytes = 32;
constexpr std::size_t group_words_bytes = 2 * lanes;  // a state reads or writes at most one word per symbol

// The model is estimated from one run of every eight: KL divergence below 0.002 bits a symbol for planes of 256 KiB.
constexpr std::size_t run_symbols = 64;
constexpr std::size_t run_every = 8;
constexpr std::size_t sampled_from = 32768;  // fewer symbols are all counted

using Frequencies = std::array<std::uint16_t, 256>;

/// counts   counts of the sampled symbols
/// present  all symbols that occur
struct Census {
    std::array<std::uint32_t, 256> counts{};
    std::array<bool, 256> present{};
};

void count(const Byte* symbols, std::size_t length, std::array<std::array<std::uint32_t, 256>, 4>& parts) {
    std::size_t i = 0;
    for (; i + 4 <= length; i += 4)
        for (std::size_t part = 0; part < 4; ++part) ++parts[part][symbols[i + part]];
    for (; i < length; ++i) ++parts[0][symbols[i]];
}

/// The sampled run differs from stretch to stretch, so that rows of a matrix are not sampled at the same columns.
std::array<std::uint32_t, 256> sampled_counts(const Byte* symbols, std::size_t length) {
    std::array<std::array<std::uint32_t, 256>, 4> parts{};  // equal neighbours do not wait for each other
    constexpr std::size_t stretch = run_symbols * run_every;
    if (length < sampled_from)
        count(symbols, length, parts);
    else
        for (std::size_t i = 0; (i + 1) * stretch <= length; ++i)
            count(symbols + i * stretch + i * 5 % run_every * run_symbols, run_symbols, parts);
    std::array<std::uint32_t, 256> counts{};
    for (std::size_t symbol = 0; symbol < 256; ++symbol)
        for (const auto& part : parts) counts[symbol] += part[symbol];
    return counts;
}

void find_present(const Byte* symbols, std::size_t length, std::array<bool, 256>& present) {
    for (std::size_t i = 0; i < length; ++i) present[symbols[i]] = true;
}

/// Frequencies that add up to `scale`, at least 1 for each symbol that is present. At least two symbols are present.
Frequencies normalised(const Census& census) {
    std::uint64_t total = 0;
    for (const std::uint32_t counted : census.counts) total += counted;
    Frequencies frequencies{};
    std::uint32_t sum = 0;
    for (std::size_t symbol = 0; symbol < 256; ++symbol) {
        if (!census.present[symbol]) continue;
        const std::uint64_t part = (std::uint64_t{census.counts[symbol]} * scale + total / 2) / total;
        frequencies[symbol] = static_cast<std::uint16_t>(std::max<std::uint64_t>(part, 1));
        sum += frequencies[symbol];
    }
    while (sum != scale) {  // each round the most frequent symbol loses up to half, or gains all that is missing
        std::uint16_t& most = *std::max_element(frequencies.begin(), frequencies.end());
        const std::uint32_t before = most;
        most = static_cast<std::uint16_t>(sum < scale ? most + (scale - sum)
                                                      : most - std::min(sum - scale, std::max(most / 2U, 1U)));
        sum = sum - before + most;
    }
    return frequencies;
}

/// The tables for encoding. `step` of a symbol: bias in the low 13 bits, scale - frequency in the next 12, then the
/// shift.
struct Encoding {
    alignas(64) std::array<std::uint32_t, 256> reciprocal{};
    alignas(64) std::array<std::uint32_t, 256> step{};

    /// x / f == (x * reciprocal >> 32) >> shift for all x below 2^31 (Alverson, 1991). For f = 1 that is x - 1, which
    /// the bias makes up for.
    explicit Encoding(const Frequencies& frequencies) {
        std::uint32_t begin = 0;
        for (std::size_t symbol = 0; symbol < 256; ++symbol) {
            const std::uint32_t f = frequencies[symbol];
            if (f == 0) continue;
            std::uint32_t shift = 0, bias = begin;
            if (f == 1) {
                reciprocal[symbol] = ~0U;
                bias += scale - 1;
            } else {
                shift = static_cast<std::uint32_t>(std::bit_width(f - 1)) - 1;
                reciprocal[symbol] = static_cast<std::uint32_t>(((std::uint64_t{1} << (shift + 32)) + f - 1) / f);
            }
            step[symbol] = bias | (scale - f) << 13 | shift << 25;
            begin += f;
        }
    }
};

/// Words are in the order of the groups; in each group, those of its lower half of symbols come first. Encoders process
/// symbols from the last to the first, and write from the end.
Byte* encode_symbols(const Encoding& encoding, const Byte* symbols, std::size_t begin, std::size_t end,
                     std::uint32_t* states, Byte* out) {
    for (std::size_t i = end; i-- > begin;) {
        const Byte symbol = symbols[i];
        const std::uint32_t step = encoding.step[symbol], complement = step >> 13 & (scale - 1);
        std::uint32_t& x = states[i % lanes];
        if (x >> over_bits >= scale - complement) {
            out -= 2;
            const auto word = static_cast<std::uint16_t>(x);
            std::memcpy(out, &word, 2);
            x >>= word_bits;
        }
        const auto high = static_cast<std::uint32_t>(std::uint64_t{x} * encoding.reciprocal[symbol] >> 32);
        x += (step & 0x1FFF) + (high >> (step >> 25)) * complement;
    }
    return out;
}

/// For each slot: the symbol in 8 bits, its frequency in 12, the slot's number within it in 12.
using Decoding = std::array<std::uint32_t, scale>;

void fill(Decoding& decoding, const Frequencies& frequencies) {
    std::size_t slot = 0;
    for (std::uint32_t symbol = 0; symbol < 256; ++symbol)
        for (std::uint32_t i = 0; i < frequencies[symbol]; ++i)
            decoding[slot++] = symbol | std::uint32_t{frequencies[symbol]} << 8 | i << 20;
    assert(slot == scale);
}

/// Null: the words end too early.
const Byte* decode_symbols(const Decoding& decoding, Byte* symbols, std::size_t begin, std::size_t end,
                           std::uint32_t* states, const Byte* words, const Byte* words_end) {
    for (std::size_t i = begin; i < end; ++i) {
        std::uint32_t& x = states[i % lanes];
        const std::uint32_t entry = decoding[x & (scale - 1)];
        symbols[i] = static_cast<Byte>(entry);
        x = (entry >> 8 & (scale - 1)) * (x >> scale_bits) + (entry >> 20);
        if (x >= state_min) continue;
        if (words_end - words < 2) return nullptr;
        std::uint16_t word;
        std::memcpy(&word, words, 2);
        words += 2;
        x = x << word_bits | word;
    }
    return words;
}

#if defined(__x86_64__)

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt"); }

constexpr std::size_t eight = 8;  // states in a vector of AVX2

/// For each set of eight lanes, by its bits: `gather` has the lanes of the set, in order, right-aligned; `spread` has,
/// for each lane of the set, the number of set lanes before it.
struct LaneTables {
    alignas(64) std::array<std::array<Byte, eight>, 256> gather{}, spread{};

    constexpr LaneTables() {
        for (unsigned set = 0; set < 256; ++set) {
            std::size_t at = eight - static_cast<std::size_t>(std::popcount(set));
            Byte before = 0;
            for (std::size_t lane = 0; lane < eight; ++lane) {
                spread[set][lane] = before;
                if ((set >> lane & 1) == 0) continue;
                gather[set][at++] = static_cast<Byte>(lane);
                ++before;
            }
        }
    }
};
constexpr LaneTables lane_tables;

FLOWSTONE_AVX2_TARGET inline __m256i lanes_of(const std::array<Byte, eight>& numbers) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(numbers.data())));
}

FLOWSTONE_AVX2_TARGET inline __m256i gathered(const std::uint32_t* table, __m256i at) {
    return _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), at, 4);
}

/// Eight states of a group. As encode_symbols. The 16 bytes before `out` are overwritten.
FLOWSTONE_AVX2_TARGET inline __m256i encode_eight(const Encoding& encoding, const Byte* symbols, __m256i x,
                                                  Byte*& out) {
    const __m256i symbol = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(symbols)));
    const __m256i reciprocal = gathered(encoding.reciprocal.data(), symbol),
                  step = gathered(encoding.step.data(), symbol);
    const __m256i complement = _mm256_and_si256(_mm256_srli_epi32(step, 13), _mm256_set1_epi32(scale - 1));
    const __m256i frequency = _mm256_sub_epi32(_mm256_set1_epi32(scale), complement);
    const __m256i under = _mm256_cmpgt_epi32(frequency, _mm256_srli_epi32(x, over_bits));
    const auto over = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(under))) ^ 0xFFU;
    const __m256i last =
        _mm256_and_si256(_mm256_permutevar8x32_epi32(x, lanes_of(lane_tables.gather[over])), _mm256_set1_epi32(0xFFFF));
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(last), _mm256_extracti128_si256(last, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out - 2 * eight), packed);
    out -= 2 * static_cast<unsigned>(_mm_popcnt_u32(over));
    x = _mm256_blendv_epi8(_mm256_srli_epi32(x, word_bits), x, under);
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(x, reciprocal), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(reciprocal, 32));
    const __m256i quotient = _mm256_srlv_epi32(_mm256_blend_epi32(even, odd, 0xAA), _mm256_srli_epi32(step, 25));
    const __m256i bias = _mm256_and_si256(step, _mm256_set1_epi32(0x1FFF));
    return _mm256_add_epi32(_mm256_add_epi32(x, bias), _mm256_mullo_epi32(quotient, complement));
}

struct Octets {
    static constexpr std::size_t count = lanes / eight;
    __m256i at[count];
};

FLOWSTONE_AVX2_TARGET inline Octets loaded(const std::uint32_t* states) {
    Octets found;
    for (std::size_t i = 0; i < Octets::count; ++i)
        found.at[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + i * eight));
    return found;
}

FLOWSTONE_AVX2_TARGET inline void stored(const Octets& octets, std::uint32_t* states) {
    for (std::size_t i = 0; i < Octets::count; ++i)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + i * eight), octets.at[i]);
}

/// As encode_groups_avx512.
FLOWSTONE_AVX2_TARGET Byte* encode_groups_avx2(const Encoding& encoding, const Byte* symbols, std::size_t& end,
                                               std::uint32_t* states, Byte* out, const Byte* floor) {
    Octets x = loaded(states);
    for (; end != 0 && out - floor >= static_cast<std::ptrdiff_t>(group_words_bytes); end -= lanes)
        for (std::size_t i = Octets::count; i-- > 0;)
            x.at[i] = encode_eight(encoding, symbols + end - lanes + i * eight, x.at[i], out);
    stored(x, states);
    return out;
}

/// Eight states of a group. As decode_symbols; 16 bytes of words are there.
FLOWSTONE_AVX2_TARGET inline __m256i decode_eight(const Decoding& decoding, Byte* symbols, __m256i x,
                                                  const Byte*& words) {
    const __m256i entry = gathered(decoding.data(), _mm256_and_si256(x, _mm256_set1_epi32(scale - 1)));
    const __m256i bytes = _mm256_and_si256(entry, _mm256_set1_epi32(0xFF));
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(symbols), _mm_packus_epi16(packed, packed));
    const __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(entry, 8), _mm256_set1_epi32(scale - 1));
    x = _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srli_epi32(x, scale_bits)), _mm256_srli_epi32(entry, 20));
    static_assert(std::has_single_bit(state_min));
    const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, std::countr_zero(state_min)), _mm256_setzero_si256());
    const auto set = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(low)));
    const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
    words += 2 * static_cast<unsigned>(_mm_popcnt_u32(set));
    const __m256i spread = _mm256_permutevar8x32_epi32(next, lanes_of(lane_tables.spread[set]));
    return _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, word_bits), spread), low);
}

/// As decode_groups_avx512.
FLOWSTONE_AVX2_TARGET const Byte* decode_groups_avx2(const Decoding& decoding, Byte* symbols, std::size_t& begin,
                                                     std::size_t end, std::uint32_t* states, const Byte* words,
                                                     const Byte* words_end) {
    Octets x = loaded(states);
    for (; begin + lanes <= end && words_end - words >= static_cast<std::ptrdiff_t>(group_words_bytes); begin += lanes)
        for (std::size_t i = 0; i < Octets::count; ++i)
            x.at[i] = decode_eight(decoding, symbols + begin + i * eight, x.at[i], words);
    stored(x, states);
    return words;
}

FLOWSTONE_AVX512_TARGET inline __m512i in_each_lane(const std::array<Byte, 16>& rows) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(rows.data())));
}

/// Membership in a set of bytes, by two tables of 16 rows: a byte's low four bits choose the row, its high ones the bit
/// (Muła, "SIMD byte lookup").
FLOWSTONE_AVX512_TARGET void find_present_avx512(const Byte* symbols, std::size_t length,
                                                 std::array<bool, 256>& present) {
    alignas(16) std::array<Byte, 16> low{}, high{};
    const auto enter = [&](std::size_t symbol) {
        auto& row = (symbol < 128 ? low : high)[symbol & 15];
        row = static_cast<Byte>(row | 1U << (symbol >> 4 & 7));
        present[symbol] = true;
    };
    for (std::size_t symbol = 0; symbol < 256; ++symbol)
        if (present[symbol]) enter(symbol);
    const __m512i bits = _mm512_set1_epi64(static_cast<long long>(0x8040201008040201ULL));
    __m512i lows = in_each_lane(low), highs = in_each_lane(high);
    std::size_t i = 0;
    for (; i + 64 <= length; i += 64) {
        const __m512i at = _mm512_loadu_si512(symbols + i);
        const __m512i rows = _mm512_or_si512(_mm512_shuffle_epi8(lows, at),
                                             _mm512_shuffle_epi8(highs, _mm512_xor_si512(at, _mm512_set1_epi8(-128))));
        const __m512i bit = _mm512_shuffle_epi8(bits, _mm512_and_si512(_mm512_srli_epi16(at, 4), _mm512_set1_epi8(7)));
        if (_mm512_testn_epi8_mask(rows, bit) == 0) continue;
        for (std::size_t k = i; k < i + 64; ++k)
            if (!present[symbols[k]]) enter(symbols[k]);
        lows = in_each_lane(low);
        highs = in_each_lane(high);
    }
    find_present(symbols + i, length - i, present);
}

/// One half of a group. As encode_symbols.
FLOWSTONE_AVX512_TARGET inline __m512i encode_half(const Encoding& encoding, const Byte* symbols, __m512i x,
                                                   Byte*& out) {
    const __m512i symbol = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols)));
    const __m512i reciprocal = _mm512_i32gather_epi32(symbol, encoding.reciprocal.data(), 4);
    const __m512i step = _mm512_i32gather_epi32(symbol, encoding.step.data(), 4);
    const __m512i complement = _mm512_and_si512(_mm512_srli_epi32(step, 13), _mm512_set1_epi32(scale - 1));
    const __m512i frequency = _mm512_sub_epi32(_mm512_set1_epi32(scale), complement);
    const __mmask16 over = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x, over_bits), frequency);
    const auto words = static_cast<unsigned>(_mm_popcnt_u32(over));
    out -= 2 * words;
    const __m256i packed = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(over, x));
    _mm256_mask_storeu_epi16(out, static_cast<__mmask16>(_bzhi_u32(0xFFFF, words)), packed);
    x = _mm512_mask_srli_epi32(x, over, x, word_bits);
    const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(x, reciprocal), 32);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(reciprocal, 32));
    const __m512i quotient = _mm512_srlv_epi32(_mm512_mask_blend_epi32(0xAAAA, even, odd), _mm512_srli_epi32(step, 25));
    const __m512i bias = _mm512_and_si512(step, _mm512_set1_epi32(0x1FFF));
    return _mm512_add_epi32(_mm512_add_epi32(x, bias), _mm512_mullo_epi32(quotient, complement));
}

/// Encode complete groups before `end`, while there is room for the words of a group above `floor`; sets `end` to where
/// it stopped.
FLOWSTONE_AVX512_TARGET Byte* encode_groups_avx512(const Encoding& encoding, const Byte* symbols, std::size_t& end,
                                                   std::uint32_t* states, Byte* out, const Byte* floor) {
    __m512i low = _mm512_loadu_si512(states), high = _mm512_loadu_si512(states + lanes / 2);
    for (; end != 0 && out - floor >= static_cast<std::ptrdiff_t>(group_words_bytes); end -= lanes) {
        high = encode_half(encoding, symbols + end - lanes / 2, high, out);
        low = encode_half(encoding, symbols + end - lanes, low, out);
    }
    _mm512_storeu_si512(states, low);
    _mm512_storeu_si512(states + lanes / 2, high);
    return out;
}

FLOWSTONE_AVX512_TARGET inline __m512i decode_half(const Decoding& decoding, Byte* symbols, __m512i x,
                                                   const Byte*& words) {
    const __m512i entry = _mm512_i32gather_epi32(_mm512_and_si512(x, _mm512_set1_epi32(scale - 1)), decoding.data(), 4);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols), _mm512_cvtepi32_epi8(entry));
    const __m512i frequency = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(scale - 1));
    x = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(x, scale_bits)), _mm512_srli_epi32(entry, 20));
    const __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(state_min));
    const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
    words += 2 * _mm_popcnt_u32(low);
    return _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, word_bits), _mm512_maskz_expand_epi32(low, next));
}

/// Decode complete groups from `begin` on, while the words of a group are left; sets `begin` to where it stopped.
FLOWSTONE_AVX512_TARGET const Byte* decode_groups_avx512(const Decoding& decoding, Byte* symbols, std::size_t& begin,
                                                         std::size_t end, std::uint32_t* states, const Byte* words,
                                                         const Byte* words_end) {
    __m512i low = _mm512_loadu_si512(states), high = _mm512_loadu_si512(states + lanes / 2);
    for (; begin + lanes <= end && words_end - words >= static_cast<std::ptrdiff_t>(group_words_bytes);
         begin += lanes) {
        low = decode_half(decoding, symbols + begin, low, words);
        high = decode_half(decoding, symbols + begin + lanes / 2, high, words);
    }
    _mm512_storeu_si512(states, low);
    _mm512_storeu_si512(states + lanes / 2, high);
    return words;
}

#endif

/// How many states a vector has in this implementation; 1: it has no vectors.
std::size_t width_of(Way way) {
#if defined(__x86_64__)
    static const std::size_t less = has_avx2() ? eight : 1, most = has_avx512() ? 2 * eight : less;
    return way == Way::best ? most : way == Way::avx2 ? less : 1;
#else
    static_cast<void>(way);
    return 1;
#endif
}

Census take_census(const Byte* symbols, std::size_t length, Way way) {
    Census census{sampled_counts(symbols, length), {}};
    for (std::size_t symbol = 0; symbol < 256; ++symbol) census.present[symbol] = census.counts[symbol] != 0;
#if defined(__x86_64__)
    if (width_of(way) == 2 * eight) {
        find_present_avx512(symbols, length, census.present);
        return census;
    }
#endif
    static_cast<void>(way);
    find_present(symbols, length, census.present);
    return census;
}

/// Encode all symbols into words that end at `end`. Returns null if they would begin before `floor`.
Byte* encode_words(const Encoding& encoding, const Byte* symbols, std::size_t length, std::uint32_t* states,
                   Byte* floor, Byte* end, Way way) {
    std::size_t left = length - length % lanes;  // complete groups
    if (end - floor < static_cast<std::ptrdiff_t>(group_words_bytes)) return nullptr;
    Byte* out = encode_symbols(encoding, symbols, left, length, states, end);
#if defined(__x86_64__)
    const std::size_t width = width_of(way);
    if (width == 2 * eight) out = encode_groups_avx512(encoding, symbols, left, states, out, floor);
    if (width == eight) out = encode_groups_avx2(encoding, symbols, left, states, out, floor);
#endif
    static_cast<void>(way);
    for (; left != 0; left -= lanes) {
        if (out - floor < static_cast<std::ptrdiff_t>(group_words_bytes)) return nullptr;
        out = encode_symbols(encoding, symbols, left - lanes, left, states, out);
    }
    return out;
}

/// Append to `out`.
void put(Byte*& out, const void* bytes, std::size_t length) {
    std::memcpy(out, bytes, length);
    out += length;
}

/// Returns false if no encoder writes such bytes; otherwise `words` is after the frequencies.
bool read_frequencies(const Byte*& words, const Byte* end, Frequencies& frequencies) {
    if (end - words < static_cast<std::ptrdiff_t>(bitmap_bytes)) return false;
    const Byte* const bitmap = words;
    words += bitmap_bytes;
    std::uint32_t sum = 0;
    for (std::size_t symbol = 0; symbol < 256; ++symbol) {
        if ((bitmap[symbol / 8] >> symbol % 8 & 1) == 0) continue;
        if (end - words < 2) return false;
        std::memcpy(&frequencies[symbol], words, 2);
        words += 2;
        if (frequencies[symbol] == 0 || frequencies[symbol] >= scale) return false;
        sum += frequencies[symbol];
    }
    return sum == scale;
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "states, frequencies and words are copied as they are");

std::size_t encode(const std::byte* symbols, std::size_t count, std::byte* out, std::size_t room, Way way) {
    const auto* const from = reinterpret_cast<const Byte*>(symbols);
    auto* const begin = reinterpret_cast<Byte*>(out);
    const Census census = take_census(from, count, way);
    const auto kinds = static_cast<std::size_t>(std::count(census.present.begin(), census.present.end(), true));
    const std::size_t model_bytes = lanes * sizeof(std::uint32_t) + bitmap_bytes + 2 * kinds;
    if (kinds < 2 || room <= model_bytes) return 0;
    const Frequencies frequencies = normalised(census);
    const Encoding encoding(frequencies);
    std::array<std::uint32_t, lanes> states;
    states.fill(state_min);
    Byte* const end = begin + room;
    const Byte* const words = encode_words(encoding, from, count, states.data(), begin + model_bytes, end, way);
    if (words == nullptr) return 0;
    Byte* next = begin;
    put(next, states.data(), sizeof(states));
    std::array<Byte, bitmap_bytes> bitmap{};
    for (std::size_t symbol = 0; symbol < 256; ++symbol)
        if (frequencies[symbol] != 0) bitmap[symbol / 8] = static_cast<Byte>(bitmap[symbol / 8] | 1U << symbol % 8);
    put(next, bitmap.data(), bitmap_bytes);
    for (const std::uint16_t frequency : frequencies)
        if (frequency != 0) put(next, &frequency, sizeof(frequency));
    std::memmove(next, words, static_cast<std::size_t>(end - words));
    return model_bytes + static_cast<std::size_t>(end - words);
}

bool decode(const std::byte* coded, std::size_t bytes, std::byte* symbols, std::size_t count, Way way) {
    const auto* words = reinterpret_cast<const Byte*>(coded);
    const Byte* const end = words + bytes;
    std::array<std::uint32_t, lanes> states;
    if (bytes < sizeof(states)) return false;
    std::memcpy(states.data(), words, sizeof(states));
    words += sizeof(states);
    Frequencies frequencies{};
    if (!read_frequencies(words, end, frequencies)) return false;
    Decoding decoding;
    fill(decoding, frequencies);
    auto* const out = reinterpret_cast<Byte*>(symbols);
    std::size_t begin = 0;
#if defined(__x86_64__)
    const std::size_t width = width_of(way);
    if (width == 2 * eight) words = decode_groups_avx512(decoding, out, begin, count, states.data(), words, end);
    if (width == eight) words = decode_groups_avx2(decoding, out, begin, count, states.data(), words, end);
#endif
    static_cast<void>(way);
    words = decode_symbols(decoding, out, begin, count, states.data(), words, end);
    return words == end && std::all_of(states.begin(), states.end(), [](std::uint32_t x) { return x == state_min; });
}

}  // namespace flowstone::rans
