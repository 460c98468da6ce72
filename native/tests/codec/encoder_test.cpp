// Encoders other than identity: what is stored, where, and that it reads back by the table of chunks.
#include <algorithm>
#include <cstring>
#include <map>

#include "tests/io_fixture.h"
#include "tests/simulated/delayed_device.h"

namespace flowstone {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::uint8_t run_length = 200;  // a codec of this test

/// Pairs of a count and a byte; nothing where that is no shorter.
std::uint32_t run_length_encode(const std::byte* bytes, std::uint32_t length, std::byte* out) {
    std::uint32_t end = 0;
    for (std::uint32_t i = 0; i < length;) {
        std::uint32_t last = i + 1;
        while (last < length && bytes[last] == bytes[i] && last - i < 255) ++last;
        if (end + 2 >= length) return 0;
        out[end++] = static_cast<std::byte>(last - i);
        out[end++] = bytes[i];
        i = last;
    }
    return end;
}

Bytes run_length_decode(const Bytes& bytes) {
    Bytes out;
    for (std::size_t i = 0; i < bytes.size(); i += 2)
        out.insert(out.end(), static_cast<std::size_t>(bytes[i]), bytes[i + 1]);
    return out;
}

class RunLength final : public Encoder {
public:
    ChunkEncoding encode(const CapturedChunk& chunk, std::byte* room) const override {
        const std::uint32_t length = run_length_encode(chunk.bytes, chunk.length, room);
        return {ChunkEncoding::Kind::stored, length != 0 ? run_length : codec_raw, length != 0 ? length : chunk.length};
    }
};

class WithoutMemory final : public Encoder {
public:
    ChunkEncoding encode(const CapturedChunk&, std::byte*) const override { throw std::bad_alloc(); }
};

/// Every third large row is long runs of few bytes, in memory and in what is expected.
Sample compressible_sample(std::uint64_t seed) {
    Sample sample = random_sample(seed, 24);
    for (std::size_t i = 0; i < sample.stored.size(); i += 3) {
        if (sample.rows.rows[i].layout != contiguous || sample.stored[i].empty()) continue;
        const std::size_t bytes = sample.stored[i].size(), run = 5000;
        for (std::size_t at = 0; at < bytes; at += run)
            std::memset(sample.memory[i].start() + at, static_cast<int>(at / run % 256), std::min(run, bytes - at));
        std::memcpy(sample.stored[i].data(), sample.memory[i].start(), bytes);
    }
    return sample;
}

/// One file, and what its chunks are stored as.
struct StoredFile {
    IoFixture* fixture;
    std::vector<StoredChunk> chunks;
    std::vector<std::uint64_t> digests;
};

/// Chunks as a native read has them by the table: each a row of its own, checked by its digest. By number.
std::map<std::uint64_t, Bytes> read_stored(const StoredFile& stored) {
    std::map<std::uint64_t, Bytes> chunks;
    ReadExtents rows{{}, {}, stored.digests};
    for (std::uint64_t number = 0; number < stored.chunks.size(); ++number) {
        const StoredChunk& chunk = stored.chunks[number];
        if (chunk.encoded.kind == ChunkEncoding::Kind::same) continue;
        Bytes& bytes = chunks[number];
        bytes.resize(chunk.encoded.length);
        rows.rows.push_back({chunk.offset, chunk.encoded.length, reinterpret_cast<std::uint64_t>(bytes.data()), number,
                             0, 1, contiguous, 0});
    }
    const auto load = stored.fixture->run(rows);
    REQUIRE_FALSE(load->fault());
    REQUIRE(load->bad_chunks().empty());
    for (auto& [number, bytes] : chunks)
        if (stored.chunks[number].encoded.codec == run_length) bytes = run_length_decode(bytes);
    return chunks;
}

/// What the chunks of a sample hold, by number.
std::map<std::uint64_t, Bytes> logical(const Sample& sample) {
    std::map<std::uint64_t, Bytes> chunks;
    for (std::size_t i = 0; i < sample.stored.size(); ++i)
        for (std::uint64_t at = 0, number = sample.rows.rows[i].chunk; at < sample.stored[i].size();
             at += chunk_bytes, ++number) {
            const auto begin = sample.stored[i].begin() + static_cast<std::ptrdiff_t>(at);
            const std::uint64_t length = std::min(chunk_bytes, sample.stored[i].size() - at);
            chunks[number] = Bytes(begin, begin + static_cast<std::ptrdiff_t>(length));
        }
    return chunks;
}

std::uint64_t count_same(const std::vector<StoredChunk>& chunks) {
    return static_cast<std::uint64_t>(std::count_if(chunks.begin(), chunks.end(), [](const StoredChunk& chunk) {
        return chunk.encoded.kind == ChunkEncoding::Kind::same;
    }));
}

std::shared_ptr<const Encoder> against(const std::vector<std::uint64_t>& base) {
    BaseChunks chunks;
    for (const std::uint64_t digest : base) chunks.push_back(BaseChunk{digest});
    return delta_encoder(std::move(chunks));
}

void check_apart(std::vector<StoredChunk> chunks, std::uint64_t file_end) {
    std::sort(chunks.begin(), chunks.end(),
              [](const StoredChunk& a, const StoredChunk& b) { return a.offset < b.offset; });
    std::uint64_t end = 0;
    for (const StoredChunk& chunk : chunks) {
        if (chunk.encoded.kind == ChunkEncoding::Kind::same) continue;
        REQUIRE(chunk.offset >= end);
        end = chunk.offset + chunk.encoded.length;
    }
    REQUIRE(end <= file_end);
}

}  // namespace

TEST_CASE("identity keeps every chunk where it is planned, as without an encoder") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        Sample sample = random_sample(3, 24);
        IoFixture fixture(setup, sample.file_bytes);
        sample.rows.encoder = identity_encoder();
        const auto job = fixture.run(sample.rows);
        REQUIRE_FALSE(job->fault());
        CHECK(same(fixture.scratch.contents(), sample.expected));
        CHECK(job->file_ends().empty());
        CHECK(read_stored({&fixture, job->stored(), job->digests()}) == logical(sample));
    }
}

TEST_CASE("what an encoder shortens is appended, and reads back by the table of chunks") {
    for (const Setup& setup : setups())
        for (std::uint64_t seed = 0; seed < 3; ++seed) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(seed);
            Sample sample = compressible_sample(seed);
            IoFixture fixture(setup, sample.file_bytes, nullptr, seed % 2 ? 2 : 20);
            sample.rows.encoder = std::make_shared<RunLength>();
            const auto job = fixture.run(sample.rows);
            REQUIRE_FALSE(job->fault());
            const std::vector<StoredChunk> stored = job->stored();
            REQUIRE(std::any_of(stored.begin(), stored.end(),
                                [](const StoredChunk& chunk) { return chunk.encoded.codec == run_length; }));
            REQUIRE(std::any_of(stored.begin(), stored.end(),
                                [](const StoredChunk& chunk) { return chunk.encoded.codec == codec_raw; }));
            const std::uint64_t file_end = job->file_ends().at(0);
            CHECK(file_end % block_alignment_bytes == 0);
            CHECK(file_end == job->done_bytes());
            CHECK(file_end < sample.file_bytes);
            check_apart(stored, file_end);
            CHECK(read_stored({&fixture, stored, job->digests()}) == logical(sample));
        }
}

TEST_CASE("chunks that are the base's are not stored again") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        Sample sample = plain_sample(9 * mib + 5, 64);
        IoFixture before(setup, sample.file_bytes);
        const auto base = before.run(sample.rows);
        REQUIRE_FALSE(base->fault());
        for (const std::uint64_t at : {3 * mib + 17, 9 * mib + 4}) {
            sample.memory[0].start()[at] ^= std::byte{1};
            sample.stored[0][at] ^= std::byte{1};
        }
        sample.rows.encoder = against(base->digests());
        IoFixture fixture(setup, sample.file_bytes);
        const auto job = fixture.run(sample.rows);
        REQUIRE_FALSE(job->fault());
        CHECK(count_same(job->stored()) == 8);
        // Two windows: one whole chunk, and one of five bytes in a block of its own.
        CHECK(job->file_ends().at(0) == mib + block_alignment_bytes);
        auto chunks = read_stored({&fixture, job->stored(), job->digests()});
        CHECK(chunks.size() == 2);
        chunks.merge(read_stored({&before, base->stored(), base->digests()}));
        CHECK(chunks == logical(sample));

        // One read of both files, by a table that says of each chunk which of them has it.
        Memory target(sample.stored[0].size(), 64);
        ReadExtents rows{{}, {}, job->digests()};
        rows.rows.push_back({64, sample.stored[0].size(), target.address(), 0, 0, sample.rows.chunks, contiguous, 0});
        for (std::uint64_t number = 0; number < sample.rows.chunks; ++number) {
            const bool same = job->stored()[number].encoded.kind == ChunkEncoding::Kind::same;
            const StoredChunk chunk = same ? base->stored()[number] : job->stored()[number];
            rows.stored.push_back({chunk.offset, chunk.encoded.length, same ? 0U : 1U});
        }
        const auto load = fixture.engine.read(fixture.arena, {before.scratch.file(), fixture.scratch.file()},
                                              std::make_shared<ReadExtents>(rows), {});
        REQUIRE(load->wait(forever_s));
        REQUIRE_FALSE(load->fault());
        CHECK(load->bad_chunks().empty());
        CHECK(std::memcmp(target.start(), sample.stored[0].data(), sample.stored[0].size()) == 0);
    }
}

TEST_CASE("of two files the one that is for the encoder refers to the base, and the other keeps its places") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample changing = random_sample(5, 24);
        const Sample resting = plain_sample(5 * mib + 7, 64);
        WriteExtents rows = changing.rows;
        for (WriteExtent row : resting.rows.rows) {
            row.file = 1;
            row.chunk += changing.rows.chunks;
            rows.rows.push_back(row);
        }
        rows.chunks += resting.rows.chunks;
        IoFixture fixture(setup, changing.file_bytes, nullptr, 4);
        const ScratchFile before(setup.direct, resting.file_bytes);
        const ScratchFile after(setup.direct, resting.file_bytes);
        const auto write = [&](const ScratchFile& second) {
            auto job = fixture.engine.write(
                fixture.arena, {{fixture.scratch.file(), changing.file_bytes}, {second.file(), resting.file_bytes}},
                std::make_shared<WriteExtents>(rows), {});
            REQUIRE(job->wait(forever_s));
            REQUIRE_FALSE(job->fault());
            return job;
        };
        const auto base = write(before);
        CHECK(base->file_ends().empty());

        resting.memory[0].start()[2 * mib + 3] ^= std::byte{1};
        rows.encoded_from = 1;
        BaseChunks known;
        for (const std::uint64_t digest : base->digests()) known.push_back(BaseChunk{digest});
        known.back().reset();  // the base has no such chunk: it is stored, though its bytes are the same
        rows.encoder = delta_encoder(known);
        const auto job = write(after);
        CHECK(same(fixture.scratch.contents(), changing.expected));
        CHECK(job->file_ends().at(1) == mib + block_alignment_bytes);
        const std::vector<StoredChunk> stored = job->stored();
        CHECK(count_same(stored) == 4);
        for (std::uint64_t number = 0; number < changing.rows.chunks; ++number) {
            CHECK(stored[number].offset == base->stored()[number].offset);
            CHECK(stored[number].encoded.kind == ChunkEncoding::Kind::stored);
        }
        CHECK(job->digests()[changing.rows.chunks + 1] == base->digests()[changing.rows.chunks + 1]);
        CHECK(job->digests()[changing.rows.chunks + 2] != base->digests()[changing.rows.chunks + 2]);
        for (const std::uint64_t number : {changing.rows.chunks + 2, changing.rows.chunks + 5}) {
            const std::uint64_t at = (number - changing.rows.chunks) * mib;
            const auto found = after.contents();
            CHECK(std::memcmp(found.data() + stored[number].offset, resting.memory[0].start() + at,
                              stored[number].encoded.length) == 0);
        }
    }
}

TEST_CASE("a save of what is all the base's writes nothing") {
    const Setup setup = setups().front();
    Sample sample = random_sample(4, 24);
    IoFixture fixture(setup, sample.file_bytes);
    const auto base = fixture.run(sample.rows);
    sample.rows.encoder = against(base->digests());
    const auto job = fixture.run(sample.rows);
    REQUIRE_FALSE(job->fault());
    CHECK(job->requests() == 0);
    CHECK(count_same(job->stored()) == sample.rows.chunks);
    CHECK(same(fixture.scratch.contents(), sample.expected));
}

TEST_CASE("a header stays where it is planned, and encoded windows begin behind it") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        Sample sample = plain_sample(3 * mib);
        const Memory header(2 * block_alignment_bytes, 0);
        std::memset(header.start(), 0x20, 2 * block_alignment_bytes);
        sample.rows.rows[0].offset = 4 * block_alignment_bytes;
        sample.rows.rows.insert(sample.rows.rows.begin(),
                                {0, 2 * block_alignment_bytes, header.address(), no_digest, contiguous, 0});
        sample.rows.encoder = std::make_shared<RunLength>();
        IoFixture fixture(setup, sample.file_bytes + 4 * block_alignment_bytes);
        const auto job = fixture.run(sample.rows);
        REQUIRE_FALSE(job->fault());
        CHECK(std::memcmp(fixture.scratch.contents().data(), header.start(), 2 * block_alignment_bytes) == 0);
        CHECK(job->stored().at(0).offset >= 2 * block_alignment_bytes);
        CHECK(job->file_ends().at(0) == 2 * block_alignment_bytes + 3 * mib);  // random bytes are stored raw
        sample.rows.rows[0].length -= 1;
        CHECK_THROWS_AS(fixture.start(sample.rows), std::invalid_argument);
    }
}

TEST_CASE("a stored chunk that was damaged is found by the digest of what is stored") {
    const Setup setup = setups().front();
    Sample sample = compressible_sample(1);
    sample.rows.encoder = std::make_shared<RunLength>();
    IoFixture fixture(setup, sample.file_bytes);
    const auto job = fixture.run(sample.rows);
    const std::vector<StoredChunk> stored = job->stored();
    const auto number = static_cast<std::uint64_t>(
        std::find_if(stored.begin(), stored.end(),
                     [](const StoredChunk& chunk) { return chunk.encoded.codec == run_length; }) -
        stored.begin());
    fixture.scratch.put(stored[number].offset, std::byte{0});
    Bytes target(stored[number].encoded.length);
    const ReadExtents rows{{{stored[number].offset, target.size(), reinterpret_cast<std::uint64_t>(target.data()),
                             number, 0, 1, contiguous, 0}},
                           {},
                           job->digests()};
    CHECK(fixture.run(rows)->bad_chunks() == std::vector<std::uint64_t>{number});
}

TEST_CASE("an encoder that gets no memory fails its job by name") {
    for (const Setup& setup : setups()) {
        Sample sample = random_sample(2, 24);
        sample.rows.encoder = std::make_shared<WithoutMemory>();
        IoFixture fixture(setup, sample.file_bytes);
        const auto job = fixture.run(sample.rows);
        REQUIRE(job->fault());
        CHECK(job->fault()->error == ENOMEM);
    }
}

TEST_CASE("a lazy source that changed before it was captured is found with an encoder, too") {
    for (const Setup& setup : setups()) {
        Sample sample = plain_sample(12 * mib);
        sample.rows.rows[0].lazy = true;
        sample.rows.encoder = std::make_shared<RunLength>();
        IoFixture fixture(setup, sample.file_bytes);
        WriteOptions options;
        options.bytes_per_s = 1;  // the first window, and then none until expedited
        auto job = fixture.engine.write(fixture.arena, {{fixture.scratch.file(), fixture.file_bytes}},
                                        std::make_shared<WriteExtents>(sample.rows), options);
        std::memset(sample.memory[0].start() + 10 * mib, 0, 2 * mib);
        job->expedite();
        REQUIRE(job->wait(forever_s));
        REQUIRE(job->fault());
        CHECK(job->fault()->operation == "capture");
    }
}

TEST_CASE("what lies on a device is encoded once it has come") {
    for (const Setup& setup : setups()) {
        Sample sample = compressible_sample(2);
        std::uint64_t bytes = 1;
        for (const WriteExtent& row : sample.rows.rows) bytes += row.length;
        const auto device = std::make_shared<DelayedDevice>(bytes, std::chrono::microseconds(50));
        std::uint64_t at = 0;
        for (WriteExtent& row : sample.rows.rows) {
            if (row.layout != contiguous) continue;
            std::memcpy(device->inside() + at, row.source(), row.length);
            row.address = device->address() + at;
            row.device = 0;
            at += row.length;
        }
        sample.rows.devices = {device};
        sample.rows.samples = {{}};
        sample.rows.encoder = std::make_shared<RunLength>();
        IoFixture fixture(setup, sample.file_bytes);
        const auto job = fixture.run(sample.rows);
        REQUIRE_FALSE(job->fault());
        CHECK(job->file_ends().at(0) < sample.file_bytes);
        CHECK(read_stored({&fixture, job->stored(), job->digests()}) == logical(sample));
    }
}

TEST_CASE("windows for an encoder hold every chunk once, and whole") {
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
        Sample sample = random_sample(seed, 40);
        sample.rows.encoder = std::make_shared<RunLength>();
        std::vector<int> seen(sample.rows.chunks, 0);
        std::uint64_t end = 0;
        for (const WriteWindow& window : plan_chunk_windows(sample.rows, 2 * mib, 8 * kib)) {
            REQUIRE(window.appended);
            REQUIRE(window.end - window.begin <= 2 * mib);
            REQUIRE(window.begin >= end);
            end = window.end;
            for (std::size_t i = window.first_row; i < window.last_row; ++i) {
                const WriteExtent& row = sample.rows.rows[i];
                for (std::uint64_t chunk = 0; chunk < chunk_count(row.length); ++chunk) {
                    const std::uint64_t low = row.offset + chunk * chunk_bytes,
                                        high = std::min(low + chunk_bytes, row.end());
                    if (low >= window.end || high <= window.begin) continue;
                    REQUIRE(low >= window.begin);
                    REQUIRE(high <= window.end);
                    ++seen[row.chunk + chunk];
                }
            }
        }
        REQUIRE(std::count(seen.begin(), seen.end(), 1) == static_cast<std::ptrdiff_t>(seen.size()));
    }
}

}  // namespace flowstone
