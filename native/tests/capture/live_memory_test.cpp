// Memory that goes away while it is read: an error number, never a signal.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/io_fixture.h"
#include "capture/live_memory.h"
#include "watch/mutation_detector.h"

namespace flowstone {
namespace {

constexpr std::uint64_t page = 4096;

/// Pages that a test takes away.
class Pages {
public:
    explicit Pages(std::uint64_t bytes) : bytes_(bytes) {
        start_ =
            static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        REQUIRE(start_ != MAP_FAILED);
        for (std::uint64_t i = 0; i < bytes; i += 8) {
            const std::uint64_t word = i * 0x9E3779B97F4A7C15U;
            std::memcpy(start_ + i, &word, 8);
        }
    }
    ~Pages() { ::munmap(start_, bytes_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    std::byte* start() const { return start_; }
    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(start_); }
    /// Makes them inaccessible. They stay mapped, so that no other memory is mapped there.
    void take(std::uint64_t begin, std::uint64_t end) const {
        REQUIRE(::mprotect(start_ + begin, end - begin, PROT_NONE) == 0);
    }
    void give(std::uint64_t begin, std::uint64_t end) const {
        REQUIRE(::mprotect(start_ + begin, end - begin, PROT_READ | PROT_WRITE) == 0);
    }

private:
    std::uint64_t bytes_;
    std::byte* start_;
};

constexpr LiveAccess::Way ways[] = {LiveAccess::Way::process_vm, LiveAccess::Way::memory_file};

/// A paced job: it waits to be expedited, and then copies what it has blocks for.
std::shared_ptr<WriteJob> start(IoFixture& fixture, const WriteExtents& rows) {
    return fixture.engine.write(fixture.arena, {{fixture.scratch.file(), fixture.file_bytes}},
                                std::make_shared<WriteExtents>(rows), {.blocks = 2, .bytes_per_s = 1});
}

WriteExtent lazy_row(std::uint64_t offset, std::uint64_t length, std::uint64_t address, WriteExtents& rows,
                     std::int64_t layout = contiguous) {
    const WriteExtent row{offset, length, address, rows.chunks, layout, 0, true};
    rows.chunks += chunk_count(length);
    return row;
}

}  // namespace

TEST_CASE("reading live memory gives what is there, of any length and from anywhere") {
    const Pages pages(3 * mib);
    for (const LiveAccess::Way way : ways) {
        LiveAccess live(way);
        for (const std::uint64_t length :
             {std::uint64_t{0}, std::uint64_t{1}, page, 256 * kib, 256 * kib + 1, 2 * mib + 77}) {
            std::vector<std::byte> out(length + 1, std::byte{0x11});
            REQUIRE(live.read(out.data(), pages.start() + 13, length) == 0);
            CHECK(std::memcmp(out.data(), pages.start() + 13, length) == 0);
            CHECK(out[length] == std::byte{0x11});
        }
        const iovec runs[] = {
            {pages.start() + 5, 7}, {pages.start() + mib, 0}, {pages.start() + 2 * mib - 3, 300 * kib}};
        std::vector<std::byte> out(7 + 300 * kib);
        REQUIRE(live.read(out.data(), runs) == 0);
        CHECK(std::memcmp(out.data(), pages.start() + 5, 7) == 0);
        CHECK(std::memcmp(out.data() + 7, pages.start() + 2 * mib - 3, 300 * kib) == 0);
        CHECK(live.way() == way);
    }
}

TEST_CASE("memory that is not there is EFAULT, wherever in the range it is missing") {
    const Pages pages(mib);
    for (const LiveAccess::Way way : ways)
        for (const std::uint64_t gone : {std::uint64_t{0}, 300 * kib, mib - page}) {
            LiveAccess live(way);
            std::vector<std::byte> out(mib);
            pages.take(gone, gone + page);
            CHECK(live.read(out.data(), pages.start(), mib) == EFAULT);
            const iovec runs[] = {{pages.start() + 100 * kib, 100}, {pages.start() + gone, 1}};
            CHECK(live.read(out.data(), runs) == EFAULT);
            pages.give(gone, gone + page);
            CHECK(live.read(out.data(), pages.start(), mib) == 0);
        }
}

TEST_CASE("a file that was mapped and is cut short is EFAULT, not SIGBUS") {
    for (const LiveAccess::Way way : ways) {
        ScratchFile scratch(false, 64 * kib);
        void* const mapped = ::mmap(nullptr, 64 * kib, PROT_READ, MAP_SHARED, scratch.file()->fd, 0);
        REQUIRE(mapped != MAP_FAILED);
        LiveAccess live(way);
        std::vector<std::byte> out(64 * kib);
        CHECK(live.read(out.data(), static_cast<const std::byte*>(mapped), 64 * kib) == 0);
        scratch.truncate(10 * kib);
        CHECK(live.read(out.data(), static_cast<const std::byte*>(mapped), 64 * kib) == EFAULT);
        ::munmap(mapped, 64 * kib);
    }
}

TEST_CASE("of a batch those that are there come, and those that are not are named") {
    const Pages pages(64 * kib);
    pages.take(8 * kib, 12 * kib);
    LiveAccess live;
    LiveBatch<std::size_t> batch(live);
    std::vector<std::byte> out(16 * 64);
    for (std::size_t i = 0; i < 16; ++i) batch.add(out.data() + i * 64, pages.start() + i * page, 64, i);
    std::vector<std::size_t> gone;
    batch.flush([&](std::size_t item, int error) {
        if (error != 0) gone.push_back(item);
        if (error == 0) CHECK(std::memcmp(out.data() + item * 64, pages.start() + item * page, 64) == 0);
    });
    CHECK(gone == std::vector<std::size_t>{2});
    CHECK(batch.empty());
}

TEST_CASE("a source that goes away before it is captured fails the job with its place, and the next job works") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        CAPTURE(setup.direct);
        const Pages pages(12 * mib);
        IoFixture fixture(setup, 12 * mib);
        WriteExtents rows;
        for (std::uint64_t at = 0; at < 12 * mib; at += 4 * mib)
            rows.rows.push_back(lazy_row(at, 4 * mib, pages.address() + at, rows));
        const auto job = start(fixture, rows);
        pages.take(5 * mib, 6 * mib);
        job->expedite();
        REQUIRE(job->wait(forever_s));
        REQUIRE(job->fault());
        CHECK(job->fault()->operation == "capture");
        CHECK(job->fault()->error == EFAULT);
        CHECK(job->fault()->offset >= 4 * mib);
        CHECK(job->fault()->offset + job->fault()->length <= 8 * mib);
        pages.give(5 * mib, 6 * mib);
        const auto next = start(fixture, rows);
        next->expedite();
        REQUIRE(next->wait(forever_s));
        REQUIRE_FALSE(next->fault());
        const std::vector<std::byte> found = fixture.scratch.contents();
        CHECK(std::memcmp(found.data(), pages.start(), 12 * mib) == 0);
        fixture.arena->close();
    }
}

TEST_CASE("a source that is gone when the job starts is told, whether it is early, strided or short") {
    const Pages pages(2 * mib);
    pages.take(0, mib);
    for (const Setup& setup : setups())
        for (const int kind : {0, 1, 2, 3}) {
            CAPTURE(setup.backend);
            CAPTURE(kind);
            IoFixture fixture(setup, 4 * mib);
            WriteExtents rows;
            const std::uint64_t shape[] = {64 * kib};
            const std::int64_t strides[] = {8};
            rows.layouts.push_back(Layout::whole(4, shape, strides));
            rows.rows.push_back(lazy_row(0, mib, pages.address() + mib, rows));
            rows.rows.push_back(
                lazy_row(2 * mib, kind == 3 ? 100 : 256 * kib, pages.address(), rows, kind == 2 ? 0 : contiguous));
            rows.rows[1].lazy = kind == 1;
            const auto job = start(fixture, rows);
            job->expedite();
            REQUIRE(job->wait(forever_s));
            REQUIRE(job->fault());
            CHECK(job->fault()->operation == "capture");
            CHECK(job->fault()->error == EFAULT);
            CHECK(job->fault()->offset >= 2 * mib);
        }
}

TEST_CASE("sources that go away and come back at any instant never end the process") {
    for (const Setup& setup : setups()) {
        const Pages pages(6 * mib);
        std::atomic<bool> done{false};
        std::jthread taker([&] {
            for (std::uint64_t i = 0; !done; ++i) {
                const std::uint64_t begin = (i * 7919 * page) % (6 * mib);
                (void)::mprotect(pages.start() + begin, page, PROT_NONE);
                (void)::mprotect(pages.start() + begin, page, PROT_READ | PROT_WRITE);
            }
        });
        IoFixture fixture(setup, 8 * mib);
        WriteExtents rows;
        const std::uint64_t shape[] = {256 * kib};
        const std::int64_t strides[] = {4};
        rows.layouts.push_back(Layout::whole(2, shape, strides));
        rows.rows.push_back(lazy_row(0, 4 * mib, pages.address(), rows));
        rows.rows.push_back(lazy_row(4 * mib, 512 * kib, pages.address() + 4 * mib, rows, 0));
        for (std::uint64_t at = 6 * mib; at < 6 * mib + 64 * kib; at += 128)
            rows.rows.push_back(lazy_row(at, 100, pages.address() + at - mib, rows));
        for (int round = 0; round < 5; ++round) {
            const auto job = start(fixture, rows);
            job->expedite();
            REQUIRE(job->wait(forever_s));
            if (job->fault()) CHECK(job->fault()->operation == "capture");
        }
        done = true;
    }
}

TEST_CASE("samples of what is not there are an error, not a digest") {
    const Pages pages(mib);
    WriteExtents rows;
    rows.rows.push_back(lazy_row(0, mib, pages.address(), rows));
    CHECK(sample_digests(rows).size() == 1);
    pages.take(0, mib);
    CHECK_THROWS_AS(sample_digests(rows), std::system_error);
}

TEST_CASE("what is lent is kept for the next, and a forked child makes its own") {
    const Pages pages(page);
    const std::byte* first = nullptr;
    {
        const LentAccess lent;
        first = (*lent).bounce();
        const LentAccess other;
        CHECK((*other).bounce() != first);
    }
    // The first goes back last, and is the one that is kept.
    CHECK((*LentAccess()).bounce() == first);
    const pid_t child = ::fork();
    if (child == 0) {
        const LentAccess lent;
        const bool is_read = (*lent).is_own() && (*lent).read((*lent).bounce(), pages.start(), page) == 0;
        ::_exit(is_read && std::memcmp((*lent).bounce(), pages.start(), page) == 0 ? 0 : 1);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK((*LentAccess()).bounce() == first);
}

TEST_CASE("a part of a row is copied as it is, or is an error where it is not there any more") {
    const Pages pages(mib);
    WriteExtents rows;
    rows.rows.push_back(lazy_row(0, mib, pages.address(), rows));
    std::vector<std::byte> out(mib);
    CHECK(copy_part(rows, 0, 5000, mib, out.data()) == 0);
    CHECK(std::memcmp(out.data(), pages.start() + 5000, mib - 5000) == 0);
    CHECK_THROWS_AS(copy_part(rows, 0, 0, mib + 1, out.data()), std::invalid_argument);
    CHECK_THROWS_AS(copy_part(rows, 1, 0, 1, out.data()), std::invalid_argument);
    pages.take(mib - page, mib);
    CHECK(copy_part(rows, 0, 0, mib - page, out.data()) == 0);
    CHECK(copy_part(rows, 0, 0, mib, out.data()) == EFAULT);
}

}  // namespace flowstone
