// What happens between two attempts at one request: the file shrinks, the space runs out, nothing moves.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "tests/io_fixture.h"

namespace flowstone {
namespace {

constexpr std::uint64_t first_count = 256 * kib;

/// One row that is one request, and how it was attempted.
struct OneRequest {
    Sample sample = plain_sample(mib);
    Memory target{mib, 1};  // out of phase: through the arena

    ReadExtents read(const std::vector<std::uint64_t>& digests) const {
        return {{{0, mib, target.address(), 0, 0, 1, contiguous, 0}}, {}, digests};
    }
};

/// Cuts the first attempt in `direction` short; before the second one, does something else.
template <class Act> FaultInjector cut_then(Direction direction, std::atomic<int>& attempts, Act act) {
    return [direction, &attempts, act](Direction asked, std::uint64_t, std::uint64_t) -> InjectedFault {
        if (asked != direction) return {};
        return ++attempts == 1 ? InjectedFault{0, first_count} : act();
    };
}

}  // namespace

TEST_CASE("a file that shrinks after a short count ends where it ends, and touches no target") {
    for (const Setup& setup : setups())
        for (const std::uint64_t kept : {std::uint64_t{0}, 100 * kib, 300 * kib, 300 * kib + 100}) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(kept);
            const OneRequest one;
            std::atomic<int> attempts{0};
            ScratchFile* scratch = nullptr;
            IoFixture fixture(setup, one.sample.file_bytes, cut_then(Direction::read, attempts, [&]() -> InjectedFault {
                                  scratch->truncate(kept);
                                  return {};
                              }));
            scratch = &fixture.scratch;
            const auto job = fixture.run(one.sample.rows);
            REQUIRE_FALSE(job->fault());
            std::memset(one.target.start(), 0x11, mib);
            const auto load = fixture.run(one.read(job->digests()));
            REQUIRE(load->fault());
            CHECK(load->fault()->operation == "end of file");
            CHECK(load->fault()->error == 0);
            // What had arrived before stays arrived; O_DIRECT counts whole blocks.
            const std::uint64_t unit = setup.direct ? fixture.scratch.file()->alignment : 1;
            CHECK(load->fault()->offset == std::max(first_count, round_down(kept, unit)));
            CHECK(load->fault()->offset + load->fault()->length == mib);
            CHECK(one.target.start()[0] == std::byte{0x11});
            CHECK_FALSE(load->touched()[0]);
            CHECK(attempts >= 2);
        }
}

TEST_CASE("space that runs out after a short count is told with what is left to write") {
    for (const Setup& setup : setups())
        for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(error);
            const OneRequest one;
            std::atomic<int> attempts{0};
            IoFixture fixture(
                setup, one.sample.file_bytes,
                cut_then(Direction::write, attempts, [&]() -> InjectedFault { return {error, UINT64_MAX}; }));
            const auto job = fixture.run(one.sample.rows);
            REQUIRE(job->fault());
            CHECK(job->fault()->error == error);
            CHECK(job->fault()->offset == first_count);
            CHECK(job->fault()->length == mib - first_count);
            CHECK(attempts == 2);
        }
}

TEST_CASE("a refusal is not tried again") {
    for (const Setup& setup : setups())
        for (const int error : {EINVAL, EPERM, ENOSYS}) {
            CAPTURE(setup.backend);
            CAPTURE(error);
            const OneRequest one;
            std::atomic<int> attempts{0};
            IoFixture fixture(setup, one.sample.file_bytes,
                              [&](Direction, std::uint64_t, std::uint64_t) -> InjectedFault {
                                  ++attempts;
                                  return {error, UINT64_MAX};
                              });
            const auto job = fixture.run(one.sample.rows);
            REQUIRE(job->fault());
            CHECK(job->fault()->error == error);
            CHECK(attempts == 1);
        }
}

TEST_CASE("a write that moves nothing is EIO, a read that moves nothing is the end of the file") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        CAPTURE(setup.direct);
        const OneRequest one;
        std::atomic<bool> stuck{true};
        IoFixture fixture(setup, one.sample.file_bytes, [&](Direction, std::uint64_t, std::uint64_t) -> InjectedFault {
            return {0, stuck ? 0 : UINT64_MAX};
        });
        CHECK(fixture.run(one.sample.rows)->fault()->error == EIO);
        stuck = false;
        const auto job = fixture.run(one.sample.rows);
        REQUIRE_FALSE(job->fault());
        stuck = true;
        const auto load = fixture.run(one.read(job->digests()));
        REQUIRE(load->fault());
        CHECK(load->fault()->operation == "end of file");
        CHECK(load->fault()->offset == 0);
    }
}

}  // namespace flowstone
