// The backend whose ops the caller carries out: the same promises, and what becomes of ops that it does not carry out.
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "tests/io_fixture.h"

namespace flowstone {
namespace {

/// Threads that carry out the ops of an engine on real files, until this is destroyed.
class Carriers {
public:
    Carriers(Engine& engine, int fd, int error = 0) : caller_(engine.caller()) {
        for (const Direction direction : {Direction::write, Direction::read})
            for (int i = 0; i < 2; ++i)
                threads_.emplace_back([this, direction, fd, error] { run(direction, fd, error); });
    }
    ~Carriers() {
        stopping_ = true;
        for (std::thread& thread : threads_) thread.join();
    }

private:
    void run(Direction direction, int fd, int error) {
        while (!stopping_)
            for (const CallerBackend::Request& op : caller_->take(direction, fd, fd + 1, 2, 0.01)) {
                const auto at = static_cast<off_t>(op.offset);
                if (op.memory.iov_base == nullptr) {
                    std::vector<std::byte> own(op.memory.iov_len);
                    const ssize_t found = error != 0 ? 0 : ::pread(fd, own.data(), own.size(), at);
                    caller_->complete(op.number, static_cast<std::uint64_t>(found), error, own.data());
                    continue;
                }
                const ssize_t moved = error != 0    ? 0
                    : direction == Direction::write ? ::pwrite(fd, op.memory.iov_base, op.memory.iov_len, at)
                                                    : ::pread(fd, op.memory.iov_base, op.memory.iov_len, at);
                caller_->complete(op.number, static_cast<std::uint64_t>(moved), error);
            }
    }

    const std::shared_ptr<CallerBackend> caller_;
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};

std::shared_ptr<ReadJob> start_read(IoFixture& fixture, const ReadExtents& rows) {
    return fixture.engine.read(fixture.arena, {fixture.scratch.file()}, std::make_shared<ReadExtents>(rows),
                               {.in_place = false});
}

/// From memory of the caller's, with an arena of which nothing is to be touched.
std::shared_ptr<ReadJob> start_lent(IoFixture& fixture, const std::shared_ptr<Arena>& arena, const ReadExtents& rows) {
    return fixture.engine.read(arena, {fixture.scratch.file()}, std::make_shared<ReadExtents>(rows),
                               {.in_place = false, .lent = true});
}

const Setup caller_setup{"caller", false};

}  // namespace

TEST_CASE("rows come back that the caller's threads have written and read") {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        CAPTURE(seed);
        const Sample sample = random_sample(seed, 24);
        IoFixture fixture(caller_setup, sample.file_bytes, nullptr, seed % 2 ? 2 : 20);
        const Carriers carriers(fixture.engine, fixture.scratch.file()->fd);
        const auto job = fixture.run(sample.rows);
        REQUIRE_FALSE(job->fault());
        REQUIRE(fixture.scratch.contents() == sample.expected);
        std::vector<Memory> targets;
        const auto load = start_read(fixture, read_back(sample, job->digests(), targets, seed));
        REQUIRE(load->wait(forever_s));
        REQUIRE_FALSE(load->fault());
        REQUIRE(load->bad_chunks().empty());
        for (std::size_t i = 0; i < targets.size(); ++i)
            REQUIRE((sample.stored[i].empty() ||
                     std::memcmp(sample.stored[i].data(), targets[i].start(), sample.stored[i].size()) == 0));
    }
}

TEST_CASE("windows are known before they are written, and cover what is") {
    const Sample sample = plain_sample(5 * mib + 17, 128);
    IoFixture fixture(caller_setup, sample.file_bytes);
    const auto job = fixture.start(sample.rows);
    std::uint64_t end = 0;
    for (const WriteWindow& window : job->windows()) {
        CHECK(window.begin == end);
        end = window.end;
    }
    CHECK(end >= 5 * mib + 17);
    const Carriers carriers(fixture.engine, fixture.scratch.file()->fd);
    REQUIRE(job->wait(forever_s));
}

TEST_CASE("what the caller lends is verified and stored, and takes no block") {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        CAPTURE(seed);
        const Sample sample = random_sample(seed, 24);
        IoFixture fixture(caller_setup, sample.file_bytes, nullptr, 20);
        const Carriers carriers(fixture.engine, fixture.scratch.file()->fd);
        const auto job = fixture.run(sample.rows);
        const auto arena = std::make_shared<Arena>(4 * huge_page_bytes, huge_page_bytes);
        std::vector<Memory> targets;
        const auto load = start_lent(fixture, arena, read_back(sample, job->digests(), targets, seed));
        REQUIRE(load->wait(forever_s));
        REQUIRE_FALSE(load->fault());
        REQUIRE(load->bad_chunks().empty());
        for (std::size_t i = 0; i < targets.size(); ++i)
            REQUIRE((sample.stored[i].empty() ||
                     std::memcmp(sample.stored[i].data(), targets[i].start(), sample.stored[i].size()) == 0));
        CHECK(arena->touched_bytes() == 0);
    }
}

TEST_CASE("what is lent and damaged, too short, not there or refused reaches no target") {
    const Sample sample = plain_sample(3 * mib);
    IoFixture fixture(caller_setup, sample.file_bytes);
    const auto arena = std::make_shared<Arena>(4 * huge_page_bytes, huge_page_bytes);
    std::vector<std::uint64_t> digests;
    {
        const Carriers carriers(fixture.engine, fixture.scratch.file()->fd);
        digests = fixture.run(sample.rows)->digests();
    }
    const auto caller = fixture.engine.caller();
    const int fd = fixture.scratch.file()->fd;
    const std::vector<std::byte> wrong(8 * mib, std::byte{1});
    for (const std::string how : {"damaged", "too short", "not there", "refused"}) {
        CAPTURE(how);
        std::vector<Memory> targets;
        const auto load = start_lent(fixture, arena, read_back(sample, digests, targets, 1));
        while (!load->wait(0))
            for (const CallerBackend::Request& op : caller->take(Direction::read, fd, fd + 1, 1, 0.01)) {
                REQUIRE(op.memory.iov_base == nullptr);
                if (how == "damaged")
                    caller->complete(op.number, op.needed_bytes, 0, wrong.data());
                else if (how == "too short")
                    caller->complete(op.number, op.needed_bytes - 1, 0, wrong.data());
                else if (how == "not there")
                    caller->complete(op.number, op.needed_bytes, 0);
                else
                    caller->complete(op.number, 0, EIO);
            }
        CHECK(load->bad_chunks().empty() == (how != "damaged"));
        CHECK(load->fault().has_value() == (how != "damaged"));
        if (how == "not there") CHECK(load->fault()->error == EFAULT);
        for (const bool touched : load->touched()) CHECK_FALSE(touched);
    }
}

TEST_CASE("only the caller's ops can be lent memory") {
    const Sample sample = plain_sample(mib);
    IoFixture fixture({"posix", false}, sample.file_bytes);
    const auto job = fixture.run(sample.rows);
    std::vector<Memory> targets;
    CHECK_THROWS_AS(start_lent(fixture, fixture.arena, read_back(sample, job->digests(), targets, 1)),
                    std::invalid_argument);
}

TEST_CASE("an error of the caller's is a fault with its range, and the job ends") {
    const Sample sample = plain_sample(10 * mib);
    IoFixture fixture(caller_setup, sample.file_bytes);
    const Carriers carriers(fixture.engine, fixture.scratch.file()->fd, EIO);
    const auto job = fixture.run(sample.rows);
    REQUIRE(job->fault());
    CHECK(job->fault()->operation == "write");
    CHECK(job->fault()->error == EIO);
    CHECK(job->fault()->length > 0);
}

TEST_CASE("a file that ends early is a fault at its end") {
    const Sample sample = plain_sample(10 * mib);
    IoFixture fixture(caller_setup, sample.file_bytes);
    const Carriers carriers(fixture.engine, fixture.scratch.file()->fd);
    const auto job = fixture.run(sample.rows);
    fixture.scratch.truncate(4 * mib + 5);
    std::vector<Memory> targets;
    const auto load = start_read(fixture, read_back(sample, job->digests(), targets, 1));
    REQUIRE(load->wait(forever_s));
    REQUIRE(load->fault());
    CHECK(load->fault()->operation == "end of file");
    CHECK(load->fault()->offset == 4 * mib + 5);
}

TEST_CASE("ops of a job that stops are dropped by the next take, and others stay") {
    const Sample sample = plain_sample(10 * mib);
    IoFixture fixture(caller_setup, sample.file_bytes);
    const auto caller = fixture.engine.caller();
    const int fd = fixture.scratch.file()->fd;
    const auto job = fixture.start(sample.rows);
    CHECK(caller->take(Direction::read, fd, fd + 1, 1, 0.0).empty());
    CHECK(caller->take(Direction::write, fd + 1, fd + 2, 1, 0.0).empty());
    const auto taken = caller->take(Direction::write, fd, fd + 1, 1, 60.0);
    REQUIRE(taken.size() == 1);
    job->cancel();
    CHECK_FALSE(job->wait(0.05));
    caller->complete(taken[0].number, taken[0].memory.iov_len, 0);
    while (!job->wait(0)) CHECK(caller->take(Direction::write, fd, fd + 1, 8, 0.01).empty());
    CHECK(job->cancelled());
    CHECK_FALSE(job->fault());
    CHECK_THROWS_AS(caller->complete(taken[0].number, 0, 0), std::invalid_argument);
}

TEST_CASE("an engine of another backend has no ops for its caller") {
    IoFixture fixture({"posix", false}, 4096);
    CHECK_THROWS_AS(fixture.engine.caller(), std::invalid_argument);
    IoFixture closed(caller_setup, 4096);
    closed.engine.close();
    CHECK_THROWS_AS(closed.engine.caller(), std::invalid_argument);
}

}  // namespace flowstone
