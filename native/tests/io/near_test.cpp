// Chunks with a base (codec xor): read into every kind of target, damaged, and claimed wrongly.
#include <algorithm>
#include <cstring>
#include <random>

#include "tests/io_fixture.h"
#include "codec/codecs.h"
#include "tests/simulated/delayed_device.h"
#include "codec/digest.h"
#include "codec/planes.h"

namespace flowstone {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::uint64_t width = 4;
constexpr std::uint64_t file_room = 16 * mib;

Bytes encoded(const Bytes& data) {
    static const planes::Probe probe;
    Bytes room(planes::room_bytes(data.size()));
    const std::size_t length =
        planes::encode(data.data(), data.size(), width, probe.worthwhile(data.data(), data.size(), width), room.data());
    REQUIRE(length != 0);
    room.resize(length);
    return room;
}

/// Rows of floats whose chunks are stored as planes of what is left after XOR with a base; every other base is coded.
struct NearFile {
    IoFixture fixture;
    std::vector<Bytes> data;  // of each row
    ReadExtents rows;         // without targets
    std::uint64_t end = 0;

    explicit NearFile(const Setup& setup, const std::vector<std::uint64_t>& lengths)
        : fixture(setup, file_room, nullptr, 4) {
        std::mt19937 random(1);
        std::normal_distribution<float> normal(0, 0.02F);
        for (const std::uint64_t length : lengths) {
            Bytes now(length), before(length);
            for (std::uint64_t at = 0; at + width <= length; at += width) {
                const float old = normal(random), drawn = old * (1 + normal(random) * 1e-3F);
                std::memcpy(before.data() + at, &old, width);
                std::memcpy(now.data() + at, &drawn, width);
            }
            rows.rows.push_back({0, length, verify_only, rows.stored.size(), 0, chunk_count(length), contiguous, 0});
            for (std::uint64_t at = 0; at < length; at += chunk_bytes) {
                const std::uint64_t to = std::min(at + chunk_bytes, length);
                add({now.begin() + static_cast<std::ptrdiff_t>(at), now.begin() + static_cast<std::ptrdiff_t>(to)},
                    {before.begin() + static_cast<std::ptrdiff_t>(at),
                     before.begin() + static_cast<std::ptrdiff_t>(to)});
            }
            data.push_back(std::move(now));
        }
    }

    void add(Bytes now, const Bytes& before) {
        const std::uint64_t digest = xxh3_64(now.data(), now.size());
        xor_into(now.data(), before.data(), now.size());
        const Bytes own = encoded(now);
        const bool is_coded = rows.stored.size() % 2 == 1;
        const Bytes base = is_coded ? encoded(before) : before;
        rows.bases.push_back({rows.stored.size(), digest, place(base, is_coded ? codec_planes : codec_raw),
                              xxh3_64(base.data(), base.size())});
        rows.stored.push_back(place(own, codec_xor));
        rows.digests.push_back(xxh3_64(own.data(), own.size()));
    }

    ChunkPlace place(const Bytes& stored, std::uint8_t codec) {
        const ChunkPlace place{end, static_cast<std::uint32_t>(stored.size()), 0, codec};
        fixture.scratch.put(end, stored);
        end += stored.size();
        return place;
    }
};

const std::vector<std::uint64_t> lengths{2 * mib + 300 * kib, 100 * kib, 100 * kib, 60 * kib, 4 * kib};

}  // namespace

TEST_CASE("chunks with a base are read into memory, strided memory, a device, and verified without a target") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        NearFile near(setup, lengths);
        const auto read = [&](const ReadExtents& rows) {
            auto load = near.fixture.run(rows);
            REQUIRE_FALSE(load->fault());
            CHECK(load->bad_chunks().empty());
            return load;
        };
        CHECK(read(near.rows)->touched() == std::vector<bool>(lengths.size(), false));

        std::vector<Bytes> found;
        ReadExtents rows = near.rows;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
            found.emplace_back(lengths[i]);
            rows.rows[i].address = reinterpret_cast<std::uint64_t>(found[i].data());
        }
        const auto load = read(rows);
        CHECK(found == near.data);
        CHECK(load->requests() < 2 * near.rows.stored.size());  // several small chunks share a window

        Bytes strided(2 * lengths[0]);
        rows = near.rows;
        rows.rows.resize(1);
        rows.rows[0].address = reinterpret_cast<std::uint64_t>(strided.data());
        rows.rows[0].layout = 0;
        const std::vector<std::uint64_t> shape{lengths[0] / width}, offset{0};
        rows.layouts.push_back(Layout::box(width, shape, offset, shape, std::vector<std::int64_t>{2 * width}));
        read(rows);
        for (std::uint64_t at = 0; at < lengths[0]; at += width)
            if (std::memcmp(strided.data() + 2 * at, near.data[0].data() + at, width) != 0) FAIL(at);

        const auto device = std::make_shared<DelayedDevice>(lengths[0], std::chrono::microseconds(50));
        rows = near.rows;
        rows.rows.resize(1);
        rows.rows[0].address = device->address();
        rows.devices = {device};
        rows.rows[0].device = 0;
        read(rows);
        CHECK(std::memcmp(device->inside(), near.data[0].data(), lengths[0]) == 0);
    }
}

TEST_CASE("a base that is damaged, swapped or of other data makes the chunk bad, and its target is as before") {
    NearFile near(setups().front(), {3 * mib});
    const auto bad = [&](const auto& change) {
        Bytes target(3 * mib, std::byte{0x11});
        ReadExtents rows = near.rows;
        rows.rows[0].address = reinterpret_cast<std::uint64_t>(target.data());
        change(rows);
        const auto load = near.fixture.start(rows, false);
        REQUIRE(load->wait(forever_s));
        REQUIRE_FALSE(load->fault());
        for (const std::uint64_t chunk : load->bad_chunks()) {
            const auto begin = target.begin() + static_cast<std::ptrdiff_t>(chunk * mib);
            CHECK(std::all_of(begin, begin + static_cast<std::ptrdiff_t>(mib),
                              [](std::byte byte) { return byte == std::byte{0x11}; }));
        }
        return load->bad_chunks();
    };
    CHECK(bad([](ReadExtents&) {}).empty());
    CHECK(bad([](ReadExtents& rows) { rows.bases[1].data_digest ^= 1; }) == std::vector<std::uint64_t>{1});
    CHECK(bad([](ReadExtents& rows) { rows.bases[1].digest ^= 1; }) == std::vector<std::uint64_t>{1});
    CHECK(bad([](ReadExtents& rows) {
              std::swap(rows.bases[0].place, rows.bases[2].place),
                  std::swap(rows.bases[0].digest, rows.bases[2].digest);
          }) == std::vector<std::uint64_t>{0, 2});
    near.fixture.scratch.put(near.rows.bases[2].place.offset + 1000, std::byte{0x77});
    CHECK(bad([](ReadExtents&) {}) == std::vector<std::uint64_t>{2});
}

TEST_CASE("a table that claims a base that no chunk can have is refused before a byte is read") {
    NearFile near(setups().front(), {3 * mib});
    const auto refused = [&](const auto& change) {
        ReadExtents rows = near.rows;
        change(rows);
        CHECK_THROWS_AS(near.fixture.start(rows), std::invalid_argument);
    };
    refused([](ReadExtents& rows) { rows.bases[1].place.codec = codec_xor; });
    refused([](ReadExtents& rows) { rows.bases[1].place.codec = 77; });
    refused([](ReadExtents& rows) { rows.bases[1].place.file = 1; });
    refused([](ReadExtents& rows) { rows.bases[1].place.length = 0; });
    refused([](ReadExtents& rows) { rows.bases[1].place.length = chunk_bytes; });
    refused([](ReadExtents& rows) { rows.bases[1].place.offset = UINT64_MAX - 5; });
    refused([](ReadExtents& rows) { rows.bases[0].place.length -= 1; });  // raw
    refused([](ReadExtents& rows) { rows.bases.pop_back(); });
    refused([](ReadExtents& rows) { rows.bases[2].chunk = 1; });
    refused([](ReadExtents& rows) { rows.bases[2].chunk = 3; });
    refused([](ReadExtents& rows) { rows.stored[1].codec = codec_planes; });
    refused([](ReadExtents& rows) { rows.stored.clear(); });
}

}  // namespace flowstone
