// Rows that are captured after the caller has gone on: order, limits, and changes that escape.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "tests/io_fixture.h"
#include "watch/mutation_detector.h"

namespace flowstone {
namespace {

constexpr std::uint64_t crawl = 1;  // bytes per second: after its first window a job waits until it is expedited

std::shared_ptr<WriteJob> start(IoFixture& fixture, const WriteExtents& rows, const WriteOptions& options) {
    return fixture.engine.write(fixture.arena, {{fixture.scratch.file(), fixture.file_bytes}},
                                std::make_shared<WriteExtents>(rows), options);
}

WriteExtents all_lazy(WriteExtents rows) {
    for (WriteExtent& row : rows.rows) row.lazy = true;
    return rows;
}

void wait_until_copied(const WriteJob& job) {
    while (job.copied_bytes() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

TEST_CASE("lazy rows come back, expedited or not and however much memory they get") {
    for (const Setup& setup : setups())
        for (std::uint64_t seed = 0; seed < 6; ++seed) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(seed);
            const Sample sample = random_sample(seed, 24);
            WriteExtents rows = sample.rows;
            std::mt19937_64 random(seed);
            for (WriteExtent& row : rows.rows) row.lazy = random() % 3 != 0;
            IoFixture fixture(setup, sample.file_bytes, nullptr, seed % 2 ? 2 : 20);
            const auto job = start(fixture, rows, {.blocks = static_cast<std::uint32_t>(seed % 4)});
            REQUIRE(job->wait_early(forever_s));
            if (seed > 3) job->expedite();
            REQUIRE(job->wait(forever_s));
            REQUIRE_FALSE(job->fault());
            REQUIRE(same(fixture.scratch.contents(), sample.expected));
        }
}

TEST_CASE("early rows are captured at once, lazy ones when the job is expedited") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample large = plain_sample(20 * mib, 64);
        const Memory small(4096, 0);
        std::memset(small.start(), 7, 4096);
        WriteExtents rows = all_lazy(large.rows);
        rows.rows.push_back({24 * mib, 4096, small.address(), rows.chunks, contiguous, 0});
        rows.chunks += 1;
        IoFixture fixture(setup, 24 * mib + 4096);
        const auto job = start(fixture, rows, {.blocks = 1, .bytes_per_s = crawl});
        REQUIRE(job->wait_early(forever_s));
        CHECK_FALSE(job->wait_captured(0));
        std::memset(small.start(), 9, 4096);
        job->expedite();
        REQUIRE(job->wait(forever_s));
        REQUIRE_FALSE(job->fault());
        const std::vector<std::byte> found = fixture.scratch.contents();
        CHECK(std::memcmp(found.data(), large.expected.data(), 20 * mib) == 0);
        CHECK(found[24 * mib] == std::byte{7});
    }
}

TEST_CASE("early rows ignore the pace, though no memory is touched yet") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        Sample sample = plain_sample(6 * mib, 0);
        WriteExtent& early = sample.rows.rows[0];
        const std::uint64_t half = 3 * mib;
        const Memory shifted(6 * mib, 8);  // out of phase with the file
        std::memcpy(shifted.start(), sample.memory[0].start(), 6 * mib);
        early.address = shifted.address();
        early.length = half;
        sample.rows.rows.push_back({half, half, shifted.address() + half, chunk_count(half), contiguous, 0, true});
        IoFixture fixture(setup, sample.file_bytes);  // its arena is touched only once the job asks
        const auto job = start(fixture, sample.rows, {.blocks = 1, .bytes_per_s = crawl});
        REQUIRE(job->wait_early(forever_s));
        CHECK_FALSE(job->wait_captured(0));
        job->expedite();
        REQUIRE(job->wait(forever_s));
        REQUIRE_FALSE(job->fault());
        CHECK(same(fixture.scratch.contents(), sample.expected));
    }
}

TEST_CASE("a cap holds for early rows and for lazy ones, also while the caller waits") {
    for (const Setup& setup : setups())
        for (const bool lazy : {false, true}) {
            CAPTURE(setup.backend);
            CAPTURE(lazy);
            const Sample sample = plain_sample(6 * mib);
            IoFixture fixture(setup, sample.file_bytes, nullptr, 8);
            const auto job = start(fixture, lazy ? all_lazy(sample.rows) : sample.rows, {.cap_bytes_per_s = crawl});
            wait_until_copied(*job);
            job->expedite();
            CHECK_FALSE(job->wait_captured(0.05));
            CHECK(job->copied_bytes() <= mib);
            job->cancel();
            REQUIRE(job->wait(forever_s));
        }
}

TEST_CASE("a source that changes before it is captured fails the job, and says where") {
    for (const Setup& setup : setups())
        for (const std::uint32_t blocks : {0U, 2U}) {
            CAPTURE(setup.backend);
            CAPTURE(blocks);
            const Sample sample = plain_sample(10 * mib, 128);
            IoFixture fixture(setup, sample.file_bytes);
            const auto job = start(fixture, all_lazy(sample.rows), {.blocks = blocks, .bytes_per_s = crawl});
            std::memset(sample.memory[0].start() + 4 * mib, 0, mib);
            job->expedite();
            REQUIRE(job->wait(forever_s));
            REQUIRE(job->fault());
            CHECK(job->fault()->operation == "capture");
            CHECK(job->fault()->error == 0);
            CHECK(job->fault()->offset >= 128 + 4 * mib);
            CHECK(job->fault()->offset + job->fault()->length <= 128 + 5 * mib);
        }
}

TEST_CASE("of every quarter of a chunk, whole or not, 64 bytes are sampled") {
    // docs/SAVING.md: a single changed byte of a sampled row is detected in 1 of 4,096 cases.
    for (const auto& [bytes, seen] : {std::pair{mib, 4 * 64U}, {mib + 100, 5 * 64U}, {64 * mib / 1024, 64U}}) {
        CAPTURE(bytes);
        const Memory memory(bytes, 0);
        WriteExtents rows;
        rows.rows.push_back({0, bytes, memory.address(), 0, contiguous, 0, true});
        auto watch = std::make_unique<MutationDetector>(rows);
        std::uint64_t found = 0;
        for (std::uint64_t at = 0; at < bytes; ++at) {
            const std::byte changed = *(memory.start() + at) ^ std::byte{1};
            watch->compare(0, at, at + 1, &changed);
            if (!watch->change()) continue;
            ++found;
            watch = std::make_unique<MutationDetector>(rows);
        }
        CHECK(found == seen);
    }
}

TEST_CASE("a chunk that two windows share cannot be half old, half new") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample =
            plain_sample(2 * mib, 64);  // the fixture's windows end at multiples of 1 MiB: 64 bytes cross
        IoFixture fixture(setup, sample.file_bytes, nullptr, 4);
        const auto job = start(fixture, all_lazy(sample.rows), {.bytes_per_s = crawl});
        wait_until_copied(*job);
        *(sample.memory[0].start() + mib - 1) ^= std::byte{1};
        job->expedite();
        REQUIRE(job->wait(forever_s));
        REQUIRE(job->fault());
        CHECK(job->fault()->operation == "capture");
    }
}

TEST_CASE("samples of equal rows are equal, wherever they lie, and those of others are not") {
    const Sample one = plain_sample(2 * mib, 64), other = plain_sample(2 * mib, 777);
    const WriteExtents rows = all_lazy(one.rows);
    const std::vector<std::uint64_t> digests = sample_digests(rows);
    REQUIRE(digests.size() == 1);
    CHECK(sample_digests(all_lazy(other.rows)) == digests);
    for (std::uint64_t at = 0; at < rows.rows[0].length; at += 64) *(one.memory[0].start() + at) ^= std::byte{1};
    CHECK(sample_digests(rows) != digests);
}

TEST_CASE("files may get ready at any moment of the capture, or never if the job is cancelled") {
    for (const Setup& setup : setups())
        for (std::uint64_t seed = 0; seed < 8; ++seed) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(seed);
            const Sample sample = random_sample(seed, 24);
            WriteExtents rows = sample.rows;
            std::mt19937_64 random(seed);
            for (WriteExtent& row : rows.rows) row.lazy = random() % 3 != 0;
            IoFixture fixture(setup, sample.file_bytes, nullptr, seed % 2 ? 2 : 20);
            const auto job =
                start(fixture, rows, {.blocks = static_cast<std::uint32_t>(seed % 4), .files_ready = false});
            const bool cancels = seed % 4 == 1;
            const std::jthread other([&, delay = std::chrono::microseconds(random() % 3000)] {
                std::this_thread::sleep_for(delay);
                if (cancels) job->cancel();
                if (!cancels || seed % 8 == 1) job->files_ready();
            });
            job->expedite();
            REQUIRE(job->wait(forever_s));
            REQUIRE_FALSE(job->fault());
            fixture.arena->close();  // which it refuses while a block of it is out
            if (!cancels) REQUIRE(same(fixture.scratch.contents(), sample.expected));
        }
}

TEST_CASE("a job that goes while its files are not ready ends at once, and writes nothing") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(10 * mib);
        IoFixture fixture(setup, sample.file_bytes);
        auto job = start(fixture, all_lazy(sample.rows), {.files_ready = false});
        job->expedite();
        CHECK_FALSE(job->wait_captured(0.01));  // of 10 MiB it has room for 4
        CHECK(job->requests() == 0);
        job.reset();
        fixture.arena->close();
        const std::vector<std::byte> found = fixture.scratch.contents();
        CHECK(all_are(std::byte{0xEE}, found.data(), found.size()));
    }
}

TEST_CASE("a source that changes while files are not ready fails the job at once, and what is held is given back") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(10 * mib, 128);
        IoFixture fixture(setup, sample.file_bytes);
        const auto job = start(fixture, all_lazy(sample.rows), {.bytes_per_s = crawl, .files_ready = false});
        std::memset(sample.memory[0].start() + mib + 4 * kib, 0,
                    mib);  // of the second window, for which there is a block
        job->expedite();
        REQUIRE(job->wait(forever_s));
        REQUIRE(job->fault());
        CHECK(job->fault()->operation == "capture");
        CHECK(job->requests() == 0);
        fixture.arena->close();
        job->files_ready();  // which changes nothing any more
    }
}

TEST_CASE("a job that holds all blocks until its file is ready lets another one go on then, whichever is ready first") {
    for (const Setup& setup : setups())
        for (const bool swapped : {false, true}) {
            CAPTURE(setup.backend);
            CAPTURE(swapped);
            const Sample sample = plain_sample(10 * mib, 64);
            const WriteOptions waiting{.files_ready = false};
            IoFixture fixture(setup, sample.file_bytes);
            const ScratchFile beside(setup.direct, sample.file_bytes);
            const auto one = start(fixture, all_lazy(sample.rows), waiting);
            const auto other = fixture.engine.write(fixture.arena, {{beside.file(), sample.file_bytes}},
                                                    std::make_shared<WriteExtents>(sample.rows), waiting);
            while (one->copied_bytes() + other->copied_bytes() == 0) std::this_thread::yield();
            (swapped ? other : one)->files_ready();
            (swapped ? one : other)->files_ready();
            REQUIRE(one->wait(forever_s));
            REQUIRE(other->wait(forever_s));
            REQUIRE_FALSE(one->fault());
            REQUIRE_FALSE(other->fault());
            CHECK(same(fixture.scratch.contents(), sample.expected));
            CHECK(same(beside.contents(), sample.expected));
        }
}

TEST_CASE("a job that is cancelled while it waits for its pace ends at once") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(10 * mib);
        IoFixture fixture(setup, sample.file_bytes);
        const auto job = start(fixture, all_lazy(sample.rows), {.bytes_per_s = crawl});
        job->cancel();
        REQUIRE(job->wait(forever_s));
        CHECK(job->wait_early(0));
        CHECK(job->wait_captured(0));
    }
}

}  // namespace flowstone
