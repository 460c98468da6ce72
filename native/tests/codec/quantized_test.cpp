// Codec `quantized`: what is decoded lies within the bound, the fast way writes the bytes of the plain one, and no
// bytes break the decoder.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "codec/quantized.h"

namespace flowstone {
namespace {

using Bytes = std::vector<std::byte>;
using quantized::Element;
using quantized::Way;

const std::vector<Element> all_elements{Element::float32, Element::bfloat16, Element::float16};

/// A value that the element type has, and its bytes: float32 and bfloat16 by their bits, float16 as the compiler
/// converts.
float put(Element element, float value, std::byte* at) {
    if (element == Element::float32) {
        std::memcpy(at, &value, sizeof value);
        return value;
    }
    if (element == Element::bfloat16) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(value) & 0xFFFF0000;
        const auto upper = static_cast<std::uint16_t>(bits >> 16);
        std::memcpy(at, &upper, sizeof upper);
        return std::bit_cast<float>(bits);
    }
    const auto half = static_cast<_Float16>(value);
    std::memcpy(at, &half, sizeof half);
    return static_cast<float>(half);
}

float get(Element element, const std::byte* at) {
    if (element == Element::float32) {
        float value;
        std::memcpy(&value, at, sizeof value);
        return value;
    }
    if (element == Element::bfloat16) {
        std::uint16_t upper;
        std::memcpy(&upper, at, sizeof upper);
        return std::bit_cast<float>(std::uint32_t{upper} << 16);
    }
    _Float16 half;
    std::memcpy(&half, at, sizeof half);
    return static_cast<float>(half);
}

/// Moments of an optimizer: many orders of magnitude in one block, zeros among them.
Bytes moments(Element element, std::size_t elements, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const std::size_t width = quantized::element_bytes(element);
    Bytes data(elements * width);
    for (std::size_t i = 0; i < elements; ++i)
        put(element, i % 11 == 0 ? 0.0F : normal(random) * std::exp(3 * normal(random)), data.data() + i * width);
    return data;
}

Bytes encoded(const Bytes& data, Element element, std::size_t block, Way way = Way::best) {
    Bytes room(data.size());
    room.resize(quantized::encode(data.data(), data.size(), element, block, room.data(), way));
    room.shrink_to_fit();
    return room;
}

void check_bound(const Bytes& data, const Bytes& made, Element element, std::size_t block) {
    const std::size_t width = quantized::element_bytes(element), elements = data.size() / width;
    for (std::size_t first = 0; first < elements; first += block) {
        float largest = 0;
        const std::size_t end = std::min(first + block, elements);
        for (std::size_t i = first; i < end; ++i)
            largest = std::max(largest, std::fabs(get(element, data.data() + i * width)));
        for (std::size_t i = first; i < end; ++i) {
            const double value = static_cast<double>(get(element, data.data() + i * width));
            const double decoded = static_cast<double>(get(element, made.data() + i * width));
            const double bound = std::max(std::fabs(value) / 15, static_cast<double>(largest) / 220000);
            REQUIRE(std::fabs(decoded - value) <= bound * 1.000002);
            REQUIRE((decoded == 0) == (value == 0));
            REQUIRE(std::signbit(decoded) == std::signbit(value));
        }
    }
}

}  // namespace

TEST_CASE("quantized elements come back within the bound, and both ways write and read the same bytes") {
    for (const Element element : all_elements)
        for (const std::size_t block : {std::size_t{16}, std::size_t{256}, std::size_t{4096}})
            for (const std::size_t elements : {std::size_t{64}, std::size_t{1000}, std::size_t{65536}}) {
                CAPTURE(static_cast<int>(element));
                CAPTURE(block);
                CAPTURE(elements);
                const Bytes data = moments(element, elements, static_cast<unsigned>(elements + block));
                const Bytes stored = encoded(data, element, block);
                if (stored.empty()) {  // float16 cannot say what is far below its least normal number
                    REQUIRE(element == Element::float16);
                    continue;
                }
                REQUIRE(stored == encoded(data, element, block, Way::scalar));
                Bytes made(data.size()), again(data.size());
                REQUIRE(quantized::decode(stored.data(), stored.size(), made.data(), made.size()));
                REQUIRE(quantized::decode(stored.data(), stored.size(), again.data(), again.size(), Way::scalar));
                REQUIRE(made == again);
                check_bound(data, made, element, block);
            }
}

TEST_CASE("float32 is stored in little more than a quarter, the others in little more than half") {
    CHECK(encoded(moments(Element::float32, 262144, 1), Element::float32, 256).size() == 8 + 262144 + 4 * 1024);
    CHECK(encoded(moments(Element::bfloat16, 524288, 1), Element::bfloat16, 256).size() == 8 + 524288 + 4 * 2048);
}

TEST_CASE("what the bound cannot hold for is not quantized") {
    const std::size_t elements = 512;
    for (const float value :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 0x1p-120F}) {
        CAPTURE(value);
        Bytes data(elements * 4);
        if (std::isfinite(value))
            for (std::size_t i = 0; i < elements; ++i) put(Element::float32, value, data.data() + 4 * i);
        else
            put(Element::float32, value, data.data() + 4 * 300);
        CHECK(encoded(data, Element::float32, 256).empty());
        CHECK(encoded(data, Element::float32, 256, Way::scalar).empty());
    }
    CHECK(encoded(Bytes(6), Element::float32, 256).empty());  // no whole elements
    CHECK(encoded(moments(Element::float32, 3, 1), Element::float32, 256).empty());  // no shorter
}

TEST_CASE("a stored chunk that no encoder has written is refused, whatever its bytes") {
    const Bytes data = moments(Element::float32, 1000, 5);
    const Bytes stored = encoded(data, Element::float32, 256);
    Bytes made(data.size());
    std::mt19937 random(7);
    for (std::size_t length = 0; length < stored.size(); length += 1 + length / 3) {
        const Bytes cut(stored.begin(), stored.begin() + static_cast<std::ptrdiff_t>(length));
        CHECK_FALSE(quantized::decode(cut.data(), cut.size(), made.data(), made.size()));
    }
    for (int round = 0; round < 3000; ++round) {
        Bytes changed = stored;
        for (int i = 0; i < 3; ++i)
            changed[random() % (round % 2 == 0 ? 8 : changed.size())] = static_cast<std::byte>(random());
        quantized::decode(changed.data(), changed.size(), made.data(), made.size());  // AddressSanitizer looks on
    }
    Bytes shorter(data.size() - 4), longer(data.size() + 4);
    CHECK_FALSE(quantized::decode(stored.data(), stored.size(), shorter.data(), shorter.size()));
    CHECK_FALSE(quantized::decode(stored.data(), stored.size(), longer.data(), longer.size()));
}

}  // namespace flowstone
