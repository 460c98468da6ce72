// Memory that is written while it is copied: the copy has what was there before.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/io_fixture.h"
#include "capture/guarded_copy.h"

namespace flowstone {
namespace {

constexpr std::uint64_t page = 4096;
constexpr std::chrono::seconds forever{600};

/// Whether this system can; what it lacks is said.
bool can_guard() {
#ifdef __SANITIZE_THREAD__
    MESSAGE("not tested: ThreadSanitizer does not see that the kernel holds writes back");
    return false;
#endif
    const std::string refusal = GuardedCopy::refusal();
    if (!refusal.empty()) MESSAGE("not tested: ", refusal);
    return refusal.empty() && page_bytes() == page;
}

/// A mapping of words that differ.
class Words {
public:
    explicit Words(std::uint64_t bytes, int kind = MAP_PRIVATE) : bytes_(bytes) {
        start_ = static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0));
        REQUIRE(start_ != MAP_FAILED);
    }
    ~Words() { ::munmap(start_, bytes_); }
    Words(const Words&) = delete;
    Words& operator=(const Words&) = delete;

    void fill(std::uint64_t seed) const {
        for (std::uint64_t i = 0; i < bytes_; i += 8) {
            const std::uint64_t word = (i + seed) * 0x9E3779B97F4A7C15U;
            std::memcpy(start_ + i, &word, 8);
        }
    }
    std::uint64_t address(std::uint64_t at = 0) const { return reinterpret_cast<std::uint64_t>(start_ + at); }
    std::byte* start() const { return start_; }
    std::vector<std::byte> bytes(std::uint64_t begin, std::uint64_t end) const {
        return {start_ + begin, start_ + end};
    }

private:
    std::uint64_t bytes_;
    std::byte* start_;
};

std::size_t mapping_count() {
    std::ifstream maps("/proc/self/maps");
    std::string line;
    std::size_t count = 0;
    while (std::getline(maps, line)) ++count;
    return count;
}

}  // namespace

TEST_CASE("what is written while it is copied is copied as it was") {
    if (!can_guard()) return;
    constexpr std::uint64_t bytes = 24 * mib;
    const Words source(bytes), target(bytes);
    for (std::uint64_t turn = 0; turn < 6; ++turn) {
        source.fill(turn);
        const std::vector<std::byte> before = source.bytes(100, bytes - 100);
        const GuardedCopy copy(
            {{source.address(100), 16 * mib, target.address(100)},
             {source.address(100 + 16 * mib), bytes - 200 - 16 * mib, target.address(100 + 16 * mib)}},
            true);
        CHECK(copy.guarded_bytes() > bytes - 4 * page);
        std::vector<std::jthread> writers;
        for (std::uint64_t writer = 0; writer < 3; ++writer)
            writers.emplace_back([&, writer] {  // one page of three each; one of them from the end
                const std::uint64_t count = bytes / page / 3;
                for (std::uint64_t i = 0; i < count; ++i)
                    std::memset(source.start() + (3 * (writer == 0 ? count - 1 - i : i) + writer) * page, 0xEE, page);
            });
        writers.clear();
        REQUIRE(copy.wait(forever));
        CHECK(copy.gone() == std::nullopt);
        CHECK(target.bytes(100, bytes - 100) == before);
    }
}

TEST_CASE("pages that were never touched are guarded, and so are system calls that write") {
    if (!can_guard()) return;
    constexpr std::uint64_t bytes = 32 * mib;
    const Words source(bytes), target(bytes);
    target.fill(1);
    std::array<int, 2> ends{};
    REQUIRE(::pipe(ends.data()) == 0);
    REQUIRE(::write(ends[1], "late", 4) == 4);
    const GuardedCopy copy({{source.address(), bytes, target.address()}}, true);
    source.start()[bytes - 2 * page] = std::byte{7};
    REQUIRE(::read(ends[0], source.start() + bytes - 9 * page, 4) == 4);
    REQUIRE(copy.wait(forever));
    CHECK(target.bytes(0, bytes) == std::vector<std::byte>(bytes));
    CHECK(std::memcmp(source.start() + bytes - 9 * page, "late", 4) == 0);
    for (const int end : ends) ::close(end);
}

TEST_CASE("what cannot be guarded is copied before the constructor returns") {
    constexpr std::uint64_t bytes = 2 * mib;
    const Words own(bytes), shared(bytes, MAP_SHARED), target(4 * bytes);
    own.fill(3);
    shared.fill(4);
    for (const bool guard : {true, false}) {
        std::vector<std::byte> expected = shared.bytes(0, bytes);
        const std::vector<std::byte> overlapping = own.bytes(mib / 2, mib + mib / 2);
        const GuardedCopy copy({{shared.address(), bytes, target.address()},  // another process may write it
                                {own.address(), mib, target.address(bytes)},
                                {own.address(mib / 2), mib, target.address(2 * bytes)}},  // overlaps the one before
                               guard);
        CHECK(copy.guarded_bytes() == (guard && GuardedCopy::refusal().empty() ? mib : 0));
        CHECK(target.bytes(0, bytes) == expected);
        CHECK(target.bytes(2 * bytes, 2 * bytes + mib) == overlapping);
        REQUIRE(copy.wait(forever));
        CHECK(target.bytes(bytes, bytes + mib) == own.bytes(0, mib));
    }
}

TEST_CASE("memory that is taken away is told, and holds nothing back") {
    if (!can_guard()) return;
    constexpr std::uint64_t bytes = 64 * mib;
    const Words first(bytes), second(bytes), target(2 * bytes);
    first.fill(1);
    second.fill(2);
    const std::vector<std::byte> before = first.bytes(0, bytes);
    {
        const GuardedCopy copy(
            {{first.address(), bytes, target.address()}, {second.address(), bytes, target.address(bytes)}}, true);
        const std::uint64_t last = first.address() < second.address() ? 1 : 0;  // that is copied last
        std::byte* const gone = (last == 1 ? second : first).start() + bytes - 8 * mib;
        REQUIRE(::munmap(gone, 4 * mib) == 0);
        REQUIRE(copy.wait(forever));
        if (copy.gone()) CHECK(*copy.gone() == last);
        REQUIRE(::mmap(gone, 4 * mib, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == gone);
        CHECK((last == 1 ? target.bytes(0, bytes) == before : true));
    }
    first.fill(5);  // no write waits any more
    second.fill(6);
}

TEST_CASE("nothing of it is left: no mapping is cut, and memory can be guarded again") {
    if (!can_guard()) return;
    constexpr std::uint64_t bytes = 96 * mib;
    const Words source(bytes), target(bytes);
    source.fill(1);
    const std::size_t before = mapping_count();
    for (int turn = 0; turn < 3; ++turn) {
        const GuardedCopy copy({{source.address(3 * page), 40 * mib, target.address()},
                                {source.address(50 * mib), 30 * mib, target.address(40 * mib)}},
                               true);
        CHECK(copy.guarded_bytes() == 70 * mib);
        REQUIRE(copy.wait(forever));
    }
    CHECK(mapping_count() <= before + 4);  // a thread's stack, an allocator's arena
}

TEST_CASE("two copies of the same memory: the second is made at once") {
    if (!can_guard()) return;
    constexpr std::uint64_t bytes = 32 * mib;
    const Words source(bytes), one(bytes), other(bytes);
    source.fill(9);
    const std::vector<std::byte> before = source.bytes(0, bytes);
    const GuardedCopy first({{source.address(), bytes, one.address()}}, true);
    const GuardedCopy second({{source.address(), bytes, other.address()}}, true);
    source.fill(10);
    REQUIRE(first.wait(forever));
    REQUIRE(second.wait(forever));
    CHECK(one.bytes(0, bytes) == before);
    CHECK(other.bytes(0, bytes) == before);
}

TEST_CASE("a child that is forked meanwhile waits for nothing") {
    if (!can_guard()) return;
    constexpr std::uint64_t bytes = 64 * mib;
    const Words source(bytes), target(bytes);
    source.fill(2);
    const std::vector<std::byte> before = source.bytes(0, bytes);
    const GuardedCopy copy({{source.address(), bytes, target.address()}}, true);
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(60);
        std::memset(source.start(), 1, bytes);
        ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    REQUIRE(copy.wait(forever));
    CHECK(target.bytes(0, bytes) == before);
}

}  // namespace flowstone
