// The kernels against references that copy one byte at a time.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "bounds.h"
#include "codec/digest.h"
#include "capture/copy_kernels.h"
#include "capture/live_memory.h"

namespace flowstone {
namespace {

using Sizes = std::vector<std::uint64_t>;
using Strides = std::vector<std::int64_t>;

/// A random box of a random array, and strided memory for it.
struct Sample {
    std::uint64_t item_bytes;
    Sizes extent_shape, offset, shape;
    Strides strides;
    std::uint64_t origin = 0;  // where memory byte 0 of the box lies in `memory`
    std::vector<std::byte> memory, packed;
};

std::vector<std::byte> random_bytes(std::mt19937_64& random, std::size_t count) {
    std::vector<std::byte> bytes(count);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
}

Sample make_sample(std::mt19937_64& random, bool is_whole) {
    const auto upto = [&](std::uint64_t most) { return random() % (most + 1); };
    Sample sample;
    sample.item_bytes = 1 + upto(16);
    if (upto(2) != 0) sample.item_bytes = std::uint64_t{1} << upto(4);
    const std::size_t ndim = upto(5);
    std::uint64_t packed = sample.item_bytes;
    for (std::size_t d = 0; d < ndim; ++d) {
        sample.extent_shape.push_back(upto(20) == 0 ? 0 : 1 + upto(7));
        sample.shape.push_back(is_whole || upto(1) ? sample.extent_shape[d] : upto(sample.extent_shape[d]));
        sample.offset.push_back(upto(sample.extent_shape[d] - sample.shape[d]));
        packed *= sample.extent_shape[d];
    }
    // Memory: the box's dimensions in a random order, each stretched a little, some backwards.
    std::vector<std::size_t> order(ndim);
    for (std::size_t d = 0; d < ndim; ++d) order[d] = d;
    if (upto(1)) std::shuffle(order.begin(), order.end(), random);
    sample.strides.assign(ndim, 0);
    std::uint64_t stride = sample.item_bytes;
    for (std::size_t k = ndim; k-- > 0;) {
        const std::size_t d = order[k];
        if (upto(3) == 0) stride += sample.item_bytes * upto(2);
        sample.strides[d] = static_cast<std::int64_t>(stride);
        const std::uint64_t reach = stride * std::max<std::uint64_t>(sample.shape[d], 1);
        if (upto(5) == 0 && sample.shape[d] != 0) {
            sample.strides[d] = -sample.strides[d];
            sample.origin += stride * (sample.shape[d] - 1);
        }
        stride = reach;
    }
    sample.memory = random_bytes(random, stride + sample.origin + 64);
    sample.packed = random_bytes(random, packed);
    return sample;
}

/// Calls visit(packed offset, memory offset) for every byte of the box.
template <class Visit> void each_byte(const Sample& sample, Visit visit) {
    for (const std::uint64_t count : sample.shape)
        if (count == 0) return;
    Sizes index(sample.shape.size(), 0);
    for (;;) {
        std::uint64_t packed = 0;
        std::int64_t memory = static_cast<std::int64_t>(sample.origin);
        for (std::size_t d = 0; d < index.size(); ++d) {
            packed = packed * sample.extent_shape[d] + sample.offset[d] + index[d];
            memory += static_cast<std::int64_t>(index[d]) * sample.strides[d];
        }
        for (std::uint64_t byte = 0; byte < sample.item_bytes; ++byte)
            visit(packed * sample.item_bytes + byte, static_cast<std::uint64_t>(memory) + byte);
        std::size_t d = index.size();
        while (d > 0 && ++index[d - 1] == sample.shape[d - 1]) index[--d] = 0;
        if (d == 0) return;
    }
}

Layout layout_of(const Sample& sample) {
    return Layout::box(sample.item_bytes, sample.extent_shape, sample.offset, sample.shape, sample.strides);
}

}  // namespace

TEST_CASE("xxh3_64 matches the published value of nothing") { CHECK(xxh3_64(nullptr, 0) == 0x2D06800538D394C2); }

TEST_CASE("the digest is the same for every kind of processor, at once and bit by bit") {
    std::mt19937_64 random(3);
    const std::vector<std::byte> bytes = random_bytes(random, 70'000);
    for (const std::size_t length : {1U, 16U, 17U, 128U, 129U, 240U, 241U, 1024U, 1025U, 4096U, 65'537U, 70'000U})
        for (const std::size_t first : {std::size_t{0}, std::size_t{1}, length / 2, length}) {
            const std::uint64_t plain = flowstone_xxh3_plain.whole(bytes.data(), length);
            CAPTURE(length);
            CAPTURE(first);
            CHECK(xxh3_64(bytes.data(), length) == plain);
            Digester digester;
            digester.update(bytes.data(), first);
            digester.update(bytes.data() + first, length - first);
            CHECK(digester.value() == plain);
        }
}

TEST_CASE("scatter in random pieces equals the byte-wise reference") {
    std::mt19937_64 random(1);
    for (int round = 0; round < 3000; ++round) {
        const Sample sample = make_sample(random, false);
        std::vector<std::byte> expected = sample.memory;
        each_byte(sample,
                  [&](std::uint64_t packed, std::uint64_t memory) { expected[memory] = sample.packed[packed]; });
        std::vector<std::byte> actual = sample.memory;
        const Layout layout = layout_of(sample);
        REQUIRE(layout.packed_bytes() == sample.packed.size());
        std::vector<std::byte> by_runs = sample.memory;
        for (std::uint64_t begin = 0; begin < sample.packed.size();) {
            const std::uint64_t end = std::min<std::uint64_t>(sample.packed.size(), begin + 1 + random() % 97);
            layout.scatter(begin, end, sample.packed.data() + begin, actual.data() + sample.origin);
            for (const StridedRuns& runs : layout.runs(begin, end))
                for (std::uint64_t i = 0; i < runs.count; ++i)
                    std::memcpy(by_runs.data() + sample.origin + runs.memory +
                                    static_cast<std::int64_t>(i) * runs.memory_stride,
                                sample.packed.data() + begin + runs.packed + i * runs.packed_stride, runs.bytes);
            begin = end;
        }
        CAPTURE(round);
        REQUIRE(actual == expected);
        REQUIRE(by_runs == expected);
    }
}

TEST_CASE("a matrix that is turned, in pieces of any length, equals the byte-wise reference") {
    std::mt19937_64 random(7);
    for (int round = 0; round < 400; ++round) {
        Sample sample;
        sample.item_bytes = std::uint64_t{1} << random() % 5;
        const std::uint64_t planes = 1 + random() % 2;
        sample.extent_shape = {planes, 1 + random() % 90, 1 + random() % 90};
        sample.shape = {planes, 1 + random() % sample.extent_shape[1], 1 + random() % sample.extent_shape[2]};
        sample.offset = {0, random() % (sample.extent_shape[1] - sample.shape[1] + 1),
                         random() % (sample.extent_shape[2] - sample.shape[2] + 1)};
        const std::uint64_t gap = random() % 3;
        const auto column = static_cast<std::int64_t>((sample.shape[1] + gap) * sample.item_bytes);
        const auto width = static_cast<std::int64_t>(sample.shape[2]);
        sample.strides = {column * width, static_cast<std::int64_t>(sample.item_bytes), column};
        if (random() % 4 == 0) {  // backwards from column to column
            sample.origin = static_cast<std::uint64_t>(column * (width - 1));
            sample.strides = {column * width, static_cast<std::int64_t>(sample.item_bytes), -column};
        }
        sample.memory = random_bytes(random, static_cast<std::size_t>(column * width) * planes + sample.origin + 64);
        sample.packed =
            random_bytes(random, sample.item_bytes * planes * sample.extent_shape[1] * sample.extent_shape[2]);
        std::vector<std::byte> expected = sample.memory;
        each_byte(sample,
                  [&](std::uint64_t packed, std::uint64_t memory) { expected[memory] = sample.packed[packed]; });
        std::vector<std::byte> actual = sample.memory;
        const Layout layout = layout_of(sample);
        for (std::uint64_t begin = 0; begin < sample.packed.size();) {
            const std::uint64_t end = std::min<std::uint64_t>(sample.packed.size(), begin + 1 + random() % 20'000);
            layout.scatter(begin, end, sample.packed.data() + begin, actual.data() + sample.origin);
            begin = end;
        }
        CAPTURE(round);
        REQUIRE(actual == expected);
    }
}

TEST_CASE("gather of any range equals the byte-wise reference") {
    std::mt19937_64 random(2);
    LiveAccess live;
    for (int round = 0; round < 3000; ++round) {
        const Sample sample = make_sample(random, true);
        std::vector<std::byte> dense(sample.packed.size());
        each_byte(sample, [&](std::uint64_t packed, std::uint64_t memory) { dense[packed] = sample.memory[memory]; });
        const std::uint64_t begin = random() % (dense.size() + 1);
        const std::uint64_t end = begin + random() % (dense.size() - begin + 1);
        std::vector<std::byte> actual(end - begin);
        const Layout layout = Layout::whole(sample.item_bytes, sample.shape, sample.strides);
        REQUIRE(layout.gather(begin, end, sample.memory.data() + sample.origin, actual.data(), live) == 0);
        CAPTURE(round);
        REQUIRE(std::equal(actual.begin(), actual.end(), dense.begin() + static_cast<std::ptrdiff_t>(begin)));
    }
}

TEST_CASE("gather of large arrays equals the byte-wise reference, whatever their strides") {
    struct Shape {
        std::uint64_t item_bytes;
        Sizes shape;
        Strides strides;
    };
    const Shape shapes[] = {
        {4, {512, 700}, {4, 2048}},               // transposed
        {4, {64, 3, 7, 50}, {4200, 4, 600, 12}},  // channels last
        {4, {300'000}, {8}},                      // every other one
        {4, {5'000}, {1024}},                     // a column
        {2, {1'000, 600}, {-2'400, 2}},           // rows of 1200 bytes, backwards
        {8, {400, 300}, {-8, 4'000}},             // transposed, backwards
        {1, {7, 200'000}, {0, 1}},                // expanded
        {16, {3, 5'000}, {16, 4'096}},
    };
    std::mt19937_64 random(4);
    LiveAccess live;
    for (const Shape& shape : shapes) {
        Sample sample{
            shape.item_bytes, shape.shape, Sizes(shape.shape.size(), 0), shape.shape, shape.strides, 0, {}, {}};
        std::int64_t below = 0;
        std::int64_t above = static_cast<std::int64_t>(shape.item_bytes);
        std::uint64_t packed = shape.item_bytes;
        for (std::size_t d = 0; d < shape.shape.size(); ++d) {
            const std::int64_t reach = static_cast<std::int64_t>(shape.shape[d] - 1) * shape.strides[d];
            (reach < 0 ? below : above) += reach;
            packed *= shape.shape[d];
        }
        sample.origin = static_cast<std::uint64_t>(-below);
        sample.memory = random_bytes(random, static_cast<std::size_t>(above - below));
        std::vector<std::byte> dense(packed);
        each_byte(sample, [&](std::uint64_t at, std::uint64_t memory) { dense[at] = sample.memory[memory]; });
        const Layout layout = Layout::whole(shape.item_bytes, shape.shape, shape.strides);
        for (int round = 0; round < 4; ++round) {
            const std::uint64_t begin = round == 0 ? 0 : random() % (packed + 1);
            const std::uint64_t end = round == 0 ? packed : begin + random() % (packed - begin + 1);
            std::vector<std::byte> actual(end - begin);
            REQUIRE(layout.gather(begin, end, sample.memory.data() + sample.origin, actual.data(), live) == 0);
            CAPTURE(shape.strides[0]);
            CAPTURE(round);
            REQUIRE(std::equal(actual.begin(), actual.end(), dense.begin() + static_cast<std::ptrdiff_t>(begin)));
        }
    }
}

TEST_CASE("impossible layouts are refused") {
    CHECK_THROWS_AS(Layout::box(4, Sizes{4}, Sizes{2}, Sizes{3}, Strides{4}), std::invalid_argument);
    CHECK_THROWS_AS(Layout::box(0, Sizes{4}, Sizes{0}, Sizes{4}, Strides{4}), std::invalid_argument);
    CHECK_THROWS_AS(Layout::box(4, Sizes{4}, Sizes{0}, Sizes{4}, Strides{}), std::invalid_argument);
    CHECK_THROWS_AS(Layout::whole(8, Sizes{1ULL << 40, 1ULL << 40}, Strides{8, 8}), std::invalid_argument);
    CHECK_THROWS_AS(Layout::whole(8, Sizes(65, 1), Strides(65, 8)), std::invalid_argument);
}

}  // namespace flowstone
