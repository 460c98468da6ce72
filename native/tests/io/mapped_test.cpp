// Files that are mapped: captured where they stay, and what no row covers of them is cleared.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "tests/io_fixture.h"

namespace flowstone {
namespace {

/// What a mapped file must hold: blocks that no row touches are zero, not what they were.
std::vector<std::byte> cleared(const Sample& sample) {
    std::vector<bool> touched(sample.file_bytes / block_alignment_bytes, false);
    for (const WriteExtent& row : sample.rows.rows)
        for (std::uint64_t at = block_floor(row.offset); row.length != 0 && at < row.end(); at += block_alignment_bytes)
            touched[at / block_alignment_bytes] = true;
    std::vector<std::byte> expected = sample.expected;
    for (std::size_t block = 0; block < touched.size(); ++block)
        if (!touched[block]) std::memset(expected.data() + block * block_alignment_bytes, 0, block_alignment_bytes);
    return expected;
}

std::shared_ptr<const File> mapped(const IoFixture& fixture, std::uint64_t bytes) {
    File file = *fixture.scratch.file();
    file.mapping = std::make_shared<const Mapping>(file.fd, bytes, true);
    file.mapped = file.mapping->address();
    return std::make_shared<const File>(std::move(file));
}

}  // namespace

TEST_CASE("a mapped file is captured where it stays, without a request, and without a block") {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        CAPTURE(seed);
        const Sample sample = random_sample(seed, 40);
        IoFixture plain({"posix", false}, sample.file_bytes);
        const auto expected = plain.run(sample.rows)->digests();
        IoFixture fixture({"posix", false}, sample.file_bytes);
        const auto job = fixture.engine.write(fixture.arena, {{mapped(fixture, sample.file_bytes), sample.file_bytes}},
                                              std::make_shared<WriteExtents>(sample.rows), {});
        REQUIRE(job->wait(forever_s));
        CHECK(!job->fault());
        CHECK(job->requests() == 0);
        CHECK(fixture.arena->touched_bytes() == 0);
        CHECK(job->digests() == expected);
        CHECK(fixture.scratch.contents() == cleared(sample));
    }
}

TEST_CASE("what is captured before a mapped file is ready goes into it once it is") {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        CAPTURE(seed);
        const Sample sample = random_sample(seed, 40);
        IoFixture plain({"posix", false}, sample.file_bytes);
        const auto expected = plain.run(sample.rows)->digests();
        IoFixture fixture({"posix", false}, sample.file_bytes);
        const auto job = fixture.engine.write(fixture.arena, {{mapped(fixture, sample.file_bytes), sample.file_bytes}},
                                              std::make_shared<WriteExtents>(sample.rows), {.files_ready = false});
        while (fixture.arena->touched_bytes() == 0 && !job->wait(0.001)) continue;
        job->files_ready();
        REQUIRE(job->wait(forever_s));
        CHECK(!job->fault());
        CHECK(job->digests() == expected);
        CHECK(fixture.scratch.contents() == cleared(sample));
    }
}

TEST_CASE("files in memory are told from others") {
    const int memory = ::memfd_create("flowstone-test", MFD_CLOEXEC);
    CHECK(is_byte_addressable(memory));
    ::close(memory);
    CHECK(!is_byte_addressable(-1));
    const int system = ::open("/proc/self/status", O_RDONLY | O_CLOEXEC);
    CHECK(!is_byte_addressable(system));
    ::close(system);
}

TEST_CASE("a mapping that is shorter than its file is refused, and what a read wants past its end is told") {
    IoFixture fixture({"posix", false}, 4 * mib);
    const Sample sample = plain_sample(3 * mib);
    CHECK_THROWS_AS(fixture.engine.write(fixture.arena, {{mapped(fixture, 2 * mib), 4 * mib}},
                                         std::make_shared<WriteExtents>(sample.rows), {}),
                    std::invalid_argument);
    fixture.scratch.truncate(2 * mib);
    const Memory target(4 * mib, 1);
    const ReadExtents rows{
        {{0, 4 * mib, target.address(), 0, 0, 4, contiguous, 0}}, {}, std::vector<std::uint64_t>(4, 0)};
    const auto load = fixture.engine.read(fixture.arena, {mapped(fixture, 2 * mib)},
                                          std::make_shared<ReadExtents>(rows), {.stop_at_bad = false});
    REQUIRE(load->wait(forever_s));
    REQUIRE(load->fault());
    CHECK(load->fault()->operation == "end of file");
    CHECK_THROWS_AS(Mapping(fixture.scratch.file()->fd, 0, false), std::invalid_argument);
}

}  // namespace flowstone
