// Rows whose sources come one after the other, in memory that is used again.
#include <cstring>
#include <memory>
#include <vector>

#include "tests/io_fixture.h"
#include "io/source_supply.h"

namespace flowstone {
namespace {

constexpr std::uint64_t row_length = 300 * kib;  // windows cut rows
constexpr std::size_t row_count = 24;
constexpr std::size_t slots = 16;  // rows that the memory holds

/// Row `row` of a file of `row_count` rows lies in slot `row % slots`.
WriteExtents supplied_rows(const Memory& memory, const std::shared_ptr<SourceSupply>& supply) {
    WriteExtents rows;
    for (std::size_t row = 0; row < row_count; ++row)
        rows.rows.push_back(
            {row * row_length, row_length, memory.address() + row % slots * row_length, row, contiguous, 0});
    rows.chunks = row_count;
    rows.supply = supply;
    return rows;
}

std::shared_ptr<SourceSupply> supply_of_rows() {
    return std::make_shared<SourceSupply>(std::vector<std::uint64_t>(row_count, row_length));
}

void fill(const Memory& memory, std::size_t row) {
    std::memset(memory.start() + row % slots * row_length, static_cast<int>(row + 1), row_length);
}

}  // namespace

TEST_CASE("rows are captured once they are offered, and their memory is used again once they are captured") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        CAPTURE(setup.direct);
        const Memory memory(slots * row_length, 0);
        const auto supply = supply_of_rows();
        IoFixture fixture(setup, block_ceil(row_count * row_length));
        const auto job = fixture.start(supplied_rows(memory, supply));
        CHECK_FALSE(job->wait_captured(0.05));
        CHECK(job->copied_bytes() == 0);
        for (std::size_t row = 0; row < row_count; ++row) {
            while (row >= slots &&
                   supply->await_captured(row - slots, std::chrono::duration<double>(1)) <= row - slots) {}
            fill(memory, row);
            supply->offer(row + 1);
        }
        REQUIRE(job->wait(forever_s));
        REQUIRE_FALSE(job->fault());
        CHECK(supply->await_captured(row_count - 1, std::chrono::duration<double>(0)) == row_count);
        CHECK_FALSE(supply->ended());
        const std::vector<std::byte> found = fixture.scratch.contents();
        for (std::size_t row = 0; row < row_count; ++row) {
            const std::vector<std::byte> expected(row_length, static_cast<std::byte>(row + 1));
            REQUIRE(std::memcmp(found.data() + row * row_length, expected.data(), row_length) == 0);
        }
    }
}

TEST_CASE("a job that is cancelled while it waits for a row ends, and its supply says so") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Memory memory(slots * row_length, 0);
        const auto supply = supply_of_rows();
        IoFixture fixture(setup, block_ceil(row_count * row_length));
        const auto job = fixture.start(supplied_rows(memory, supply));
        fill(memory, 0);
        supply->offer(1);
        job->cancel();
        REQUIRE(job->wait(forever_s));
        CHECK(supply->ended());
    }
}

}  // namespace flowstone
