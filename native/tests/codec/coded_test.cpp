// Files written with codec `planes`, and read by the table of chunks into every kind of target.
#include <algorithm>
#include <cstring>
#include <random>

#include "tests/io_fixture.h"
#include "tests/simulated/delayed_device.h"
#include "codec/digest.h"
#include "codec/planes.h"

namespace flowstone {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::uint64_t width = 4;

/// Floats of one row, in memory and in what is expected.
Sample float_sample(std::uint64_t bytes) {
    Sample sample = plain_sample(bytes, 64);
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 0.02F);
    for (std::uint64_t at = 0; at + width <= bytes; at += width) {
        const float drawn = normal(random);
        std::memcpy(sample.memory[0].start() + at, &drawn, width);
    }
    std::memcpy(sample.stored[0].data(), sample.memory[0].start(), bytes);
    return sample;
}

/// One file whose floats are coded, and what a read needs to know of it.
struct EncodedFile {
    Sample sample;
    IoFixture fixture;
    std::shared_ptr<WriteJob> job;

    EncodedFile(const Setup& setup, std::uint64_t bytes, BaseChunks base = {})
        : sample(float_sample(bytes)), fixture(setup, sample.file_bytes, nullptr, 4) {
        sample.rows.encoder = planes_encoder(std::vector<std::uint8_t>(sample.rows.chunks, width), std::move(base));
        job = fixture.run(sample.rows);
        REQUIRE_FALSE(job->fault());
    }

    /// One row of all chunks.
    ReadExtents rows(std::uint64_t address, std::int64_t layout = contiguous) const {
        ReadExtents rows{{}, {}, job->digests()};
        rows.rows.push_back({0, sample.stored[0].size(), address, 0, 0, sample.rows.chunks, layout, 0});
        for (const StoredChunk& chunk : job->stored())
            rows.stored.push_back({chunk.offset, chunk.encoded.length, 0, chunk.encoded.codec});
        return rows;
    }
};

bool has(const EncodedFile& coded, const std::byte* bytes) {
    return std::memcmp(bytes, coded.sample.stored[0].data(), coded.sample.stored[0].size()) == 0;
}

constexpr std::uint64_t some_bytes = 5 * mib + 300 * kib;

}  // namespace

TEST_CASE("coded floats are shorter in the file, and a read decodes them into the target") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        EncodedFile coded(setup, some_bytes);
        CHECK(coded.job->file_ends().at(0) < some_bytes * 9 / 10);
        for (const StoredChunk& chunk : coded.job->stored()) CHECK(chunk.encoded.codec == codec_planes);
        Memory target(some_bytes, 64);
        const auto load = coded.fixture.run(coded.rows(target.address()));
        REQUIRE_FALSE(load->fault());
        CHECK(load->bad_chunks().empty());
        CHECK(load->touched() == std::vector<bool>{true});
        CHECK(has(coded, target.start()));
    }
}

TEST_CASE("coded chunks are scattered, sent to a device, and verified without a target") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        EncodedFile coded(setup, some_bytes);
        const auto read = [&](const ReadExtents& rows) {
            auto load = coded.fixture.run(rows);
            REQUIRE_FALSE(load->fault());
            CHECK(load->bad_chunks().empty());
            return load;
        };
        CHECK(read(coded.rows(verify_only))->touched() == std::vector<bool>{false});

        Bytes strided(2 * some_bytes);
        ReadExtents rows = coded.rows(reinterpret_cast<std::uint64_t>(strided.data()), 0);
        const std::uint64_t elements = some_bytes / width;
        const std::vector<std::uint64_t> shape{elements}, offset{0};
        rows.layouts.push_back(Layout::box(width, shape, offset, shape, std::vector<std::int64_t>{2 * width}));
        read(rows);
        Bytes dense(some_bytes);
        for (std::uint64_t i = 0; i < elements; ++i)
            std::memcpy(dense.data() + i * width, strided.data() + 2 * i * width, width);
        CHECK(has(coded, dense.data()));

        const auto device = std::make_shared<DelayedDevice>(some_bytes, std::chrono::microseconds(50));
        rows = coded.rows(device->address());
        rows.devices = {device};
        rows.rows[0].device = 0;
        read(rows);
        CHECK(has(coded, device->inside()));
    }
}

TEST_CASE("a chunk whose digest is right and which does not decode is bad, and its target is as before") {
    const Setup setup = setups().front();
    EncodedFile coded(setup, some_bytes);
    const StoredChunk chunk = coded.job->stored().at(2);
    Bytes stored(chunk.encoded.length);
    const Bytes file = coded.fixture.scratch.contents();
    std::memcpy(stored.data(), file.data() + chunk.offset, stored.size());
    coded.fixture.scratch.put(chunk.offset, std::byte{3});  // no element is that long
    stored[0] = std::byte{3};
    Memory target(some_bytes, 64);
    std::memset(target.start(), 0x11, some_bytes);
    ReadExtents rows = coded.rows(target.address());
    rows.digests[2] = xxh3_64(stored.data(), stored.size());
    const auto load = coded.fixture.start(rows, false);
    REQUIRE(load->wait(forever_s));
    CHECK(load->bad_chunks() == std::vector<std::uint64_t>{2});
    CHECK(all_are(std::byte{0x11}, target.start() + 2 * mib, mib));
    CHECK(std::memcmp(target.start() + 3 * mib, coded.sample.stored[0].data() + 3 * mib, mib) == 0);
}

TEST_CASE("a table that claims what no codec makes is refused before a byte is read") {
    EncodedFile coded(setups().front(), some_bytes);
    Memory target(some_bytes, 64);
    const auto refused = [&](const auto& change) {
        ReadExtents rows = coded.rows(target.address());
        change(rows.stored[1]);
        CHECK_THROWS_AS(coded.fixture.start(rows), std::invalid_argument);
    };
    refused([](ChunkPlace& place) { place.codec = 2; });
    refused([](ChunkPlace& place) { place.codec = codec_raw; });
    refused([](ChunkPlace& place) { place.length = chunk_bytes; });
}

TEST_CASE("a coded chunk of the base is found by the captured bytes, and by the stored ones") {
    const Setup setup = setups().front();
    const EncodedFile before(setup, some_bytes);
    BaseChunks captured, stored;
    for (std::size_t number = 0; number < before.job->stored().size(); ++number) {
        captured.push_back(BaseChunk{before.job->stored()[number].captured_digest});
        stored.push_back(BaseChunk{before.job->digests()[number], codec_planes});
    }
    stored[1]->digest ^= 1;
    const auto count_same = [](const EncodedFile& coded) {
        const std::vector<StoredChunk> chunks = coded.job->stored();
        return std::count_if(chunks.begin(), chunks.end(),
                             [](const StoredChunk& chunk) { return chunk.encoded.kind == ChunkEncoding::Kind::same; });
    };
    CHECK(count_same(EncodedFile(setup, some_bytes, captured)) == static_cast<std::ptrdiff_t>(captured.size()));
    CHECK(count_same(EncodedFile(setup, some_bytes, stored)) == static_cast<std::ptrdiff_t>(stored.size()) - 1);
}

}  // namespace flowstone
