// One suite for both backends, on buffered and O_DIRECT files: what rows promise.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/io_fixture.h"

namespace flowstone {
namespace {

bool equal(const std::vector<std::byte>& bytes, const std::byte* memory) {
    return bytes.empty() || std::memcmp(bytes.data(), memory, bytes.size()) == 0;
}

void check_round_trip(const Setup& setup, std::uint64_t seed, std::uint64_t blocks, FaultInjector injector) {
    const Sample sample = random_sample(seed, 24);
    IoFixture fixture(setup, sample.file_bytes, std::move(injector), blocks);
    const auto job = fixture.run(sample.rows);
    REQUIRE_FALSE(job->fault());
    REQUIRE(same(fixture.scratch.contents(), sample.expected));
    std::uint64_t wanted = 0;
    for (std::size_t i = 0; i < sample.stored.size(); ++i) {
        const WriteExtent& row = sample.rows.rows[i];
        wanted += row.length;
        for (std::uint64_t chunk = 0; chunk < chunk_count(row.length); ++chunk) {
            const std::uint64_t begin = chunk * chunk_bytes;
            const std::uint64_t length = std::min(chunk_bytes, row.length - begin);
            REQUIRE(job->digests()[row.chunk + chunk] == xxh3_64(sample.stored[i].data() + begin, length));
        }
    }
    CHECK(job->copied_bytes() == wanted);

    std::vector<Memory> targets;
    ReadExtents rows = read_back(sample, job->digests(), targets, seed);
    std::mt19937_64 random(seed);
    std::shuffle(rows.rows.begin(), rows.rows.end(), random);
    const auto load = fixture.run(rows);
    REQUIRE_FALSE(load->fault());
    REQUIRE(load->bad_chunks().empty());
    CHECK(load->done_bytes() == wanted);
    CHECK(load->copied_bytes() + load->direct_bytes() == wanted);
    for (std::size_t i = 0; i < targets.size(); ++i) REQUIRE(equal(sample.stored[i], targets[i].start()));
}

}  // namespace

TEST_CASE("what this machine lacks is said") {
    if (!has_io_uring()) MESSAGE("skipped: io_uring is not in this build, or does not start here");
    if (probe_direct(std::filesystem::temp_directory_path()) == 0)
        MESSAGE("skipped: O_DIRECT is refused in the temporary directory");
    CHECK_FALSE(setups().empty());
}

TEST_CASE("random rows come back, whatever their kind") {
    for (const Setup& setup : setups())
        for (std::uint64_t seed = 0; seed < 8; ++seed) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(seed);
            check_round_trip(setup, seed, seed % 2 ? 2 : 20, nullptr);
        }
}

TEST_CASE("captured sources may change before the write has completed") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(10 * mib);
        IoFixture fixture(setup, sample.file_bytes, nullptr, 8);
        const auto job = fixture.start(sample.rows);
        REQUIRE(job->wait_captured(forever_s));
        std::memset(sample.memory[0].start(), 0, sample.stored[0].size());
        REQUIRE(job->wait(forever_s));
        CHECK(same(fixture.scratch.contents(), sample.expected));
        CHECK(job->digests()[0] == xxh3_64(sample.stored[0].data(), chunk_bytes));
    }
}

TEST_CASE("part of an extent is read in whole chunks and scattered into its box") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        // 3000 rows of 1000 float32; wanted: rows 1500..1599, columns 10..19.
        const Sample sample = plain_sample(3000 * 1000 * 4, 128);
        IoFixture fixture(setup, sample.file_bytes);
        const auto job = fixture.run(sample.rows);
        const std::uint64_t extent_shape[] = {3000, 1000};
        const std::uint64_t offset[] = {1500, 10};
        const std::uint64_t shape[] = {100, 10};
        const std::int64_t strides[] = {40, 4};
        std::vector<std::byte> target(4000);
        const std::uint64_t first = 1500 * 4000 / chunk_bytes;
        const std::uint64_t last = chunk_count(1600 * 4000);
        ReadExtents rows{{{128, 3000 * 4000, reinterpret_cast<std::uint64_t>(target.data()), 0, first, last, 0, 0}},
                         {Layout::box(4, extent_shape, offset, shape, strides)},
                         job->digests()};
        const auto load = fixture.run(rows);
        REQUIRE_FALSE(load->fault());
        CHECK(load->done_bytes() == (last - first) * chunk_bytes);
        for (std::size_t i = 0; i < 100; ++i)
            REQUIRE(std::memcmp(target.data() + i * 40, sample.stored[0].data() + (1500 + i) * 4000 + 40, 40) == 0);
    }
}

TEST_CASE("two jobs write disjoint blocks of one file at once, while a third reads") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = random_sample(5, 60);
        IoFixture fixture(setup, sample.file_bytes, nullptr, 3);
        const auto before = fixture.run(sample.rows);
        // Halves that share no block: cut where a row begins a block of its own.
        WriteExtents low = sample.rows, high = sample.rows;
        std::size_t cut = sample.rows.rows.size() / 2;
        while (block_floor(sample.rows.rows[cut].offset) < block_ceil(sample.rows.rows[cut - 1].end())) ++cut;
        low.rows.resize(cut);
        high.rows.erase(high.rows.begin(), high.rows.begin() + static_cast<std::ptrdiff_t>(cut));
        std::vector<Memory> targets;
        const auto first = fixture.start(low);
        const auto load = fixture.start(read_back(sample, before->digests(), targets, 1));
        const auto second = fixture.start(high);
        CHECK(first->wait(forever_s));
        CHECK(second->wait(forever_s));
        CHECK(load->wait(forever_s));
        CHECK_FALSE(load->fault());
        CHECK(same(fixture.scratch.contents(), sample.expected));
    }
}

TEST_CASE("a job without bytes finishes at once") {
    for (const Setup& setup : setups()) {
        IoFixture fixture(setup, 4096);
        CHECK(fixture.run(WriteExtents{})->requests() == 0);
        CHECK(fixture.run(ReadExtents{})->requests() == 0);
    }
}

TEST_CASE("a bad chunk is named, stays out of its target and stops the job") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        CAPTURE(setup.direct);
        const Sample sample = plain_sample(30 * mib, 0);
        // The second half of the file waits until the bad chunk is known: the thread that checks it may run late.
        std::atomic<ReadJob*> reading{nullptr};
        const auto injector = [&](Direction direction, std::uint64_t offset, std::uint64_t) -> InjectedFault {
            for (int ms = 0; direction == Direction::read && offset >= 15 * mib && ms < 10'000; ++ms) {
                const ReadJob* job = reading.load();
                if (job != nullptr && !job->bad_chunks().empty()) break;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            return {};
        };
        IoFixture fixture(setup, sample.file_bytes, injector);
        const auto job = fixture.run(sample.rows);
        fixture.scratch.put(mib + 5, ~sample.stored[0][mib + 5]);
        const Memory target(30 * mib, 1);  // out of phase: through the arena
        std::memset(target.start(), 0x11, 30 * mib);
        ReadExtents rows{{{0, 30 * mib, target.address(), 0, 0, 30, contiguous, 0}}, {}, job->digests()};
        const auto load = fixture.start(rows);
        reading = load.get();
        REQUIRE(load->wait(forever_s));
        CHECK_FALSE(load->fault());
        CHECK_FALSE(load->cancelled());
        CHECK(load->bad_chunks() == std::vector<std::uint64_t>{1});
        CHECK(target.start()[mib + 5] == std::byte{0x11});
        CHECK(load->requests() < 30);

        const Memory in_phase(30 * mib, 0);  // straight into the target: named, and touched
        rows.rows[0].address = in_phase.address();
        const auto direct = fixture.run(rows);
        CHECK(direct->bad_chunks() == std::vector<std::uint64_t>{1});
        CHECK(direct->touched()[0]);

        rows.rows[0].address = verify_only;
        const auto verify = fixture.run(rows);
        CHECK(verify->bad_chunks() == std::vector<std::uint64_t>{1});
        CHECK_FALSE(verify->touched()[0]);
    }
}

TEST_CASE("a job that is not to stop at a bad chunk names all and stores the good ones") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(20 * mib, 0);
        IoFixture fixture(setup, sample.file_bytes);
        const auto job = fixture.run(sample.rows);
        for (const std::uint64_t chunk : {2, 11, 19}) fixture.scratch.put(chunk * mib, ~sample.stored[0][chunk * mib]);
        const Memory target(20 * mib, 1);
        std::memset(target.start(), 0x11, 20 * mib);
        const ReadExtents rows{{{0, 20 * mib, target.address(), 0, 0, 20, contiguous, 0}}, {}, job->digests()};
        const auto load = fixture.start(rows, false);
        REQUIRE(load->wait(forever_s));
        CHECK(load->bad_chunks() == std::vector<std::uint64_t>{2, 11, 19});
        CHECK(load->done_bytes() == 17 * mib);
        CHECK(std::memcmp(target.start() + 12 * mib, sample.stored[0].data() + 12 * mib, mib) == 0);
        CHECK(target.start()[2 * mib + 1] == std::byte{0x11});
    }
}

TEST_CASE("cancel lands what is in flight and names no fault") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(40 * mib, 64);
        IoFixture fixture(setup, sample.file_bytes, nullptr, 6);
        const auto job = fixture.start(sample.rows);
        job->cancel();
        REQUIRE(job->wait_captured(forever_s));
        REQUIRE(job->wait(forever_s));
        CHECK(job->cancelled());
        CHECK_FALSE(job->fault());
        CHECK(job->done_bytes() < sample.file_bytes);
        CHECK(fixture.arena->free_bytes() == fixture.arena->touched_bytes());
        fixture.start(sample.rows).reset();  // dropped while it runs
        CHECK(fixture.arena->free_bytes() == fixture.arena->touched_bytes());
        fixture.run(WriteExtents{})->cancel();  // finished: too late to count
    }
}

TEST_CASE("a short file is fine where no wanted byte is missing, and end of file otherwise") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        CAPTURE(setup.direct);
        const Sample sample = plain_sample(mib + 1000);
        IoFixture fixture(setup, sample.file_bytes);
        const auto job = fixture.run(sample.rows);
        for (const bool is_enough : {true, false}) {
            fixture.scratch.truncate(mib + (is_enough ? 1000 : 999));
            std::vector<Memory> targets;
            const auto load = fixture.run(read_back(sample, job->digests(), targets, 1));
            CHECK(load->fault().has_value() == !is_enough);
            if (is_enough)
                CHECK(equal(sample.stored[0], targets[0].start()));
            else
                CHECK(load->fault()->operation == "end of file");
        }
    }
}

TEST_CASE("the engine refuses what it cannot carry out") {
    for (const Setup& setup : setups()) {
        IoFixture fixture(setup, 4096);
        fixture.engine.close();
        fixture.engine.close();
        CHECK_THROWS_WITH(fixture.start(WriteExtents{}), "the engine is closed");
        CHECK_THROWS_AS(Engine({setup.backend, 1, 4095, 1}), std::invalid_argument);
        CHECK_THROWS_AS(Engine({"pigeon", 1, 4096, 1}), std::invalid_argument);
        Engine large({setup.backend, 1, 4 * mib, 1});
        CHECK_THROWS_AS(
            large.write(fixture.arena, {{fixture.scratch.file(), 4096}}, std::make_shared<WriteExtents>(), {}),
            std::invalid_argument);
    }
}

// --- what the system may do in between -------------------------------------------------------

TEST_CASE("short counts, EINTR and EAGAIN change nothing but the time") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        CAPTURE(setup.direct);
        std::atomic<std::uint64_t> calls{0};
        const std::uint64_t unit = setup.direct ? block_alignment_bytes : 1000;
        const auto injector = [&](Direction, std::uint64_t, std::uint64_t length) -> InjectedFault {
            switch (calls++ % 5) {
                case 0: return {EINTR, 0};
                case 1: return {EAGAIN, 0};
                case 2: return {0, unit * (1 + length / 3 / unit)};
                case 3: return {0, unit};
                default: return {};
            }
        };
        for (std::uint64_t seed = 10; seed < 13; ++seed) check_round_trip(setup, seed, 3, injector);
        CHECK(calls > 100);
    }
}

TEST_CASE("a failing write is named by operation, errno, path and range, and stops the job") {
    for (const Setup& setup : setups())
        for (const int error : {ENOSPC, EIO, ECANCELED}) {
            CAPTURE(setup.backend);
            CAPTURE(error);
            const Sample sample = plain_sample(40 * mib, 64);
            const auto injector = [&](Direction, std::uint64_t offset, std::uint64_t) -> InjectedFault {
                return {offset == 2 * mib ? error : 0, UINT64_MAX};
            };
            IoFixture fixture(setup, sample.file_bytes, injector);
            const auto job = fixture.run(sample.rows);
            REQUIRE(job->fault());
            CHECK(job->wait_captured(0));
            CHECK(job->fault()->operation == "write");
            CHECK(job->fault()->error == error);
            CHECK(*job->fault()->path == fixture.scratch.path());
            CHECK(job->fault()->offset == 2 * mib);
            CHECK(job->fault()->length == mib);
            CHECK_FALSE(job->cancelled());
            CHECK(job->done_bytes() < sample.file_bytes);
            CHECK(fixture.arena->free_bytes() == fixture.arena->touched_bytes());
        }
}

TEST_CASE("every write failing at once is one fault") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(40 * mib, 64);
        IoFixture fixture(
            setup, sample.file_bytes, [](Direction, std::uint64_t, std::uint64_t) -> InjectedFault { return {EIO, 0}; },
            20);
        CHECK(fixture.run(sample.rows)->fault()->error == EIO);
    }
}

TEST_CASE("a failing read is named and touches no target") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(10 * mib, 0);
        const auto injector = [](Direction direction, std::uint64_t offset, std::uint64_t) -> InjectedFault {
            return {direction == Direction::read && offset == 0 ? EIO : 0, UINT64_MAX};
        };
        IoFixture fixture(setup, sample.file_bytes, injector);
        const auto job = fixture.run(sample.rows);
        const Memory target(10 * mib, 1);
        const ReadExtents rows{{{0, 10 * mib, target.address(), 0, 0, 10, contiguous, 0}}, {}, job->digests()};
        const auto load = fixture.run(rows);
        REQUIRE(load->fault());
        CHECK(load->fault()->operation == "read");
        CHECK(load->fault()->error == EIO);
        CHECK(load->fault()->offset == 0);
    }
}

TEST_CASE("of reads that fail together the lowest range is named, whichever fails first") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(10 * mib, 64);
        const auto injector = [](Direction direction, std::uint64_t offset, std::uint64_t) -> InjectedFault {
            if (direction == Direction::write) return {};
            if (offset == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the others fail meanwhile
            return {EIO, 0};
        };
        IoFixture fixture(setup, sample.file_bytes, injector);
        const auto job = fixture.run(sample.rows);
        const Memory target(10 * mib, 1);
        const ReadExtents rows{{{0, 10 * mib, target.address(), 0, 0, 10, contiguous, 0}}, {}, job->digests()};
        const auto load = fixture.run(rows);
        REQUIRE(load->fault());
        CHECK(load->fault()->offset == 0);
    }
}

TEST_CASE("mapped memory is checked where it lies, and asks for nothing") {
    for (const std::uint64_t damaged : {std::uint64_t{1}, std::uint64_t{0}}) {
        IoFixture fixture({"posix", false}, 4096);
        const Sample sample = plain_sample(10 * mib + 5);
        std::vector<std::byte> memory = sample.expected;
        std::vector<std::uint64_t> digests;
        for (std::uint64_t at = 0; at < 10 * mib + 5; at += mib)
            digests.push_back(xxh3_64(memory.data() + at, std::min(mib, 10 * mib + 5 - at)));
        memory[3 * mib + 9] ^= static_cast<std::byte>(damaged);
        const std::uint64_t hidden = 1 << 20;  // nothing before that is there
        const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
        const auto file = std::make_shared<const File>(
            File{fixture.scratch.file()->fd, std::make_shared<std::string>("memory"), 1, begin - hidden});
        const Memory target(10 * mib + 5, 1);
        std::memset(target.start(), 0, 10 * mib + 5);
        const ReadExtents rows{{{hidden, 10 * mib + 5, target.address(), 0, 0, 11, contiguous, 0}}, {}, digests};
        const auto load = fixture.engine.read(fixture.arena, {file}, std::make_shared<ReadExtents>(rows),
                                              {.stop_at_bad = damaged != 0});
        REQUIRE(load->wait(forever_s));
        CHECK(!load->fault());
        CHECK(load->requested_bytes() == 0);
        CHECK(fixture.arena->touched_bytes() == 0);
        CHECK(load->bad_chunks() == (damaged ? std::vector<std::uint64_t>{3} : std::vector<std::uint64_t>{}));
        CHECK((std::memcmp(target.start(), memory.data(), 10 * mib + 5) == 0) == (damaged == 0));
        if (damaged) CHECK(std::to_integer<int>(target.start()[3 * mib + 9]) == 0);
    }
}

TEST_CASE("rows of files that are not there are left out, and what they would be read into stays as it was") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        CAPTURE(setup.direct);
        IoFixture fixture(setup, 2 * mib);
        const Memory target(4 * mib, 1);
        std::memset(target.start(), 0x5A, 4 * mib);
        const std::vector<std::byte> stored = fixture.scratch.contents();
        const std::uint64_t first = xxh3_64(stored.data(), mib), second = xxh3_64(stored.data() + mib, mib);
        const ReadExtents rows{{{0, 2 * mib, target.address(), 0, 0, 2, contiguous, 0},
                                {0, 2 * mib, target.address() + 2 * mib, 2, 0, 2, contiguous, 1}},
                               {},
                               {first, second, first, second}};
        const auto load = fixture.engine.read(fixture.arena, {nullptr, fixture.scratch.file()},
                                              std::make_shared<ReadExtents>(rows), {});
        REQUIRE(load->wait(forever_s));
        CHECK(!load->fault());
        CHECK(load->bad_chunks().empty());
        CHECK(load->requested_bytes() == 2 * mib);
        CHECK(load->touched() == std::vector<bool>{false, true});
        CHECK(std::to_integer<int>(target.start()[2 * mib - 1]) == 0x5A);
        CHECK(std::memcmp(target.start() + 2 * mib, stored.data(), 2 * mib) == 0);
    }
}

TEST_CASE("a descriptor that cannot be written is EBADF") {
    for (const Setup& setup : setups()) {
        IoFixture fixture(setup, 4096);
        const int fd = ::open(fixture.scratch.path().c_str(), O_RDONLY | O_CLOEXEC);
        const Sample sample = plain_sample(10);
        const auto file =
            std::make_shared<const File>(File{fd, std::make_shared<std::string>(fixture.scratch.path()), 1});
        const auto job =
            fixture.engine.write(fixture.arena, {{file, 4096}}, std::make_shared<WriteExtents>(sample.rows), {});
        REQUIRE(job->wait(forever_s));
        CHECK(job->fault()->error == EBADF);
        CHECK(job->fault()->length == 4096);
        ::close(fd);
    }
}

}  // namespace flowstone
