// Chunks that follow from others: what tells of them, and jobs that leave them out by what a device has digested.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "tests/io_fixture.h"
#include "tests/simulated/delayed_device.h"
#include "codec/derived.h"
#include "codec/digest.h"

namespace flowstone {
namespace {

using Bytes = std::vector<std::byte>;

Bytes singles_of(std::uint64_t bytes) {
    Bytes singles(bytes);
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 0.02F);
    for (std::uint64_t at = 0; at < bytes; at += sizeof(float)) {
        const float number = normal(random);
        std::memcpy(singles.data() + at, &number, sizeof number);
    }
    return singles;
}

Bytes rounded(const Bytes& singles) {
    Bytes out(singles.size() / 2);
    REQUIRE(cast::round(singles.data(), singles.size() / sizeof(float), cast::Element::bfloat16, out.data()));
    return out;
}

/// Float32 numbers and what they are rounded to, one row behind the other in one file; chunks are numbered from 1 on.
struct Pair {
    Bytes singles, halves;
    WriteExtents rows;

    explicit Pair(std::uint64_t bytes) : singles(singles_of(bytes)), halves(rounded(singles)) {
        const auto add = [this](const Bytes& data) {
            WriteExtent row{};
            row.offset = rows.rows.empty() ? 0 : block_ceil(rows.rows.back().end());
            row.length = data.size();
            row.address = reinterpret_cast<std::uint64_t>(data.data());
            row.chunk = 1 + (rows.rows.empty() ? 0 : chunk_count(rows.rows.back().length));
            row.layout = contiguous;
            row.lazy = true;
            rows.rows.push_back(row);
            rows.chunks = row.chunk + chunk_count(row.length);
        };
        add(singles);
        add(halves);
        rows.rows[1].derivation = Derivation::bfloat16;
        rows.rows[1].follows = 1;
        rows.encoder = delta_encoder({});
    }

    std::span<const std::byte> chunk(std::size_t row, std::uint64_t number) const {
        const Bytes& data = row == 0 ? singles : halves;
        return std::span(data).subspan(number * chunk_bytes, std::min(chunk_bytes, data.size() - number * chunk_bytes));
    }
    std::uint64_t file_bytes() const { return block_ceil(rows.rows.back().end()); }
};

std::uint64_t digest_of(std::span<const std::byte> bytes) { return xxh3_64(bytes.data(), bytes.size()); }

/// The second row on a device, which digests it in its current stream behind `first`; and, if it is to fail, behind a
/// kernel that has met memory which is not there.
struct FarPair : Pair {
    std::shared_ptr<DelayedDevice> device;
    std::shared_ptr<const DeviceDigests> digested;

    explicit FarPair(
        std::uint64_t bytes, std::function<void()> first = [] {}, bool fails = false)
        : Pair(bytes), device(std::make_shared<DelayedDevice>(halves.size(), std::chrono::microseconds(0))) {
        std::memcpy(device->inside(), halves.data(), halves.size());
        WriteExtent& row = rows.rows[1];
        row.device = 0;
        row.address = device->address();
        rows.devices = {device};
        rows.samples = {{}};
        device->launch(device->current(), std::move(first));
        if (fails) {
            const std::array<DeviceRun, 1> nowhere{{{device->address() + halves.size(), 4096}}};
            REQUIRE(device->digest(device->current(), nowhere, digested) == 0);
        }
        digest();
    }

    void digest() {
        const WriteExtent& row = rows.rows[1];
        std::vector<DeviceRun> runs;
        for (std::uint64_t at = 0; at < row.length; at += chunk_bytes)
            runs.push_back({row.address + at, static_cast<std::uint32_t>(std::min(chunk_bytes, row.length - at))});
        std::shared_ptr<const DeviceDigests> made;
        REQUIRE(device->digest(device->current(), runs, made) == 0);
        REQUIRE(made);
        REQUIRE(device->follow(device->current()) == 0);
        digested = std::move(made);
        rows.digested = {digested.get()};
    }
};

std::uint64_t count_derived(const std::vector<StoredChunk>& chunks) {
    return static_cast<std::uint64_t>(std::count_if(chunks.begin(), chunks.end(), [](const StoredChunk& chunk) {
        return chunk.encoded.kind == ChunkEncoding::Kind::derived;
    }));
}

}  // namespace

TEST_CASE("a rounded chunk is known once both of its halves were captured, in any order, by any threads") {
    const std::uint64_t bytes = 6 * mib + 300 * kib;
    const Pair pair(bytes);
    const std::uint64_t sources = chunk_count(bytes), derived_chunks = chunk_count(bytes / 2);
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
        CAPTURE(seed);
        DerivedChunks derived(pair.rows);
        std::vector<std::uint64_t> order(sources);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(seed)));
        std::atomic<std::size_t> next{0};
        const auto note_all = [&] {
            Bytes room(chunk_bytes);
            for (std::size_t at = next++; at < sources; at = next++) {
                const std::span<const std::byte> chunk = pair.chunk(0, order[at]);
                const std::size_t cut = 4 * (order[at] * 1000 % (chunk.size() / 4));
                derived.note(1 + order[at], chunk.first(cut), chunk.subspan(cut), digest_of(chunk), room.data());
            }
        };
        if (seed % 2 == 0) {
            note_all();
        } else {
            std::vector<std::jthread> threads;
            for (int i = 0; i < 3; ++i) threads.emplace_back(note_all);
        }
        for (std::uint64_t number = 0; number < derived_chunks; ++number) {
            const std::uint64_t chunk = pair.rows.rows[1].chunk + number, digest = digest_of(pair.chunk(1, number));
            CHECK(derived.codec_of(chunk, digest) == codec_cast);
            CHECK_FALSE(derived.codec_of(chunk, digest ^ 1));
        }
        CHECK_FALSE(derived.codec_of(1, digest_of(pair.chunk(0, 0))));
    }
}

TEST_CASE("a rounded chunk is not known before both of its halves are, nor if one of them cannot be rounded") {
    for (const std::uint64_t bad : {0, 1, 2}) {
        CAPTURE(bad);
        Pair pair(2 * mib);
        const std::uint64_t digest = digest_of(pair.chunk(1, 0));
        if (bad < 2) std::memset(pair.singles.data() + bad * chunk_bytes + 4096, 0xFF, 4);
        for (const std::uint64_t first : {0, 1}) {
            DerivedChunks derived(pair.rows);
            Bytes room(chunk_bytes);
            for (const std::uint64_t number : {first, 1 - first}) {
                CHECK_FALSE(derived.codec_of(3, digest));
                derived.note(1 + number, pair.chunk(0, number), {}, 0, room.data());
            }
            CHECK(derived.codec_of(3, digest).has_value() == (bad == 2));
        }
    }
}

TEST_CASE("rows with the expected device digests are neither copied nor stored, also if their source is elsewhere") {
    for (const Setup& setup : setups()) {
        std::atomic<bool> go{false};
        const FarPair pair(9 * mib + 20 * kib, [&] {
            while (!go) std::this_thread::yield();
        });
        IoFixture fixture(setup, pair.file_bytes(), nullptr, 4);
        const auto job = fixture.start(pair.rows);
        job->expedite();
        CHECK_FALSE(job->wait_queued(0.02));  // of digests that are not there nothing follows
        go = true;
        REQUIRE(job->wait(forever_s));
        REQUIRE_FALSE(job->fault());
        CHECK(pair.device->copies() == 0);
        CHECK(job->copied_bytes() == pair.singles.size());
        CHECK(count_derived(job->stored()) == chunk_count(pair.halves.size()));
        for (std::uint64_t number = 0; number < chunk_count(pair.halves.size()); ++number) {
            const std::uint64_t chunk = pair.rows.rows[1].chunk + number, digest = digest_of(pair.chunk(1, number));
            CHECK(job->digests()[chunk] == digest);
            CHECK(job->stored()[chunk].captured_digest == digest);
            CHECK(job->stored()[chunk].encoded.codec == codec_cast);
        }
    }
}

TEST_CASE("a window of which the device has digested something else is captured, and stored where it does not follow") {
    for (const std::uint64_t place : {std::uint64_t{0}, 3 * mib + 7, 6 * mib - 1}) {
        CAPTURE(place);
        FarPair changed(12 * mib);
        changed.device->synchronize(changed.device->current());
        changed.device->inside()[place] ^= std::byte{1};
        changed.digest();  // as if it had been so when the save began
        IoFixture fixture(setups().front(), changed.file_bytes(), nullptr, 4);
        const auto job = fixture.run(changed.rows);
        REQUIRE_FALSE(job->fault());
        CHECK(count_derived(job->stored()) == chunk_count(changed.halves.size()) - 1);
        const std::uint64_t chunk = changed.rows.rows[1].chunk + place / chunk_bytes;
        CHECK(job->stored()[chunk].encoded.kind == ChunkEncoding::Kind::stored);
        CHECK(changed.device->copied_bytes() == 2 * mib);  // a window
    }
}

TEST_CASE("cancelled while a device has yet to digest, a job ends when it has") {
    std::atomic<bool> go{false};
    const FarPair pair(4 * mib, [&] {
        while (!go) std::this_thread::yield();
    });
    IoFixture fixture(setups().front(), pair.file_bytes(), nullptr, 4);
    const std::size_t pending = pair.device->pending_events();  // of the digests
    const auto job = fixture.start(pair.rows);
    job->expedite();
    while (pair.device->pending_events() == pending) REQUIRE_FALSE(job->wait_queued(0.001));
    job->cancel();
    CHECK_FALSE(job->wait(0.02));
    go = true;
    REQUIRE(job->wait(forever_s));
    CHECK(job->cancelled());
    CHECK(fixture.arena->free_bytes() == fixture.arena->touched_bytes());
}

TEST_CASE("a device that fails before it has digested ends the job, with its name") {
    std::atomic<bool> go{false};
    const FarPair pair(
        4 * mib,
        [&] {
            while (!go) std::this_thread::yield();
        },
        true);
    IoFixture fixture(setups().front(), pair.file_bytes(), nullptr, 4);
    const std::size_t pending = pair.device->pending_events();  // of the digests
    const auto job = fixture.start(pair.rows);
    job->expedite();
    while (pair.device->pending_events() == pending) REQUIRE_FALSE(job->wait_queued(0.001));
    go = true;
    REQUIRE(job->wait(forever_s));
    REQUIRE(job->fault());
    CHECK(job->fault()->operation.starts_with("copy from or to delayed:0 ("));
    CHECK(job->fault()->error == EIO);
    CHECK(fixture.arena->free_bytes() == fixture.arena->touched_bytes());
}

}  // namespace flowstone
