// Pages that are watched for writes: every write is noticed, nothing else is, and huge pages stay whole.
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/io_fixture.h"
#include "watch/page_watch.h"
#include "watch/mutation_detector.h"

namespace flowstone {
namespace {

constexpr std::uint64_t page = 4096;
constexpr PageWatch::OnRefusal retry = PageWatch::OnRefusal::retry;

/// Whether this system can; what it lacks is said.
bool can_watch() {
    const std::string refusal = PageWatch::refusal();
    if (!refusal.empty()) MESSAGE("not tested: ", refusal);
    return refusal.empty() && page_bytes() == page;
}

/// Memory of its own mapping, at a huge page's boundary.
class MappedMemory {
public:
    explicit MappedMemory(std::uint64_t bytes, int advice = MADV_NOHUGEPAGE, int kind = MAP_PRIVATE | MAP_ANONYMOUS,
                          int fd = -1)
        : raw_bytes_(bytes + huge_page_bytes), raw_(::mmap(nullptr, raw_bytes_, PROT_READ | PROT_WRITE, kind, fd, 0)) {
        REQUIRE(raw_ != MAP_FAILED);
        start_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uint64_t>(raw_), huge_page_bytes));
        ::madvise(start_, bytes, advice);
    }
    ~MappedMemory() { ::munmap(raw_, raw_bytes_); }
    MappedMemory(const MappedMemory&) = delete;
    MappedMemory& operator=(const MappedMemory&) = delete;

    std::byte* at(std::uint64_t offset) const { return start_ + offset; }
    std::uint64_t address(std::uint64_t offset = 0) const { return reinterpret_cast<std::uint64_t>(start_ + offset); }
    Reach reach(std::uint64_t begin, std::uint64_t end) const { return {address(begin), address(end)}; }
    void write(std::uint64_t offset) const { *const_cast<volatile std::byte*>(at(offset)) = std::byte{0xA5}; }
    void fill(std::uint64_t bytes) const { std::memset(start_, 1, bytes); }

private:
    std::uint64_t raw_bytes_;
    void* raw_;
    std::byte* start_;
};

/// Offsets of the first written pages, from the start of `memory`; (0, 0) where there are none.
std::pair<std::uint64_t, std::uint64_t> written(const PageWatch& watch, const MappedMemory& memory, std::uint64_t begin,
                                                std::uint64_t end) {
    const std::optional<Reach> found = watch.first_written(memory.reach(begin, end));
    return found ? std::pair{found->begin - memory.address(), found->end - memory.address()}
                 : std::pair<std::uint64_t, std::uint64_t>{0, 0};
}

const std::pair<std::uint64_t, std::uint64_t> nothing{0, 0};

constexpr std::uint64_t few = 8;  // that a sanitizer has of its own; what is protected has one for each page

std::uint64_t faults() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return static_cast<std::uint64_t>(usage.ru_minflt);
}

bool is_huge(const MappedMemory& memory, std::uint64_t begin, std::uint64_t end) {
    std::string refusal;
    return WrittenPages::open(refusal)->first_small(memory.reach(begin, end)) == memory.address(end);
}

/// Filled, in huge pages; false where the system gives none.
bool fill_huge(const MappedMemory& memory, std::uint64_t bytes) {
    memory.fill(bytes);
    if (is_huge(memory, 0, bytes)) return true;
    MESSAGE("not tested: no huge pages here");
    return false;
}

WriteExtents one_row(std::uint64_t address, std::uint64_t length) {
    WriteExtents rows;
    rows.rows.push_back({address % page, length, address, 0, contiguous, 0, true});
    rows.chunks = chunk_count(length);
    return rows;
}

/// As a job captures a row: by windows of whole blocks of the file, and in them chunk by chunk.
void capture(const WriteExtents& rows, MutationDetector& watch, std::mt19937_64& random) {
    const WriteExtent& row = rows.rows[0];
    for (std::uint64_t low = 0; low < row.length;) {
        const std::uint64_t high =
            std::min(row.length, (1 + random() % 128) * page + round_down(row.offset + low, page) - row.offset);
        for (std::uint64_t at = low; at < high;) {
            const std::uint64_t end = std::min(high, round_down(at, chunk_bytes) + chunk_bytes);
            watch.compare(0, at, end, row.source() + at);
            at = end;
        }
        watch.settle(0, low, high);
        low = high;
    }
}

}  // namespace

TEST_CASE("a page that is written is told, and no other") {
    if (!can_watch()) return;
    const MappedMemory memory(mib);
    memory.fill(mib / 2);  // the rest was never touched
    const PageWatch watch({memory.reach(0, mib)}, retry);
    REQUIRE(watch.holds(0));
    CHECK(written(watch, memory, 0, mib) == nothing);
    const volatile std::byte read = *memory.at(700 * kib);
    static_cast<void>(read);
    CHECK(written(watch, memory, 0, mib) == nothing);
    for (const std::uint64_t at : {800 * kib + 5, 300 * kib, page - 1}) {
        memory.write(at);
        const std::uint64_t begin = round_down(at, page);
        CHECK(written(watch, memory, 0, mib) == std::pair{begin, begin + page});
        CHECK(written(watch, memory, begin + page, 300 * kib) == nothing);
    }
}

TEST_CASE("pages that the system writes in a call count as written, too") {
    if (!can_watch()) return;
    const MappedMemory memory(64 * page);
    memory.fill(64 * page);
    const PageWatch watch({memory.reach(0, 64 * page)}, retry);
    const int zeros = ::open("/dev/zero", O_RDONLY | O_CLOEXEC);
    REQUIRE(::read(zeros, memory.at(3 * page + 9), 1) == 1);
    ::close(zeros);
    CHECK(written(watch, memory, 0, 64 * page) == std::pair{3 * page, 4 * page});
    const int own = ::open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    REQUIRE(::pwrite(own, "x", 1, static_cast<off_t>(memory.address(9 * page))) == 1);
    ::close(own);
    CHECK(written(watch, memory, 4 * page, 64 * page) == std::pair{9 * page, 10 * page});
}

TEST_CASE("memory that goes away, or is another's by now, was written") {
    if (!can_watch()) return;
    const MappedMemory memory(64 * page);
    memory.fill(64 * page);
    const PageWatch watch({memory.reach(0, 64 * page)}, retry);
    ::madvise(memory.at(5 * page), page, MADV_DONTNEED);
    CHECK(written(watch, memory, 0, 64 * page) == std::pair{5 * page, 6 * page});
    ::munmap(memory.at(20 * page), 2 * page);
    CHECK(written(watch, memory, 6 * page, 64 * page) == std::pair{20 * page, 22 * page});
    REQUIRE(::mmap(memory.at(40 * page), page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                   0) != MAP_FAILED);
    CHECK(watch.first_written(memory.reach(39 * page, 42 * page)));
    CHECK(written(watch, memory, 42 * page, 64 * page) == nothing);
}

TEST_CASE("two that watch the same memory hide nothing from each other") {
    if (!can_watch()) return;
    for (const int advice : {MADV_NOHUGEPAGE, MADV_HUGEPAGE}) {
        CAPTURE(advice);
        const MappedMemory memory(4 * mib, advice);
        memory.fill(4 * mib);
        PageWatch first({memory.reach(0, 3 * mib)}, retry);
        memory.write(page);
        memory.write(3 * mib + page);  // watched by none
        PageWatch second({memory.reach(0, mib), memory.reach(2 * mib, 4 * mib)}, retry);
        REQUIRE(second.holds(0));
        REQUIRE(second.holds(1));
        CHECK(written(first, memory, 0, 3 * mib) == std::pair{page, 2 * page});
        CHECK(written(second, memory, 0, mib) == nothing);
        CHECK(written(second, memory, 2 * mib, 4 * mib) == nothing);
        // The first is done with its part, and that is no write; what comes now still is one for the second.
        first.release(memory.address(), memory.address(3 * mib));
        CHECK(written(second, memory, 0, mib) == nothing);
        memory.write(2 * page);
        CHECK(written(second, memory, 0, mib) == std::pair{2 * page, 3 * page});
        CHECK(written(first, memory, 2 * page, 3 * mib) == std::pair{2 * page, 3 * page});
    }
}

TEST_CASE("what was let go of is written without a fault, and nothing else is") {
    if (!can_watch()) return;
    const std::uint64_t bytes = 3 * huge_page_bytes;
    const MappedMemory memory(bytes);
    memory.fill(bytes);
    const std::uint64_t pages = bytes / page;
    const auto write_all = [&] {
        const std::uint64_t before = faults();
        for (std::uint64_t at = 0; at < bytes; at += page) memory.write(at);
        return faults() - before;
    };
    {
        PageWatch watch({memory.reach(0, bytes)}, retry);
        watch.release(memory.address(), memory.address(100));
        watch.release(memory.address(100), memory.address(huge_page_bytes + 7));
        CHECK(write_all() - (pages - huge_page_bytes / page) < few);
    }
    CHECK(write_all() < few);
    {
        const PageWatch one({memory.reach(0, bytes)}, retry);
        { const PageWatch other({memory.reach(page, 9 * page)}, retry); }
        CHECK(write_all() - pages < few);
    }
    CHECK(write_all() < few);
}

TEST_CASE("huge pages stay whole without writes, also those that are watched in part") {
    if (!can_watch()) return;
    const std::uint64_t bytes = 8 * huge_page_bytes;
    const MappedMemory memory(bytes, MADV_HUGEPAGE);
    if (!fill_huge(memory, bytes)) return;
    const std::vector<Reach> wanted{memory.reach(5 * page, 3 * mib), memory.reach(3 * mib + page, 9 * mib),
                                    memory.reach(11 * mib, 13 * mib)};
    for (int round = 0; round < 3; ++round) {
        PageWatch watch(wanted, retry);
        for (std::size_t i = 0; i < wanted.size(); ++i) REQUIRE(watch.holds(i));
        for (const Reach& reach : wanted) CHECK_FALSE(watch.first_written(reach));
        CHECK(is_huge(memory, 0, bytes));
        for (const Reach& reach : wanted) watch.release(reach.begin, reach.end);
        CHECK(is_huge(memory, 0, bytes));
        const std::uint64_t before = faults();
        memory.fill(bytes);
        CHECK(faults() - before < few);
        CHECK(is_huge(memory, 0, bytes));
    }
    const PageWatch watch(wanted, retry);
    memory.write(3 * mib);  // shares the huge page with two, and belongs to neither
    CHECK_FALSE(watch.first_written(wanted[0]));
    CHECK_FALSE(watch.first_written(wanted[1]));
    memory.write(4 * mib);
    CHECK(written(watch, memory, 3 * mib + page, 9 * mib) == std::pair{4 * mib, 4 * mib + page});
}

TEST_CASE("memory that others can write unseen is not held") {
    if (!can_watch()) return;
    const std::string path = std::filesystem::temp_directory_path() / "flowstone-pages-XXXXXX";
    std::string name = path;
    const int fd = ::mkostemp(name.data(), O_CLOEXEC);
    REQUIRE(::ftruncate(fd, static_cast<off_t>(4 * mib)) == 0);
    const MappedMemory own(mib), shared(mib, MADV_NORMAL, MAP_SHARED | MAP_ANONYMOUS),
        file(mib, MADV_NORMAL, MAP_PRIVATE, fd), shared_file(mib, MADV_NORMAL, MAP_SHARED, fd);
    for (int round = 0; round < 3; ++round) {
        const PageWatch watch({shared.reach(0, mib), own.reach(0, mib), file.reach(0, mib), shared_file.reach(0, mib)},
                              retry);
        CHECK_FALSE(watch.holds(0));
        CHECK(watch.holds(1));
        CHECK_FALSE(watch.holds(2));
        CHECK_FALSE(watch.holds(3));
        own.write(5 * page);
        CHECK(written(watch, own, 0, mib) == std::pair{5 * page, 6 * page});
    }
    // Half of it is: the half that could be protected is left as it was.
    own.fill(mib);
    REQUIRE(::mmap(own.at(mib / 2), mib / 2, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
            MAP_FAILED);
    const PageWatch half({own.reach(0, mib)}, retry);
    CHECK_FALSE(half.holds(0));
    const std::uint64_t before = faults();
    for (std::uint64_t at = 0; at < mib / 2; at += page) own.write(at);
    CHECK(faults() - before < few);
    ::close(fd);
    ::unlink(name.c_str());
}

/// Another library's userfaultfd: it has the memory write-protected, and is to hear of every write itself (`async`: to
/// ask).
class Stranger {
public:
    Stranger(const Reach& reach, bool async)
        : fd_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | 1))), reach_(reach) {
        std::uint64_t api[3] = {0xAA, async ? 1U << 15 | 1U << 13 : 1U << 13, 0};
        REQUIRE(::ioctl(fd_, _IOWR(0xAA, 0x3F, api), api) == 0);
        std::uint64_t all[4] = {reach.begin, reach.bytes(), 2, 0};
        REQUIRE(::ioctl(fd_, _IOWR(0xAA, 0x00, all), all) == 0);
    }
    ~Stranger() { ::close(fd_); }
    Stranger(const Stranger&) = delete;
    Stranger& operator=(const Stranger&) = delete;

    void protect(bool on) const {
        std::uint64_t call[3] = {reach_.begin, reach_.bytes(), on ? 1U : 0U};
        REQUIRE(::ioctl(fd_, _IOWR(0xAA, 0x06, call), call) == 0);
    }

private:
    int fd_;
    Reach reach_;
};

TEST_CASE("memory that another library watches by a userfaultfd of its own is left as it is") {
    if (!can_watch()) return;
    const std::uint64_t bytes = 2 * huge_page_bytes;
    for (const bool async : {false, true})
        for (const int advice : {MADV_HUGEPAGE, MADV_NOHUGEPAGE}) {
            CAPTURE(async);
            CAPTURE(advice);
            const MappedMemory memory(bytes, advice);
            memory.fill(bytes);
            const Stranger stranger(memory.reach(0, bytes), async);
            const auto faults_of = [&] {
                const std::uint64_t before = faults();
                for (std::uint64_t at = 0; at < bytes; at += page) memory.write(at);
                return faults() - before;
            };
            {
                const PageWatch watch({memory.reach(0, bytes)}, retry);
                CHECK_FALSE(watch.holds(0));
                // Were it protected, the first write would wait for the stranger, for ever (or tell it what is not so).
                if (watch.holds(0)) stranger.protect(false);
                CHECK(faults_of() < few);
            }
            if (!async) continue;
            stranger.protect(true);
            { const PageWatch watch({memory.reach(0, bytes)}, retry); }
            CHECK(faults_of() > few);  // it still hears of them
        }
}

TEST_CASE("after the last watch, memory is as it was before, also while a child lives that was forked meanwhile") {
    if (!can_watch()) return;
    const MappedMemory memory(64 * page);
    memory.fill(64 * page);
    int pipe[2], lives[2];
    REQUIRE(::pipe2(pipe, O_CLOEXEC) == 0);
    REQUIRE(::pipe2(lives, O_CLOEXEC) == 0);
    pid_t child = 0;
    char end = 0;
    {
        const PageWatch watch({memory.reach(0, 64 * page)}, retry);
        child = ::fork();
        if (child == 0) {
            ::close(pipe[1]);
            const bool told = ::write(lives[1], &end, 1) == 1;
            ::_exit(told && ::read(pipe[0], &end, 1) == 0 ? 0 : 1);
        }
        REQUIRE(::read(lives[0], &end, 1) == 1);
        memory.write(page);
        CHECK(written(watch, memory, 0, 64 * page) == std::pair{page, 2 * page});
    }
    const Stranger stranger(memory.reach(0, 64 * page), true);  // refused if another userfaultfd has the memory
    {
        const PageWatch watch({memory.reach(0, 64 * page)}, retry);
        CHECK_FALSE(watch.holds(0));
    }
    ::close(pipe[1]);
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    for (const int fd : {pipe[0], lives[0], lives[1]}) ::close(fd);
}

TEST_CASE("what could be protected in part is let go of, however often it is tried") {
    if (!can_watch()) return;
    const MappedMemory memory(4 * mib);
    memory.fill(4 * mib);
    std::string refusal;
    const auto open = PageWatch::open(refusal);
    { const PageWatch watch({memory.reach(0, 4 * mib)}, retry); }  // it is prepared
    REQUIRE(::mmap(memory.at(3 * mib), mib, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
            MAP_FAILED);
    for (const std::uint64_t end : {4 * mib - page, 4 * mib - page, 4 * mib, 4 * mib}) {  // known the second time
        const PageWatch watch({memory.reach(0, end)}, PageWatch::OnRefusal::skip);
        CHECK_FALSE(watch.holds(0));
        const std::uint64_t before = faults();
        for (std::uint64_t at = 0; at < 3 * mib; at += page) memory.write(at);
        CHECK(faults() - before < few);
    }
    // Memory of this process alone lies there now, and who insists is not told of what was there before.
    REQUIRE(::mmap(memory.at(3 * mib), mib, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
            MAP_FAILED);
    CHECK_FALSE(PageWatch({memory.reach(0, 4 * mib)}, PageWatch::OnRefusal::skip).holds(0));
    CHECK(PageWatch({memory.reach(0, 4 * mib)}, retry).holds(0));
}

TEST_CASE("a child has pages of its own, and what it writes is its own") {
    if (!can_watch()) return;
    const MappedMemory memory(64 * page);
    memory.fill(64 * page);
    const PageWatch watch({memory.reach(0, 64 * page)}, retry);
    const pid_t child = ::fork();
    if (child == 0) {
        memory.write(3 * page);
        int wrong = 0;
        {
            const PageWatch own({memory.reach(0, 64 * page)}, retry);
            wrong += !own.holds(0) || own.first_written(memory.reach(0, 64 * page));
            memory.write(7 * page);
            wrong += written(own, memory, 0, 64 * page) != std::pair{7 * page, 8 * page};
        }
        ::_exit(wrong);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK(written(watch, memory, 0, 64 * page) == nothing);
    memory.write(5 * page);
    CHECK(written(watch, memory, 0, 64 * page) == std::pair{5 * page, 6 * page});
}

TEST_CASE("watches that come and go over the same memory, against what they should know") {
    if (!can_watch()) return;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const std::uint64_t pages = 4 * huge_page_bytes / page;
        const MappedMemory memory(4 * huge_page_bytes, seed % 2 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        if (seed % 3) memory.fill(4 * huge_page_bytes);
        struct Known {
            Reach reach{};
            std::vector<bool> written;  // by page of the memory
            std::uint64_t gone = 0;     // bytes of its reach that it has let go of
            std::unique_ptr<PageWatch> watch;
        };
        std::vector<Known> all;
        for (int move = 0; move < 200; ++move) {
            const std::uint64_t one = random() % pages, other = random() % pages;
            const std::uint64_t low = std::min(one, other), high = std::max(one, other) + 1;
            switch (random() % 5) {
                case 0:
                    if (all.size() < 4) {
                        Known& made = all.emplace_back();
                        made.reach = memory.reach(low * page, high * page);
                        made.written.assign(pages, false);
                        made.watch = std::make_unique<PageWatch>(std::vector{made.reach}, retry);
                        REQUIRE(made.watch->holds(0));
                    }
                    break;
                case 1:
                    if (!all.empty() && random() % 4 == 0)
                        all.erase(all.begin() + static_cast<std::ptrdiff_t>(random() % all.size()));
                    break;
                case 2:
                    for (Known& known : all) {
                        const std::uint64_t bytes = std::min(random() % mib, known.reach.bytes() - known.gone);
                        known.watch->release(known.reach.begin + known.gone, known.reach.begin + known.gone + bytes);
                        known.gone += bytes;
                    }
                    break;
                default:
                    memory.write(one * page + random() % page);
                    for (Known& known : all) known.written[one] = true;
            }
            for (const Known& known : all)
                for (std::uint64_t at = round_up(known.reach.begin + known.gone, page); at < known.reach.end;
                     at += page)
                    if (const std::uint64_t number = (at - memory.address()) / page; random() % 16 == 0)
                        REQUIRE(known.watch->first_written({at, at + page}).has_value() == known.written[number]);
        }
    }
}

TEST_CASE("a row's every byte is watched, and no byte beside it") {
    if (!can_watch()) return;
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const MappedMemory memory(4 * mib, seed % 2 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        memory.fill(4 * mib);
        const std::uint64_t begin = random() % mib, length = 64 * kib + random() % (2 * mib);
        const WriteExtents rows = one_row(memory.address(begin), length);
        MutationDetector beside(rows, Watching::exact);
        REQUIRE(beside.pages().holds(0));
        CHECK(beside.sampled_bytes() == 0);
        if (begin != 0) *memory.at(begin - 1) ^= std::byte{1};
        *memory.at(begin + length) ^= std::byte{1};
        capture(rows, beside, random);
        CHECK_FALSE(beside.change());

        MutationDetector inside(rows, Watching::exact);
        const std::uint64_t chosen[] = {
            0, length - 1, random() % length, random() % length, random() % page, length - 1 - random() % page};
        const std::uint64_t at = chosen[seed % 6];
        *memory.at(begin + at) ^= std::byte{1};
        capture(rows, inside, random);
        const auto change = inside.change();
        REQUIRE(change);
        CHECK(change->begin <= at);
        CHECK(at < change->end);
        CHECK(change->end - change->begin <= page);
    }
}

TEST_CASE("while a neighbour on the same pages is written all the time, nothing is noticed of it") {
    if (!can_watch()) return;
    const MappedMemory memory(4 * mib);
    memory.fill(4 * mib);
    const std::uint64_t begin = 100, length = 2 * mib + 1000;
    const WriteExtents rows = one_row(memory.address(begin), length);
    std::mt19937_64 random(1);
    std::atomic<bool> done{false};
    std::thread neighbour([&] {
        while (!done)
            for (const std::uint64_t at : {begin - 1, begin - 64, begin + length, begin + length + 2000})
                memory.write(at);
    });
    for (int round = 0; round < 50; ++round) {
        MutationDetector watch(rows, Watching::exact);
        capture(rows, watch, random);
        if (watch.change()) FAIL_CHECK("noticed in round ", round);
    }
    done = true;
    neighbour.join();
}

TEST_CASE("one byte that changes before it is captured fails an exact job, wherever it is") {
    if (!can_watch()) return;
    for (const Setup& setup : setups())
        for (std::uint64_t seed = 0; seed < 12; ++seed) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(seed);
            const Sample sample = plain_sample(6 * mib, 64 * (seed % 3));
            IoFixture fixture(setup, sample.file_bytes);
            WriteExtents rows = sample.rows;
            rows.rows[0].lazy = true;
            WriteOptions options{.blocks = seed % 2 ? 2U : 0U, .bytes_per_s = 1, .watching = Watching::exact};
            const auto start = [&] {
                return fixture.engine.write(fixture.arena, {{fixture.scratch.file(), fixture.file_bytes}},
                                            std::make_shared<WriteExtents>(rows), options);
            };
            {
                const auto job = start();
                CHECK(job->detector().pages().exact_bytes() == 6 * mib);
                CHECK(job->detector().sampled_bytes() == 0);
                job->expedite();
                REQUIRE(job->wait(forever_s));
                REQUIRE_FALSE(job->fault());
                REQUIRE(same(fixture.scratch.contents(), sample.expected));
            }
            std::mt19937_64 random(seed);
            const auto job = start();
            // The first window may be captured already.
            const std::uint64_t at = 2 * mib + random() % (2 * mib);
            *(sample.memory[0].start() + at) ^= std::byte{1};
            job->expedite();
            REQUIRE(job->wait(forever_s));
            REQUIRE(job->fault());
            CHECK(job->fault()->operation == "capture");
            const std::uint64_t first = job->fault()->offset - rows.rows[0].offset;
            CHECK(first <= at);
            CHECK(at < first + job->fault()->length);
            const std::uint64_t before = faults();
            for (std::uint64_t p = 0; p < 6 * mib; p += page) *(sample.memory[0].start() + p) ^= std::byte{0};
            CHECK(faults() - before < few);  // also of a job that failed nothing stays protected
        }
}

}  // namespace flowstone
