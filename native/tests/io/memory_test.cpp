// No memory for a moment, anywhere in the engine: a fault or an exception, nothing waits, and what was there goes on.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#include "tests/io_fixture.h"
#include "tests/simulated/delayed_device.h"

// Sanitizers have an allocator of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace {

enum class Who { nobody, engine, caller };

std::atomic<Who> starved{Who::nobody};
std::atomic<long> allocations_left{0};  // before it is refused
std::atomic<long> refusals_left{0};
std::atomic<long> refused{0};
thread_local bool is_caller = false;

bool is_refused() {
    const Who who = starved.load();
    if (who == Who::nobody || (who == Who::caller) != is_caller) return false;
    if (allocations_left.fetch_sub(1) > 0 || refusals_left.fetch_sub(1) <= 0) return false;
    ++refused;
    return true;
}

}  // namespace

// Not inlined: the compiler would take the pairs inside of them for mismatched ones.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    if (is_refused()) throw std::bad_alloc();
    if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    throw std::bad_alloc();
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
void operator delete[](void* memory, std::size_t) noexcept { operator delete(memory); }

namespace flowstone {
namespace {

/// While it lives, allocations of some threads are refused: `count` of them, after the first `after`.
class Famine {
public:
    Famine(Who who, long after, long count) {
        is_caller = true;
        refused = 0;
        allocations_left = after;
        refusals_left = count;
        starved = who;
    }
    ~Famine() { starved = Who::nobody; }
    Famine(const Famine&) = delete;
    Famine& operator=(const Famine&) = delete;
};

/// A few rows of each kind: long, short, strided, and where there is a device, on it.
struct MixedRows {
    Sample sample = random_sample(11, 12);
    std::shared_ptr<DelayedDevice> device;
    WriteExtents rows;
    std::vector<Line> samples;

    explicit MixedRows(bool has_device, bool lazy) : rows(sample.rows) {
        for (WriteExtent& row : rows.rows) row.lazy = lazy;
        if (!has_device) return;
        std::uint64_t bytes = 0;
        for (const WriteExtent& row : rows.rows) bytes += row.length;
        device = std::make_shared<DelayedDevice>(bytes + 1, std::chrono::microseconds(0));
        rows.devices = {device};
        rows.samples = {{}};
        std::uint64_t place = 0;
        for (WriteExtent& row : rows.rows) {
            if (row.layout != contiguous) continue;
            row.lazy = false;
            std::memcpy(device->inside() + place, row.source(), row.length);
            row.address = device->address() + place;
            row.device = 0;
            place += row.length;
        }
    }
};

/// Of a kind of write: 0 early; 1 lazy; 2 from a device; 3 lazy, watched exactly; 4 before the file is ready.
WriteOptions manner(int kind) {
    WriteOptions options;
    options.blocks = 2;
    options.watching = kind == 3 ? Watching::exact : Watching::samples;
    options.files_ready = kind != 4;
    return options;
}

/// Once for each allocation that `work` makes there, that one refused; and for some of them all after it, too.
/// `look` is at what it left.
void for_each_refusal(Who who, const std::function<void()>& work, const std::function<void()>& look = [] {}) {
    for (const long count : {1L, 1000000L})
        for (long after = 0;; after += count == 1 ? 1 : 7) {
            CAPTURE(count);
            CAPTURE(after);
            {
                const Famine famine(who, after, count);
                work();
            }
            look();
            if (refused == 0) break;
            REQUIRE(after < 20000);
        }
}

bool is_memory(const Fault& fault) {
    return fault.error == ENOMEM || fault.operation.starts_with("copy from or to");  // a device that could not queue it
}

/// `begin` a job, again and again, with every allocation refused that it makes.
template <class Begin> void starve(Begin begin) {
    decltype(begin()) job;
    bool ended = false;
    const auto work = [&] {
        job.reset();
        ended = true;
        try {
            job = begin();
            ended = job->wait(300);
        } catch (const std::bad_alloc&) {}
    };
    for_each_refusal(Who::engine, work, [&] {
        REQUIRE(job);
        REQUIRE(ended);
        if (job->fault()) REQUIRE(is_memory(*job->fault()));
        if (refused == 0) REQUIRE_FALSE(job->fault());
    });
    for_each_refusal(Who::caller, work, [&] {
        REQUIRE(ended);
        if (job) REQUIRE_FALSE(job->fault());
    });
}

}  // namespace

TEST_CASE("no memory for any one allocation of a write fails that job alone, or nothing") {
    for (const Setup& setup : setups())
        for (const int kind : {0, 1, 2, 3, 4}) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(kind);
            const MixedRows mixed(kind == 2, kind != 0);
            IoFixture fixture(setup, mixed.sample.file_bytes);
            const auto rows = std::make_shared<WriteExtents>(mixed.rows);
            const auto begin = [&] {
                auto job = fixture.engine.write(fixture.arena, {{fixture.scratch.file(), fixture.file_bytes}}, rows,
                                                manner(kind));
                if (kind == 4) {
                    // Two windows have blocks, and are held, or it has failed.
                    while (job->copied_bytes() < mib && !job->wait(0)) std::this_thread::yield();
                    (void)job->wait(0.001);
                    job->files_ready();
                }
                return job;
            };
            starve(begin);
            const auto job = begin();
            REQUIRE(job->wait(forever_s));
            REQUIRE_FALSE(job->fault());
            CHECK(same(fixture.scratch.contents(), mixed.sample.expected));
            fixture.arena->close();
        }
}

TEST_CASE("no memory for any one allocation of a read fails that job alone, or nothing") {
    for (const Setup& setup : setups())
        for (const bool has_device : {false, true}) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(has_device);
            const MixedRows mixed(false, false);
            IoFixture fixture(setup, mixed.sample.file_bytes);
            const auto written = fixture.run(mixed.rows);
            REQUIRE_FALSE(written->fault());
            std::vector<Memory> targets;
            ReadExtents back = read_back(mixed.sample, written->digests(), targets, 1);
            std::shared_ptr<DelayedDevice> device;
            if (has_device) {
                device = std::make_shared<DelayedDevice>(mixed.sample.file_bytes + 1, std::chrono::microseconds(0));
                back.devices = {device};
                for (ReadExtent& row : back.rows)
                    if (row.layout == contiguous) row.address = device->address() + row.offset, row.device = 0;
            }
            const auto rows = std::make_shared<ReadExtents>(back);
            const auto begin = [&] { return fixture.engine.read(fixture.arena, {fixture.scratch.file()}, rows, {}); };
            starve(begin);
            const auto job = begin();
            REQUIRE(job->wait(forever_s));
            REQUIRE_FALSE(job->fault());
            CHECK(job->bad_chunks().empty());
            fixture.arena->close();
        }
}

TEST_CASE("an engine or an arena that has no memory to begin with says so") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        int other = 0;
        const auto begin = [&] {
            try {
                Engine engine({setup.backend, 4, mib, 2});
                Arena arena(2 * huge_page_bytes, huge_page_bytes);
            } catch (const std::bad_alloc&) {
            } catch (const std::system_error& error) { other = error.code().value(); }
        };
        for_each_refusal(Who::caller, begin);
        for_each_refusal(Who::engine, begin);
        CHECK(other == 0);
    }
}

}  // namespace flowstone

#endif
