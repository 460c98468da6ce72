// Codec `planes`: what is decoded is what was encoded, the fast way writes the bytes of the plain one, and no bytes
// break the decoder.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "bounds.h"
#include "tests/bytes.h"
#include "codec/planes.h"

namespace flowstone {
namespace {

using Bytes = std::vector<std::byte>;
using planes::Way;

constexpr std::uint32_t every_plane = 0xFF;

/// So many kinds of content: from equal bytes to random ones, with floats of training states between.
constexpr int kinds = 8;
Bytes content(int kind, std::size_t bytes, std::size_t width, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, 0.02F);
    Bytes data(bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
        const std::uint64_t drawn = random();
        switch (kind) {
            case 0: data[i] = std::byte{7}; break;
            case 1: data[i] = static_cast<std::byte>(drawn); break;
            case 2: data[i] = static_cast<std::byte>(drawn % 3 == 0); break;
            case 3: data[i] = static_cast<std::byte>(std::min(std::countr_zero(drawn | 1ULL << 40), 255) * 5); break;
            case 4: data[i] = static_cast<std::byte>(i % width == 0 ? drawn : 0); break;
            case 5: data[i] = static_cast<std::byte>(i == bytes / 2 ? 1 : 0); break;
            case 6: data[i] = static_cast<std::byte>(i < bytes / 2 ? drawn % 4 : 200 + drawn % 56); break;
            default: break;
        }
    }
    for (std::size_t i = 0; kind == 7 && i + width <= bytes; i += width) {
        const float drawn = normal(random);
        const double wide = static_cast<double>(drawn);
        const auto* const from = width == 8 ? reinterpret_cast<const std::byte*>(&wide)
                                            : reinterpret_cast<const std::byte*>(&drawn) + (4 - width);
        std::memcpy(data.data() + i, from, width);
    }
    return data;
}

/// With room of exactly the promised length, so that AddressSanitizer sees what passes it.
Bytes encoded(const Bytes& data, std::size_t width, std::uint32_t chosen, Way way = Way::best) {
    Bytes room(planes::room_bytes(data.size()), std::byte{0xAA});
    room.resize(planes::encode(data.data(), data.size(), width, chosen, room.data(), way));
    room.shrink_to_fit();
    return room;
}

bool decoded(const Bytes& stored, Bytes& data, Way way = Way::best) {
    Bytes room(data.size(), std::byte{0x55});
    const Bytes exact(stored);
    return planes::decode(exact.data(), exact.size(), data.data(), data.size(), room.data(), way);
}

const std::vector<std::size_t> lengths{8,          16, 64, 248, 512, 4096, 4104, 65536, 300 * 1024, chunk_bytes - 8,
                                       chunk_bytes};

template <class Each> void for_contents(std::size_t most, Each each) {
    for (const std::size_t bytes : lengths) {
        if (bytes > most) continue;
        for (const std::size_t width : {1, 2, 4, 8})
            for (int kind = 0; kind < kinds; ++kind) {
                CAPTURE(bytes);
                CAPTURE(width);
                CAPTURE(kind);
                each(content(kind, bytes, width, bytes * 31 + static_cast<std::size_t>(kind)), width);
            }
    }
}

}  // namespace

TEST_CASE("planes decode to what was encoded, and all ways write the same bytes") {
    std::size_t shorter = 0;
    for_contents(chunk_bytes, [&](const Bytes& data, std::size_t width) {
        for (const std::uint32_t chosen : {every_plane, 1U << (width - 1)}) {
            const Bytes stored = encoded(data, width, chosen);
            for (const Way way : {Way::scalar, Way::avx2}) REQUIRE(same(stored, encoded(data, width, chosen, way)));
            if (stored.empty()) continue;
            ++shorter;
            REQUIRE(stored.size() < data.size());
            for (const Way way : {Way::best, Way::scalar, Way::avx2}) {
                Bytes back(data.size());
                REQUIRE(decoded(stored, back, way));
                REQUIRE(same(back, data));
            }
        }
    });
    CHECK(shorter > 200);
}

TEST_CASE("the plane of sign and exponent is coded near its entropy") {
    for (const std::size_t width : {2, 4}) {
        const Bytes data = content(7, chunk_bytes, width, 5);
        std::vector<double> counts(256, 0);
        for (std::size_t i = width - 1; i < data.size(); i += width) ++counts[static_cast<std::size_t>(data[i])];
        const auto total = static_cast<double>(data.size() / width);
        double bits = 0;
        for (const double n : counts)
            if (n > 0) bits += n * std::log2(total / n);
        const planes::Probe probe;
        CHECK(probe.worthwhile(data.data(), data.size(), width) == 1U << (width - 1));
        const double raw = total * static_cast<double>(width - 1);
        const auto stored = static_cast<double>(encoded(data, width, 1U << (width - 1)).size());
        CHECK(stored - raw > bits / 8);
        CHECK(stored - raw < bits / 8 * 1.02 + 512);
    }
}

TEST_CASE("a probe finds nothing worth coding in random bytes, and a plane that is no shorter is left raw") {
    const planes::Probe probe;
    for (const std::size_t width : {1, 2, 4, 8}) {
        const Bytes data = content(1, chunk_bytes, width, 9);
        CHECK(probe.worthwhile(data.data(), data.size(), width) == 0);
        CHECK(encoded(data, width, every_plane).empty());
        CHECK(encoded(data, width, 0).empty());
        if (width == 1) continue;
        Bytes half(data);
        for (std::size_t i = 0; i < half.size(); i += width) half[i] = std::byte{0};
        CHECK(probe.worthwhile(half.data(), half.size(), width) == 1);
        CHECK(encoded(half, width, every_plane) == encoded(half, width, 1));
    }
    CHECK(probe.worthwhile(nullptr, 0, 4) == 0);
}

TEST_CASE("bytes that no encoder has written are refused or decoded, and nothing beyond is touched") {
    std::mt19937_64 random(77);
    std::size_t refused = 0;
    for_contents(65536, [&](const Bytes& data, std::size_t width) {
        const Bytes stored = encoded(data, width, every_plane);
        if (stored.empty()) return;
        for (int round = 0; round < 40; ++round) {
            Bytes bad(stored);
            const std::uint64_t drawn = random();
            // The beginning has lengths, states and frequencies.
            const auto at = static_cast<std::ptrdiff_t>(
                (drawn >> 8) % std::min<std::uint64_t>(bad.size(), round % 2 ? 400 : bad.size()));
            if (round % 4 == 0)
                bad.resize(static_cast<std::size_t>(at));
            else if (round % 4 == 1)
                bad.insert(bad.begin() + at, static_cast<std::byte>(drawn));
            else
                bad[static_cast<std::size_t>(at)] ^= static_cast<std::byte>(drawn % 255 + 1);
            Bytes back(data.size(), std::byte{0x33}), plain(back), narrow(back);
            const Bytes before(back);
            const bool good = decoded(bad, back);
            REQUIRE(good == decoded(bad, plain, Way::scalar));
            REQUIRE(good == decoded(bad, narrow, Way::avx2));
            REQUIRE(same(back, plain));
            REQUIRE(same(back, narrow));
            if (good) continue;
            ++refused;
            REQUIRE(same(back, before));
        }
    });
    CHECK(refused > 1000);
}

TEST_CASE("random bytes do not break the decoder, nor does a length that is not the data's") {
    std::mt19937_64 random(3);
    for (int round = 0; round < 3000; ++round) {
        Bytes bad(random() % 2000);
        for (std::byte& byte : bad) byte = static_cast<std::byte>(random());
        if (!bad.empty()) bad[0] = static_cast<std::byte>(1U << random() % 4);
        for (std::size_t p = 1; p < std::min<std::size_t>(bad.size(), 9); ++p)
            bad[p] = static_cast<std::byte>(random() % 3);
        Bytes back(8 * (1 + random() % 200));
        for (const Way way : {Way::best, Way::avx2}) decoded(bad, back, way);
    }
    const Bytes data = content(7, 65536, 4, 1);
    const Bytes stored = encoded(data, 4, every_plane);
    for (const std::size_t bytes : {0, 4, 65532, 65540, 65535, 131072}) {
        Bytes other(bytes);
        CHECK_FALSE(decoded(stored, other));
    }
}

}  // namespace flowstone
