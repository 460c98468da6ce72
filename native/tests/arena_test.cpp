#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <optional>
#include <thread>
#include <vector>

#include "arena.h"
#include "bounds.h"

namespace flowstone {
namespace {

constexpr std::uint64_t block = huge_page_bytes;
bool never() { return false; }
bool at_once() { return true; }

}  // namespace

TEST_CASE("budget is whole blocks and at least two") {
    CHECK(Arena(0, block).budget_bytes() == 2 * block);
    CHECK(Arena(5 * block + 1, block).budget_bytes() == 5 * block);
    CHECK_THROWS_AS(Arena(block, 4096), std::invalid_argument);
    CHECK_THROWS_AS(Arena(block, block + 1), std::invalid_argument);
}

TEST_CASE("nothing is touched before grow, and never more than the budget") {
    Arena arena(3 * block, block);
    CHECK(arena.touched_bytes() == 0);
    CHECK_FALSE(arena.acquire(at_once));
    arena.grow(100 * block);
    std::vector<Block> blocks;
    std::set<std::byte*> addresses;
    for (int i = 0; i < 3; ++i) {
        blocks.push_back(*arena.acquire(never));
        addresses.insert(blocks.back().bytes());
        CHECK(reinterpret_cast<std::uintptr_t>(blocks.back().bytes()) % huge_page_bytes == 0);
        blocks.back().bytes()[block - 1] = std::byte{1};
    }
    CHECK(addresses.size() == 3);
    CHECK_FALSE(arena.acquire(at_once));
    CHECK(arena.touched_bytes() == 3 * block);
    CHECK(arena.free_bytes() == 0);
}

TEST_CASE("what is to grow when idle waits for the last job") {
    Arena arena(8 * block, block);
    std::optional<Stay> stay(std::in_place, arena);
    arena.grow(4 * block, true);
    arena.grow(2 * block);
    std::vector<Block> blocks;
    for (int i = 0; i < 2; ++i) blocks.push_back(*arena.acquire(never));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // of touching, were there any
    CHECK(arena.touched_bytes() == 2 * block);
    stay.reset();
    for (int i = 0; i < 2; ++i) blocks.push_back(*arena.acquire(never));
    CHECK(arena.touched_bytes() == 4 * block);
}

TEST_CASE("the block given back last is taken first") {
    Arena arena(2 * block, block);
    arena.grow(2 * block);
    Block first = *arena.acquire(never);
    Block second = *arena.acquire(never);
    std::byte* const address = first.bytes();
    second.release();
    first.release();
    CHECK(arena.acquire(at_once)->bytes() == address);
}

TEST_CASE("acquire sleeps until a block comes back") {
    Arena arena(2 * block, block);
    arena.grow(2 * block);
    Block first = *arena.acquire(never);
    Block second = *arena.acquire(never);
    std::byte* const address = first.bytes();
    std::byte* taken = nullptr;
    std::thread waiter([&] { taken = arena.acquire(never)->bytes(); });
    first.release();
    waiter.join();
    CHECK(taken == address);
}

TEST_CASE("acquire gives up when it is told to") {
    Arena arena(2 * block, block);
    std::atomic<bool> stopped{false};
    bool got_block = true;
    std::thread waiter([&] { got_block = arena.acquire([&] { return stopped.load(); }).has_value(); });
    stopped = true;
    arena.wake();
    waiter.join();
    CHECK_FALSE(got_block);
}

TEST_CASE("an arena in use does not close") {
    Arena arena(2 * block, block);
    arena.grow(block);
    {
        const Block held = *arena.acquire(never);
        CHECK_THROWS_AS(arena.close(), std::invalid_argument);
    }
    std::optional<Stay> stay(std::in_place, arena);
    CHECK_THROWS_AS(arena.close(), std::invalid_argument);
    stay.reset();
    arena.close();
    arena.close();
    CHECK(arena.touched_bytes() == 0);
    CHECK_FALSE(arena.acquire(at_once));
    CHECK_THROWS_AS(Stay{arena}, std::invalid_argument);
}

}  // namespace flowstone
