// Chunks that are rounded from others (codec cast), of which the two halves lie in two files.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>

#include "tests/io_fixture.h"
#include "codec/codecs.h"
#include "tests/simulated/delayed_device.h"
#include "codec/digest.h"
#include "codec/planes.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// Of <sanitizer/allocator_interface.h>, which not every compiler's package has.
extern "C" std::size_t __sanitizer_get_current_allocated_bytes();
#else
#include <malloc.h>
#endif

namespace flowstone {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::uint64_t width = 4;

std::uint64_t allocated_bytes() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return __sanitizer_get_current_allocated_bytes();
#else
    const struct mallinfo2 found = ::mallinfo2();
    return found.uordblks + found.hblkhd;
#endif
}

Bytes encoded(const Bytes& data) {
    static const planes::Probe probe;
    Bytes room(planes::room_bytes(data.size()));
    const std::size_t length =
        planes::encode(data.data(), data.size(), width, probe.worthwhile(data.data(), data.size(), width), room.data());
    REQUIRE(length != 0);
    room.resize(length);
    return room;
}

enum class Source { raw, coded, near, far };  // the last two have a base, which is almost the same, or not at all

/// One row of bfloat16, whose chunks are rounded from floats: the first half of each from one file, the second one from
/// another.
struct TwoFiles {
    IoFixture fixture;
    ScratchFile other;
    Bytes data;  // of the row
    ReadExtents rows;  // without a target
    std::array<std::uint64_t, 2> ends{};

    TwoFiles(const Setup& setup, const std::vector<Source>& chunks, std::uint64_t last_bytes = chunk_bytes,
             FaultInjector injector = nullptr, std::uint64_t blocks = 4)
        : fixture(setup, 4 * mib * chunks.size(), std::move(injector), blocks),
          other(setup.direct, 4 * mib * chunks.size()) {
        std::mt19937 random(3);
        std::normal_distribution<float> normal(0, 0.02F);
        Bytes noise(chunk_bytes);
        for (std::uint64_t at = 0; at < chunk_bytes; at += width) {
            const float drawn = normal(random);
            std::memcpy(noise.data() + at, &drawn, width);
        }
        rows.digests.resize(chunks.size());
        rows.stored.resize(chunks.size());
        for (std::size_t i = 0; i < chunks.size(); ++i)
            add(i, chunks[i], noise, i + 1 == chunks.size() ? last_bytes : chunk_bytes);
        rows.rows.push_back({0, data.size(), verify_only, 0, 0, chunks.size(), contiguous, 0});
    }

    void add(std::size_t number, Source source, const Bytes& noise, std::uint64_t bytes) {
        Bytes chunk(bytes);
        rows.stored[number] = {rows.stored.size(), static_cast<std::uint32_t>(cast::Element::bfloat16), 0, codec_cast};
        for (std::uint64_t begin = 0; begin < bytes; begin += cast::half_bytes) {
            const std::uint64_t length = 2 * std::min(cast::half_bytes, bytes - begin);
            Bytes singles(noise.begin(), noise.begin() + static_cast<std::ptrdiff_t>(length));
            const float mark = static_cast<float>(number) + static_cast<float>(begin);
            std::memcpy(singles.data() + 40, &mark, width);
            REQUIRE(cast::round(singles.data(), length / width, cast::Element::bfloat16, chunk.data() + begin));
            store(singles, noise, source, begin == 0 ? 0 : 1);
        }
        rows.digests[number] = xxh3_64(chunk.data(), bytes);
        data.insert(data.end(), chunk.begin(), chunk.end());
    }

    void store(Bytes singles, const Bytes& noise, Source source, std::uint32_t file) {
        const bool has_base = source == Source::near || source == Source::far;
        if (has_base) {
            Bytes before(noise.begin(), noise.begin() + static_cast<std::ptrdiff_t>(singles.size()));
            if (source == Source::far) std::rotate(before.begin(), before.begin() + 4000, before.end());
            const std::uint64_t digest = xxh3_64(singles.data(), singles.size());
            rows.bases.push_back(
                {rows.stored.size(), digest, place(before, codec_raw, file), xxh3_64(before.data(), before.size())});
            ends[file] += mib;  // that no chunk has
            xor_into(singles.data(), before.data(), singles.size());
        }
        const Bytes stored = source == Source::raw ? singles : encoded(singles);
        rows.digests.push_back(xxh3_64(stored.data(), stored.size()));
        rows.stored.push_back(place(stored,
                                    source == Source::raw ? codec_raw
                                        : has_base        ? codec_xor
                                                          : codec_planes,
                                    file));
    }

    ChunkPlace place(const Bytes& stored, std::uint8_t codec, std::uint32_t file) {
        const ChunkPlace place{ends[file] + 100 * file, static_cast<std::uint32_t>(stored.size()), file, codec};
        (file == 0 ? fixture.scratch : other).put(place.offset, stored);
        ends[file] += stored.size();
        return place;
    }

    /// Index of what is stored for a half of a chunk.
    std::uint64_t half(std::uint64_t chunk, std::uint64_t number) const { return rows.stored[chunk].offset + number; }

    std::shared_ptr<ReadJob> run(const ReadExtents& wanted, const ReadOptions& options = {}, bool has_other = true) {
        auto job = fixture.engine.read(fixture.arena, {fixture.scratch.file(), has_other ? other.file() : nullptr},
                                       std::make_shared<ReadExtents>(wanted), options);
        REQUIRE(job->wait(forever_s));
        return job;
    }

    ReadExtents into(Bytes& target) const {
        target.assign(data.size(), std::byte{0x11});
        ReadExtents wanted = rows;
        wanted.rows[0].address = reinterpret_cast<std::uint64_t>(target.data());
        return wanted;
    }
};

const std::vector<Source> each{Source::raw, Source::coded, Source::near, Source::far, Source::near};

}  // namespace

TEST_CASE("a load that rounds chunks of two files writes to dense, strided and device memory, and to no target") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        TwoFiles files(setup, each, 300 * kib);
        const auto read = [&](const ReadExtents& wanted) {
            const auto load = files.run(wanted);
            REQUIRE_FALSE(load->fault());
            CHECK(load->bad_chunks().empty());
            return load;
        };
        CHECK(read(files.rows)->touched() == std::vector<bool>{false});
        Bytes target;
        const auto load = read(files.into(target));
        CHECK(target == files.data);
        CHECK(load->touched() == std::vector<bool>{true});
        std::uint64_t stored = 0;
        for (std::size_t i = each.size(); i < files.rows.stored.size(); ++i) stored += files.rows.stored[i].length;
        CHECK(load->done_bytes() == stored);

        Bytes strided(2 * files.data.size());
        ReadExtents wanted = files.rows;
        wanted.rows[0].address = reinterpret_cast<std::uint64_t>(strided.data());
        wanted.rows[0].layout = 0;
        const std::vector<std::uint64_t> shape{files.data.size() / 2}, offset{0};
        wanted.layouts.push_back(Layout::box(2, shape, offset, shape, std::vector<std::int64_t>{4}));
        read(wanted);
        for (std::uint64_t at = 0; at < files.data.size(); at += 2)
            if (std::memcmp(strided.data() + 2 * at, files.data.data() + at, 2) != 0) FAIL(at);

        const auto device = std::make_shared<DelayedDevice>(files.data.size(), std::chrono::microseconds(50));
        wanted = files.rows;
        wanted.rows[0].address = device->address();
        wanted.devices = {device};
        wanted.rows[0].device = 0;
        read(wanted);
        CHECK(std::memcmp(device->inside(), files.data.data(), files.data.size()) == 0);
    }
}

TEST_CASE("halves of chunks in two files, and many rows of one chunk, take no memory beside the arena") {
    std::atomic<std::uint64_t> peak{0};
    const auto look = [&peak](Direction, std::uint64_t, std::uint64_t) {
        const std::uint64_t now = allocated_bytes();
        for (std::uint64_t before = peak.load(); before < now && !peak.compare_exchange_weak(before, now);) {}
        return InjectedFault{};
    };
    TwoFiles files(setups().front(), std::vector<Source>(16, Source::raw), chunk_bytes, look);
    Bytes target;
    ReadExtents wanted = files.into(target);
    std::uint64_t before = allocated_bytes();
    peak = 0;
    CHECK(files.run(wanted)->bad_chunks().empty());
    CHECK(target == files.data);
    REQUIRE(peak.load() != 0);
    CHECK(static_cast<std::int64_t>(peak.load() - before) < static_cast<std::int64_t>(3 * mib));

    wanted = files.rows;  // parts of one stored tensor, as layouts cut it
    wanted.rows.clear();
    for (int i = 0; i < 40; ++i) wanted.rows.push_back({0, files.data.size(), verify_only, 0, 15, 16, contiguous, 0});
    for (int i = 0; i < 3; ++i)
        wanted.rows.push_back({0, files.data.size(), verify_only, 0, static_cast<std::uint64_t>(i), 16, contiguous, 0});
    before = allocated_bytes();
    peak = 0;
    CHECK(files.run(wanted)->bad_chunks().empty());
    CHECK(static_cast<std::int64_t>(peak.load() - before) < static_cast<std::int64_t>(3 * mib));
}

TEST_CASE(
    "a chunk of which a half or its base is damaged, or that is not what was saved, leaves its target as before") {
    TwoFiles files(setups().front(), each);
    const auto bad = [&](const auto& change) {
        Bytes target;
        ReadExtents wanted = files.into(target);
        change(wanted);
        const auto load = files.run(wanted, {.stop_at_bad = false});
        REQUIRE_FALSE(load->fault());
        for (std::uint64_t chunk = 0; chunk < each.size(); ++chunk) {
            const auto begin = target.begin() + static_cast<std::ptrdiff_t>(chunk * mib),
                       end = begin + static_cast<std::ptrdiff_t>(mib);
            if (!std::equal(begin, end, files.data.begin() + static_cast<std::ptrdiff_t>(chunk * mib)))
                CHECK(std::all_of(begin, end, [](std::byte byte) { return byte == std::byte{0x11}; }));
        }
        return load->bad_chunks();
    };
    using Numbers = std::vector<std::uint64_t>;
    CHECK(bad([](ReadExtents&) {}).empty());
    CHECK(bad([](ReadExtents& rows) { rows.digests[3] ^= 1; }) == Numbers{3});
    for (std::uint64_t number = 0; number < each.size(); ++number)
        for (const std::uint64_t half : {0, 1})
            CHECK(bad([&](ReadExtents& rows) { rows.digests[files.half(number, half)] ^= 1; }) ==
                  Numbers{files.half(number, half)});
    CHECK(bad([](ReadExtents& rows) { rows.bases[1].digest ^= 1; }) == Numbers{files.half(2, 1)});
    CHECK(bad([](ReadExtents& rows) { rows.bases[2].data_digest ^= 1; }) == Numbers{files.half(3, 0)});
}

TEST_CASE("what is read ahead is verified in both files, and rounded once the targets are known") {
    TwoFiles files(setups().front(), each, chunk_bytes, nullptr, 32);
    const auto read = [&](const ReadExtents& rows, const ReadExtents& aimed) {
        auto job = files.fixture.engine.read(files.fixture.arena, {files.fixture.scratch.file(), files.other.file()},
                                             std::make_shared<ReadExtents>(rows), {.ahead = true});
        job->aim(std::make_shared<ReadExtents>(aimed));
        REQUIRE(job->wait(forever_s));
        return job;
    };
    Bytes target;
    const ReadExtents wanted = files.into(target);
    CHECK(read(files.rows, wanted)->bad_chunks().empty());
    CHECK(target == files.data);
    ReadExtents forged = files.rows;
    forged.digests[files.half(3, 1)] ^= 1;
    CHECK(read(forged, forged)->bad_chunks() == std::vector<std::uint64_t>{files.half(3, 1)});
}

TEST_CASE("a half, or a base, in a file that is not open is a fault, and no target changes") {
    for (const Source source : {Source::raw, Source::near}) {
        TwoFiles files(setups().front(), {source});
        Bytes target;
        ReadExtents wanted = files.into(target);
        if (source == Source::near) {  // of a first half whose base alone is elsewhere
            wanted.bases[0].place.file = 1;
            wanted.rows[0].length = cast::half_bytes;
            wanted.digests[0] = xxh3_64(files.data.data(), cast::half_bytes);
        }
        const auto load = files.run(wanted, {}, false);
        REQUIRE(load->fault());
        CHECK(load->fault()->error == EBADF);
        CHECK(load->fault()->operation == "find the base chunks for");
        CHECK(load->touched() == std::vector<bool>{false});
        CHECK(std::all_of(target.begin(), target.end(), [](std::byte byte) { return byte == std::byte{0x11}; }));
    }
}

TEST_CASE("an arena that cannot hold a chunk and what it is rounded from is a fault") {
    for (const Source source : {Source::near, Source::far}) {  // two blocks, and three
        TwoFiles files(setups().front(), {source}, chunk_bytes, nullptr, 2);
        const auto load = files.run(files.rows);
        CHECK(load->fault().has_value() == (source == Source::far));
        if (load->fault()) CHECK(load->fault()->error == ENOMEM);
    }
}

namespace {

std::uint64_t forged(std::uint64_t now, std::mt19937_64& random) {
    const std::uint64_t values[] = {0,
                                    1,
                                    2,
                                    3,
                                    4,
                                    5,
                                    now + 1,
                                    now - 1,
                                    now * 2,
                                    now / 2,
                                    now ^ (std::uint64_t{1} << random() % 64),
                                    mib - 1,
                                    mib,
                                    mib + 1,
                                    random() % (4 * mib),
                                    UINT32_MAX,
                                    file_bytes_max,
                                    UINT64_MAX};
    return values[random() % std::size(values)];
}

void forge(ChunkPlace& place, std::mt19937_64& random) {
    switch (random() % 4) {
        case 0: place.offset = forged(place.offset, random); break;
        case 1: place.length = static_cast<std::uint32_t>(forged(place.length, random)); break;
        case 2: place.file = static_cast<std::uint32_t>(random() % 3); break;
        default: place.codec = static_cast<std::uint8_t>(random() % 7);
    }
}

/// Change one number of a table; not how much memory its row has.
void forge(ReadExtents& rows, std::mt19937_64& random) {
    ReadExtent& row = rows.rows[0];
    ChunkBase& base = rows.bases[random() % rows.bases.size()];
    switch (random() % 8) {
        case 0: row.chunk = forged(row.chunk, random); break;
        case 1: row.first = forged(row.first, random); break;
        case 2: row.last = forged(row.last, random); break;
        case 3: base.chunk = forged(base.chunk, random); break;
        case 4: forge(base.place, random); break;
        default: forge(rows.stored[random() % rows.stored.size()], random);
    }
}

}  // namespace

TEST_CASE("forged tables are refused, or read to an end, however their digests fit; AddressSanitizer looks on") {
    TwoFiles files(setups().front(), {Source::near, Source::coded, Source::far}, 60 * kib, nullptr, 8);
    const std::array<Bytes, 2> contents{files.fixture.scratch.contents(), files.other.contents()};
    const auto vouch = [&contents](const ChunkPlace& place, std::uint64_t& digest) {
        if (place.file > 1 || place.offset > contents[place.file].size() ||
            place.length > contents[place.file].size() - place.offset)
            return;
        digest = xxh3_64(contents[place.file].data() + place.offset, place.length);
    };
    std::mt19937_64 random(5);
    int refused = 0, read = 0, decoded = 0;
    for (int round = 0; round < 300; ++round) {
        Bytes target;
        ReadExtents rows = files.into(target);
        for (std::uint64_t i = 0; i < 1 + random() % 2; ++i) forge(rows, random);
        if (round % 4 != 0) {
            for (std::size_t i = 0; i < rows.stored.size(); ++i)
                if (rows.stored[i].codec != codec_cast) vouch(rows.stored[i], rows.digests[i]);
            for (ChunkBase& base : rows.bases) vouch(base.place, base.digest);
        }
        try {
            const auto load = files.run(rows, {.stop_at_bad = round % 2 == 0});
            ++read;
            if (!load->fault() && !load->bad_chunks().empty()) ++decoded;
        } catch (const std::invalid_argument&) { ++refused; }
    }
    CHECK(refused > 50);
    CHECK(read > 50);
    CHECK(decoded > 10);
}

}  // namespace flowstone
