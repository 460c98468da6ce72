// What the kernel answers about single areas of memory is what its list of all says.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/io_fixture.h"
#include "watch/written_pages.h"

namespace flowstone {
namespace {

constexpr std::uint64_t page = 4096;

/// Pages in a row, of which each can be mapped anew.
class Pages {
public:
    explicit Pages(std::uint64_t count)
        : bytes_(count * page), start_(::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        REQUIRE(start_ != MAP_FAILED);
    }
    ~Pages() { ::munmap(start_, bytes_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    std::uint64_t address(std::uint64_t number) const {
        return reinterpret_cast<std::uint64_t>(start_) + number * page;
    }
    Reach reach(std::uint64_t begin, std::uint64_t end) const { return {address(begin), address(end)}; }
    void map(std::uint64_t begin, std::uint64_t end, int protection, int kind = MAP_PRIVATE | MAP_ANONYMOUS,
             int fd = -1) const {
        void* const at = reinterpret_cast<void*>(address(begin));
        REQUIRE(::mmap(at, (end - begin) * page, protection, kind | MAP_FIXED, fd, 0) == at);
    }
    void unmap(std::uint64_t begin, std::uint64_t end) const {
        ::munmap(reinterpret_cast<void*>(address(begin)), (end - begin) * page);
    }

private:
    std::uint64_t bytes_;
    void* start_;
};

/// Of all areas, those that the reaches have a part of.
std::vector<MemoryArea> listed_areas(const std::vector<Reach>& reaches) {
    std::vector<MemoryArea> areas = all_areas();
    std::erase_if(areas, [&](const MemoryArea& area) {
        return std::none_of(reaches.begin(), reaches.end(),
                            [&](const Reach& reach) { return reach.overlaps(area.reach); });
    });
    return areas;
}

/// A file whose name looks like what the list says of memory without one.
class OddFile {
public:
    OddFile()
        : path_(std::filesystem::temp_directory_path() / "flowstone 00:00 0 XXXXXX"),
          fd_(::mkostemp(path_.data(), O_CLOEXEC)) {
        REQUIRE(fd_ >= 0);
        REQUIRE(::ftruncate(fd_, 4 * page) == 0);
    }
    ~OddFile() {
        ::close(fd_);
        ::unlink(path_.c_str());
    }
    OddFile(const OddFile&) = delete;
    OddFile& operator=(const OddFile&) = delete;
    int fd() const { return fd_; }

private:
    std::string path_;
    int fd_;
};

bool can_ask() {
    const bool can = asked_areas({}).has_value() && asked_areas(std::vector{Reach{0, page}}).has_value();
    if (!can) MESSAGE("not tested: this kernel cannot be asked for single areas (Linux 6.11 can)");
    return can;
}

constexpr int both = PROT_READ | PROT_WRITE;

}  // namespace

TEST_CASE("each kind of memory is own or not, asked for or listed") {
    const OddFile file;
    const Pages pages(20);
    pages.map(1, 3, both);
    pages.map(3, 4, both, MAP_SHARED | MAP_ANONYMOUS);
    pages.map(4, 5, PROT_READ);
    pages.map(5, 7, both, MAP_PRIVATE, file.fd());
    pages.map(7, 9, both, MAP_SHARED, file.fd());
    pages.unmap(10, 12);
    pages.map(12, 13, both | PROT_EXEC);
    pages.map(13, 14, both);
    const std::unique_ptr<std::vector<int>> small = std::make_unique<std::vector<int>>(100);
    const std::uint64_t heap = round_down(reinterpret_cast<std::uint64_t>(small->data()), page);
    const std::uint64_t stack = round_down(reinterpret_cast<std::uint64_t>(&heap), page);
    const struct {
        Reach reach;
        bool is_own;
    } kinds[] = {
        {pages.reach(1, 3), true},    {pages.reach(3, 4), false},  {pages.reach(4, 5), false},
        {pages.reach(5, 7), false},   {pages.reach(7, 9), false},  {pages.reach(9, 10), false},
        {pages.reach(10, 12), false}, {pages.reach(12, 14), true}, {pages.reach(9, 14), false},
        {pages.reach(1, 4), false},   {{heap, heap + page}, true}, {{stack, stack + page}, true},
    };
    std::vector<Reach> reaches;
    for (const auto& kind : kinds) reaches.push_back(kind.reach);
    std::vector<Reach> given;
    const std::vector<bool> ready =
        register_own(reaches, [&](const Reach& reach) { return given.push_back(reach), true; });
    for (std::size_t i = 0; i < reaches.size(); ++i) {
        CAPTURE(i);
        CHECK(ready[i] == kinds[i].is_own);
        for (const Reach& reach : given) CHECK((kinds[i].is_own || i == 8 || i == 9 || !reach.overlaps(reaches[i])));
        const std::vector<Reach> one{reaches[i]};
        if (can_ask()) CHECK(*asked_areas(one) == listed_areas(one));
    }
    if (can_ask()) CHECK(*asked_areas(reaches) == listed_areas(reaches));
}

TEST_CASE("areas of any pattern are the same, asked for or listed, whatever the reaches' order") {
    if (!can_ask()) return;
    constexpr std::uint64_t count = 64;
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const Pages pages(count);
        for (int change = 0; change < 20; ++change) {
            const std::uint64_t begin = random() % count,
                                end = begin + 1 + random() % std::min<std::uint64_t>(8, count - begin);
            if (random() % 4 == 0)
                pages.unmap(begin, end);
            else
                pages.map(begin, end, random() % 2 ? both : PROT_READ,
                          random() % 4 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_ANONYMOUS);
        }
        std::vector<Reach> reaches;
        for (int i = 0; i < 9; ++i) {
            const std::uint64_t begin = random() % count;
            reaches.push_back(pages.reach(begin, begin + random() % (count - begin + 1)));
        }
        std::erase_if(reaches, [](const Reach& reach) { return reach.bytes() == 0; });
        CHECK(*asked_areas(reaches) == listed_areas(reaches));
    }
    // After all areas there are none.
    CHECK(asked_areas(std::vector{Reach{~std::uint64_t{0} - 2 * page + 1, ~std::uint64_t{0} - page + 1}})->empty());
}

TEST_CASE("so many areas are made, and no more, also by many that make few each") {
    AreaRoom room;
    room.know(AreaRoom::areas_max - 4);
    CHECK(room.take(2));
    CHECK_FALSE(room.take(3));
    CHECK(room.take(2));
    CHECK_FALSE(room.take(1));
    AreaRoom().know(0);
    for (std::size_t made = 0; made < AreaRoom::uncounted_max; made += 2) CHECK(AreaRoom().take(2));
    // That was a lie, and is found out now: a process of so many areas has no more made.
    const std::size_t before = all_areas().size();
    constexpr std::uint64_t pairs = AreaRoom::areas_max / 2 + 1;  // of a page that may be written and one that may not
    const Pages pages(2 * pairs);
    for (std::uint64_t at = 0; at < pairs; ++at) pages.map(2 * at, 2 * at + 1, both);
    REQUIRE(all_areas().size() >= before + AreaRoom::areas_max);
    CHECK_FALSE(AreaRoom().take(2));
    CHECK(register_own(std::vector{pages.reach(0, 1)}, [](const Reach&) { return true; }) == std::vector{false});
}

}  // namespace flowstone
