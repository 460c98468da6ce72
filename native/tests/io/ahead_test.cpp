// Reading ahead: bytes arrive before it is known where they go.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "tests/io_fixture.h"
#include "tests/simulated/delayed_device.h"

namespace flowstone {
namespace {

ReadExtents without_targets(ReadExtents rows) {
    for (ReadExtent& row : rows.rows) row.address = verify_only;
    return rows;
}

std::shared_ptr<ReadJob> start_ahead(IoFixture& fixture, const ReadExtents& rows) {
    return fixture.engine.read(fixture.arena, {fixture.scratch.file()},
                               std::make_shared<ReadExtents>(without_targets(rows)), {.ahead = true});
}

/// A sample on disk, and where it is to be read to.
struct StoredSample {
    Sample sample;
    IoFixture fixture;
    std::vector<Memory> targets;
    ReadExtents rows;

    StoredSample(const Setup& setup, Sample stored, std::uint64_t blocks, std::uint64_t seed = 1)
        : sample(std::move(stored)),
          fixture(setup, sample.file_bytes, nullptr, blocks),
          rows(read_back(sample, fixture.run(sample.rows)->digests(), targets, seed)) {}

    std::shared_ptr<const ReadExtents> named() const { return std::make_shared<ReadExtents>(rows); }
    bool holds(std::size_t row, std::byte byte) const {
        return all_are(byte, targets[row].start(), rows.rows[row].length);
    }
    bool untouched() const {
        for (std::size_t i = 0; i < targets.size(); ++i)
            if (!holds(i, std::byte{0x11})) return false;
        return true;
    }
    bool gave_all_back() const { return fixture.arena->free_bytes() == fixture.arena->touched_bytes(); }
};

void wait_until_full(const StoredSample& stored, std::uint64_t blocks) {
    while (stored.fixture.arena->touched_bytes() < blocks * huge_page_bytes || stored.fixture.arena->free_bytes() != 0)
        std::this_thread::yield();
}

}  // namespace

TEST_CASE("what is read ahead is stored once its targets are named, whatever the arena holds") {
    for (const Setup& setup : setups())
        for (std::uint64_t seed = 0; seed < 6; ++seed) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(seed);
            StoredSample stored(setup, random_sample(seed, 24), seed % 2 ? 2 : 40, seed);
            const auto job = start_ahead(stored.fixture, stored.rows);
            CHECK_FALSE(job->wait(seed % 3 == 0 ? 0.0 : 0.02));
            CHECK(stored.untouched());
            CHECK(job->done_bytes() == 0);
            job->aim(stored.named());
            REQUIRE(job->wait(forever_s));
            REQUIRE_FALSE(job->fault());
            CHECK(job->bad_chunks().empty());
            std::uint64_t wanted = 0;
            for (std::size_t i = 0; i < stored.targets.size(); ++i) {
                const std::vector<std::byte>& bytes = stored.sample.stored[i];
                REQUIRE((bytes.empty() || std::memcmp(bytes.data(), stored.targets[i].start(), bytes.size()) == 0));
                CHECK(job->touched()[i] == !bytes.empty());
                wanted += bytes.size();
            }
            CHECK(job->done_bytes() == wanted);
            CHECK(job->direct_bytes() == 0);
            CHECK(stored.gave_all_back());
        }
}

TEST_CASE("damage that is found ahead keeps bytes out of every target") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        StoredSample stored(setup, plain_sample(20 * mib), 40);
        stored.fixture.scratch.put(3 * mib + 7, ~stored.sample.stored[0][3 * mib + 7]);
        const auto job = start_ahead(stored.fixture, stored.rows);
        REQUIRE(job->wait(forever_s));  // it is not worth going on
        CHECK(job->bad_chunks() == std::vector<std::uint64_t>{3});
        job->aim(stored.named());
        CHECK(stored.untouched());
        CHECK_FALSE(job->touched()[0]);
        CHECK_FALSE(job->fault());
        CHECK(stored.gave_all_back());
    }
}

TEST_CASE("damage behind what the arena holds is named, and its chunk stays out") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        StoredSample stored(setup, plain_sample(20 * mib), 3);
        stored.fixture.scratch.put(19 * mib + 7, ~stored.sample.stored[0][19 * mib + 7]);
        const auto job = start_ahead(stored.fixture, stored.rows);
        wait_until_full(stored, 3);
        CHECK(job->bad_chunks().empty());
        job->aim(stored.named());
        REQUIRE(job->wait(forever_s));
        CHECK(job->bad_chunks() == std::vector<std::uint64_t>{19});
        CHECK(job->touched()[0]);
        CHECK(stored.targets[0].start()[19 * mib + 7] == std::byte{0x11});
        CHECK(stored.gave_all_back());
    }
}

TEST_CASE("a job whose targets are never named ends when it is cancelled, and leaves memory alone") {
    for (const Setup& setup : setups())
        for (const bool full : {false, true}) {
            CAPTURE(setup.backend);
            CAPTURE(full);
            StoredSample stored(setup, plain_sample(20 * mib), 3);
            const auto job = start_ahead(stored.fixture, stored.rows);
            if (full) wait_until_full(stored, 3);
            job->cancel();
            REQUIRE(job->wait(forever_s));
            CHECK(job->cancelled());
            job->aim(stored.named());
            CHECK(stored.untouched());
            CHECK(stored.gave_all_back());
        }
}

TEST_CASE("a job that reads ahead may be dropped at any time") {
    for (const Setup& setup : setups())
        for (int at = 0; at < 20; ++at) {
            StoredSample stored(setup, plain_sample(8 * mib), 40);
            auto job = start_ahead(stored.fixture, stored.rows);
            if (at % 2) job->wait(0.0005 * at);
            if (at % 3 == 0) job->aim(stored.named());
            job.reset();
            CHECK(stored.gave_all_back());
        }
}

TEST_CASE("a file that is too short for what is read ahead is a fault, whether the targets are named or not") {
    for (const Setup& setup : setups())
        for (const bool named : {false, true}) {
            CAPTURE(setup.backend);
            CAPTURE(named);
            StoredSample stored(setup, plain_sample(20 * mib), 3);
            stored.fixture.scratch.truncate(named ? 10 * mib : mib / 2);
            const auto job = start_ahead(stored.fixture, stored.rows);
            if (named) job->aim(stored.named());
            REQUIRE(job->wait(forever_s));
            REQUIRE(job->fault());
            CHECK(job->fault()->operation == "end of file");
            CHECK(stored.gave_all_back());
        }
}

TEST_CASE("what is read ahead goes to a device, too") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        StoredSample stored(setup, plain_sample(20 * mib), 40);
        const auto device = std::make_shared<DelayedDevice>(20 * mib, std::chrono::microseconds(50));
        const auto job = start_ahead(stored.fixture, stored.rows);
        ReadExtents rows = stored.rows;
        rows.devices = {device};
        rows.rows[0].device = 0;
        rows.rows[0].address = device->address();
        job->aim(std::make_shared<ReadExtents>(rows));
        REQUIRE(job->wait(forever_s));
        REQUIRE_FALSE(job->fault());
        CHECK(std::memcmp(device->inside(), stored.sample.stored[0].data(), 20 * mib) == 0);
        CHECK(stored.gave_all_back());
    }
}

TEST_CASE("targets are named once, for the rows that are read, and for a job that waits for them") {
    for (const Setup& setup : setups()) {
        StoredSample stored(setup, plain_sample(4 * mib), 3);
        const auto job = start_ahead(stored.fixture, stored.rows);
        ReadExtents others = stored.rows;
        others.rows[0].last -= 1;
        CHECK_THROWS_AS(job->aim(std::make_shared<ReadExtents>(others)), std::invalid_argument);
        others = stored.rows;
        others.rows[0].layout = 0;
        CHECK_THROWS_AS(job->aim(std::make_shared<ReadExtents>(others)), std::invalid_argument);
        CHECK(stored.untouched());
        job->aim(stored.named());
        CHECK_THROWS_AS(job->aim(stored.named()), std::invalid_argument);
        REQUIRE(job->wait(forever_s));
        CHECK_THROWS_AS(stored.fixture.run(stored.rows)->aim(stored.named()), std::invalid_argument);
        CHECK_THROWS_AS(stored.fixture.engine.read(stored.fixture.arena, {stored.fixture.scratch.file()},
                                                   stored.named(), {.stop_at_bad = false, .ahead = true}),
                        std::invalid_argument);
    }
}

}  // namespace flowstone
