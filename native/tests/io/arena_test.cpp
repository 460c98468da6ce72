#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <optional>
#include <memory>
#include <thread>
#include <vector>

#include "io/arena.h"
#include "bounds.h"
#include "tests/simulated/delayed_device.h"

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
    std::optional<ArenaLease> stay(std::in_place, arena);
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

TEST_CASE("several threads touch each block once") {
    Arena arena(40 * block, block);
    arena.grow_at_once(33 * block, 4);
    while (!arena.wait_grown(1)) {}
    CHECK(arena.touched_bytes() == 33 * block);
    arena.grow_at_once(100 * block, 4);
    while (!arena.wait_grown(1)) {}
    CHECK(arena.touched_bytes() == 40 * block);
    std::vector<Block> blocks = arena.acquire_all(40, at_once);
    std::set<std::byte*> addresses;
    for (const Block& one : blocks) addresses.insert(one.bytes());
    CHECK(addresses.size() == 40);
}

TEST_CASE("a device's blocks are pinned by slabs, before they are handed out") {
    const std::shared_ptr<DelayedDevice> device = std::make_shared<DelayedDevice>(4096, std::chrono::microseconds(0));
    const std::shared_ptr<Device> used = device;
    Arena arena(100 * block, block);
    SUBCASE("that it uses from the start: what a job awaits, in short ones") {
        arena.use({&used, 1});
        arena.grow(64 * block);
        while (!arena.wait_grown(1)) {}
        CHECK(device->pins() == 2);
    }
    SUBCASE("that it uses later: those that are touched already, at once") {
        arena.grow(64 * block);
        while (!arena.wait_grown(1)) {}
        arena.use({&used, 1});
        CHECK(device->pins() == 1);
    }
    SUBCASE("that are touched for a caller who waits: in long ones") {
        arena.use({&used, 1});
        arena.grow_at_once(64 * block, 3);
        while (!arena.wait_grown(1)) {}
        CHECK(device->pins() == 1);
    }
    CHECK(device->pinned_bytes() == 64 * block);
    CHECK(arena.pinned_bytes() == 64 * block);
    CHECK(arena.refusal().empty());
    arena.use({&used, 1});
    CHECK(device->pinned_bytes() == 64 * block);
    arena.close();
    CHECK(device->pinned_bytes() == 0);
}

TEST_CASE("what cannot be pinned is told, and used all the same") {
    const std::shared_ptr<DelayedDevice> device = std::make_shared<DelayedDevice>(4096, std::chrono::microseconds(0));
    const std::shared_ptr<Device> used = device;
    for (const std::uint64_t most : {0, 5, 20}) {
        device->limit_pinned(most * block);
        Arena arena(32 * block, block);
        arena.use({&used, 1});
        arena.grow_at_once(32 * block, 2);
        while (!arena.wait_grown(1)) {}
        CHECK(arena.touched_bytes() == 32 * block);
        CHECK(arena.pinned_bytes() == most * block);
        CHECK(arena.refusal() == "delayed:0 refuses to pin host memory: CUDA_ERROR_OUT_OF_MEMORY");
    }
}

TEST_CASE("a node that there is not is refused") {
    Arena arena(2 * block, block);
    CHECK(arena.place(-1) == EINVAL);
    CHECK(arena.place(1'000'000) == EINVAL);
    const int error = arena.place(1023);
    CHECK((error == EINVAL || error == EPERM || error == ENOSYS));
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
    std::optional<ArenaLease> stay(std::in_place, arena);
    CHECK_THROWS_AS(arena.close(), std::invalid_argument);
    stay.reset();
    arena.close();
    arena.close();
    CHECK(arena.touched_bytes() == 0);
    CHECK_FALSE(arena.acquire(at_once));
    CHECK_THROWS_AS(ArenaLease{arena}, std::invalid_argument);
}

}  // namespace flowstone
