// Collapsing into huge pages: only what is there in full, this process's alone and wanted; no byte changes, no write is
// missed.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/io_fixture.h"
#include "watch/collapse.h"
#include "watch/page_watch.h"

namespace flowstone {
namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t huge = huge_page_bytes;

bool can_collapse() {
    const std::string refusal = Collapse::refusal();
    if (!refusal.empty()) MESSAGE("not tested: ", refusal);
    return refusal.empty();
}

/// A mapping in small pages, at a huge page's boundary; every byte its own.
class Small {
public:
    explicit Small(std::uint64_t bytes)
        : raw_bytes_(bytes + huge),
          raw_(::mmap(nullptr, raw_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        REQUIRE(raw_ != MAP_FAILED);
        start_ = reinterpret_cast<std::uint64_t*>(round_up(reinterpret_cast<std::uint64_t>(raw_), huge));
        ::madvise(start_, bytes, MADV_NOHUGEPAGE);  // it would be in huge pages where these are chosen for all
        for (std::uint64_t at = 0; at < bytes / 8; ++at) start_[at] = at * 0x9E3779B97F4A7C15;
        ::madvise(start_, bytes, MADV_HUGEPAGE);
    }
    ~Small() { ::munmap(raw_, raw_bytes_); }
    Small(const Small&) = delete;
    Small& operator=(const Small&) = delete;

    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(start_); }
    Reach reach(std::uint64_t begin, std::uint64_t end) const { return {address() + begin, address() + end}; }
    volatile std::uint64_t& word(std::uint64_t at) const { return start_[at]; }
    bool is_as_filled(std::uint64_t bytes) const {
        for (std::uint64_t at = 0; at < bytes / 8; ++at)
            if (start_[at] != at * 0x9E3779B97F4A7C15) return false;
        return true;
    }

private:
    std::uint64_t raw_bytes_;
    void* raw_;
    std::uint64_t* start_;
};

CollapseTotals collapse(std::vector<Reach> own) {
    const std::shared_ptr<Collapse> pass = Collapse::start(std::move(own), 1);
    REQUIRE(pass->wait(60));
    return pass->totals();
}

bool adds_up(const CollapseTotals& totals) {
    return totals.huge_bytes + totals.edge_bytes + totals.scattered_bytes + totals.refused_bytes + totals.left_bytes ==
        totals.wanted_bytes;
}

bool is_one_huge_page(std::uint64_t address) {
    std::string refusal;
    const auto pages = PageWatch::open(refusal);
    return pages != nullptr && pages->first_small({address, address + huge}) == address + huge;
}

std::uint64_t resident_pages() {
    std::ifstream text("/proc/self/statm");
    std::uint64_t all = 0, resident = 0;
    text >> all >> resident;
    return resident;
}

}  // namespace

TEST_CASE("neighbours that fill huge pages together are collapsed together, and no byte changes") {
    if (!can_collapse()) return;
    const Small memory(16 * mib);
    std::vector<Reach> own;  // of 700 KiB each, with a few bytes of others in between, and one of them twice
    for (std::uint64_t at = 5 * kib; at + 700 * kib <= 16 * mib; at += 700 * kib + 16)
        own.push_back(memory.reach(at, at + 700 * kib));
    own.push_back(own[3]);
    const std::uint64_t before = resident_pages();
    const CollapseTotals totals = collapse(own);
    CHECK(totals.wanted_bytes == (own.size() - 1) * 700 * kib);
    CHECK(adds_up(totals));
    CHECK(totals.huge_bytes >= 15 * mib);
    CHECK(totals.collapsed_bytes == 16 * mib);
    CHECK(totals.processor_s > 0);
    CHECK(resident_pages() < before + 64);
    CHECK(memory.is_as_filled(16 * mib));
    const CollapseTotals again = collapse(own);
    CHECK(again.collapsed_bytes == 0);
    CHECK(again.huge_bytes == totals.huge_bytes);
}

TEST_CASE("only what is there in full, of this process alone, and mostly wanted is collapsed") {
    if (!can_collapse()) return;
    const Small memory(10 * mib);
    ::madvise(reinterpret_cast<void*>(memory.address() + 2 * mib + 5 * page), page,
              MADV_DONTNEED);  // a hole in the second
    ::munmap(reinterpret_cast<void*>(memory.address() + 4 * mib), 2 * mib);  // the third is freed
    const std::uint64_t before = resident_pages();
    const CollapseTotals totals =
        collapse({memory.reach(0, 6 * mib), memory.reach(6 * mib, 7 * mib), memory.reach(8 * mib, 10 * mib)});
    CHECK(totals.huge_bytes == 4 * mib);
    CHECK(totals.scattered_bytes == 4 * mib);
    CHECK(totals.edge_bytes == mib);
    CHECK(totals.collapsed_bytes == 4 * mib);
    CHECK(resident_pages() < before + 64);  // no hole was filled

    const Small shared(4 * mib);
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    const pid_t child = ::fork();  // has the same pages until one of both writes
    if (child == 0) {
        char end = 0;
        ::close(ready[1]);
        ::_exit(::read(ready[0], &end, 1) == 0 ? 0 : 1);
    }
    CHECK(collapse({shared.reach(0, 4 * mib)}).scattered_bytes == 4 * mib);
    ::close(ready[0]);
    ::close(ready[1]);
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(collapse({shared.reach(0, 4 * mib)}).huge_bytes == 4 * mib);

    void* const file = ::mmap(nullptr, 4 * mib, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    std::memset(file, 1, 4 * mib);
    const std::uint64_t begin = round_up(reinterpret_cast<std::uint64_t>(file), huge);
    CHECK(collapse({{begin, begin + 2 * mib}}).collapsed_bytes == 0);
    ::munmap(file, 4 * mib);
}

TEST_CASE("who wants no huge pages for a mapping gets none, and the reason is told") {
    if (!can_collapse()) return;
    const Small memory(64 * mib);
    ::madvise(reinterpret_cast<void*>(memory.address()), 64 * mib, MADV_NOHUGEPAGE);
    const CollapseTotals totals = collapse({memory.reach(0, 64 * mib)});
    CHECK(totals.huge_bytes == 0);
    CHECK(totals.refused_bytes == Collapse::refusals_max * huge);  // and then it gives up
    CHECK(totals.left_bytes == 64 * mib - Collapse::refusals_max * huge);
    CHECK(totals.error == EINVAL);
}

TEST_CASE("a pass that is stopped ends at once, and the next one goes on") {
    if (!can_collapse()) return;
    const Small memory(64 * mib);
    {
        const auto pass = Collapse::start({memory.reach(0, 64 * mib)}, 1e-9);  // rests for ever after the first page
        while (!is_one_huge_page(memory.address())) std::this_thread::yield();
        CHECK_FALSE(pass->wait(0.05));
        pass->stop();
        REQUIRE(pass->wait(60));
        CHECK(pass->totals().collapsed_bytes == huge);
        // The system's own thread may have made others huge meanwhile.
        CHECK(pass->totals().huge_bytes + pass->totals().left_bytes == 64 * mib);
    }
    Collapse::start({memory.reach(0, 64 * mib)}, 1e-9).reset();
    CHECK(collapse({memory.reach(0, 64 * mib)}).huge_bytes == 64 * mib);
}

TEST_CASE("a child that is forked during a pass has no descriptors of it") {
    if (!can_collapse()) return;
    const Small memory(64 * mib);
    const auto pass = Collapse::start({memory.reach(0, 64 * mib)}, 1e-9);  // rests for ever after the first page
    const auto ends_in = [](int number, const char* name) {
        char path[64], target[256] = {};
        std::snprintf(path, sizeof(path), "/proc/self/fd/%d", number);
        return ::readlink(path, target, sizeof(target) - 1) > 0 && std::strstr(target, name) != nullptr;
    };
    const auto count = [&](const char* name) {
        int found = 0;
        for (int number = 0; number < 1024; ++number) found += ends_in(number, name);
        return found;
    };
    while (!is_one_huge_page(memory.address())) std::this_thread::yield();
    CHECK(count("/pagemap") == 1);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(count("/pagemap") + count("[userfaultfd]"));
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("memory that is written and watched while it is collapsed keeps every write, and none is missed") {
    if (!can_collapse()) return;
    const std::uint64_t bytes = 16 * mib;
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
        CAPTURE(seed);
        const Small memory(bytes);
        std::atomic<bool> done{false};
        std::vector<std::thread> passes;
        passes.emplace_back([&] {
            while (!done) collapse({memory.reach(0, bytes)});
        });
        std::mt19937_64 random(seed);
        std::vector<std::uint64_t> expected(bytes / 8);
        for (std::uint64_t at = 0; at < expected.size(); ++at) expected[at] = memory.word(at);
        std::uint64_t missed = 0, invented = 0;
        for (int round = 0; round < 40; ++round) {
            PageWatch watch({memory.reach(0, bytes)}, PageWatch::OnRefusal::retry);
            if (!watch.holds(0)) FAIL_CHECK("not watched");
            std::vector<bool> written(bytes / page);
            for (int write = 0; write < 20; ++write) {
                const std::uint64_t at = random() % expected.size();
                memory.word(at) = expected[at] = random();
                written[at * 8 / page] = true;
            }
            for (std::uint64_t number = 0; number < written.size(); ++number) {
                const bool told = watch.first_written(memory.reach(number * page, (number + 1) * page)).has_value();
                missed += !told && written[number];
                invented += told && !written[number];
            }
        }
        done = true;
        for (std::thread& pass : passes) pass.join();
        CHECK(missed == 0);
        CHECK(invented == 0);
        bool same = true;
        for (std::uint64_t at = 0; at < expected.size(); ++at) same = same && memory.word(at) == expected[at];
        CHECK(same);
    }
}

}  // namespace flowstone
