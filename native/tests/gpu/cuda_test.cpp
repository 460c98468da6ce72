// The engine's calls of CUDA's driver, against one that refuses what CUDA's refuses.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <system_error>
#include <thread>
#include <vector>

#include "io/aligned.h"
#include "codec/digest.h"
#include "tests/simulated/simulated_gpu.h"
#include "gpu/table_kernel.h"

namespace flowstone {
namespace {

using std::chrono::microseconds;

constexpr std::uint64_t kib = 1024;
constexpr int failed = 719;

/// What the callbacks of batches have said.
class Results {
public:
    std::unique_ptr<CopyBatch> batch() {
        return std::make_unique<CopyBatch>(
            [this] {
                const std::lock_guard lock(mutex_);
                ++queued_;
                changed_.notify_all();
            },
            [this](int error) {
                const std::lock_guard lock(mutex_);
                errors_.push_back(error);
                changed_.notify_all();
            });
    }
    std::vector<int> errors(std::size_t count) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return errors_.size() >= count; });
        return errors_;
    }
    std::size_t await_queued(std::size_t count) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return queued_ >= count; });
        return queued_;
    }
    std::size_t queued() {
        const std::lock_guard lock(mutex_);
        return queued_;
    }
    std::size_t over() {
        const std::lock_guard lock(mutex_);
        return errors_.size();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::size_t queued_ = 0;
    std::vector<int> errors_;
};

/// A GPU, its copies, and host memory that is pinned for it.
struct Bench {
    explicit Bench(std::uint64_t bytes = 64 * kib)
        : gpu(bytes, microseconds(0)), memory(allocate_aligned(bytes)), bytes(bytes) {
        device = make_cuda_device(simulated_driver(), gpu.ordinal(), "cuda:0");
        REQUIRE(device->pin(memory.get(), bytes) == 0);
        std::memset(memory.get(), 0, bytes);
    }
    ~Bench() {
        gpu.hold(false);
        if (device) device->unpin(memory.get());
    }
    std::unique_ptr<CopyBatch> batch(std::uint64_t at, std::uint64_t length, bool to_host = true) {
        std::unique_ptr<CopyBatch> made = results.batch();
        made->add({memory.get() + at, gpu.address() + at, length, to_host});
        return made;
    }
    SimulatedGpu gpu;
    AlignedBytes memory;
    std::uint64_t bytes;
    Results results;
    std::shared_ptr<Device> device;  // goes first, when all that was submitted is over
};

void fill_with_a_pattern(Bench& bench) {
    for (std::uint64_t i = 0; i < bench.bytes; ++i) bench.gpu.inside()[i] = static_cast<std::byte>(i * 7 + i / 256);
}

/// Three rounds on a GPU that is full. The current stream stands still before it changes a byte; `read` has it read
/// behind that, and behind `read` it clears others. `check` gets what was to be read.
void read_between_changes(Bench& bench, const std::function<void(std::uintptr_t)>& read,
                          const std::function<void(const std::vector<std::byte>&)>& check) {
    const std::uintptr_t stream = bench.gpu.current();
    bench.gpu.fill(true);
    for (int round = 0; round < 3; ++round) {
        std::atomic<bool> go{false};
        bench.gpu.launch(stream, [&] {
            while (!go) std::this_thread::yield();
            bench.gpu.inside()[20] = static_cast<std::byte>(round);
        });
        read(stream);
        REQUIRE(bench.device->follow(stream) == 0);
        bench.device->submit(bench.results.batch());  // of nothing: for what it follows
        std::vector<std::byte> now(bench.gpu.inside(), bench.gpu.inside() + bench.bytes);
        now[20] = static_cast<std::byte>(round);
        bench.gpu.launch(stream, [&] { std::memset(bench.gpu.inside(), 0, 64); });
        go = true;
        CHECK(bench.results.errors(static_cast<std::size_t>(round) + 1).back() == 0);
        check(now);
        bench.gpu.synchronize(stream);
    }
    bench.gpu.fill(false);
}

}  // namespace

TEST_CASE("copies have a stream of their own, which does not wait for the null stream and gives way to all others") {
    Bench bench;
    REQUIRE(bench.gpu.streams().size() == 1);
    CHECK(bench.gpu.streams()[0].flags == cuda_non_blocking);
    CHECK(bench.gpu.streams()[0].priority == 0);  // the range is 0 to -5
    bench.device->unpin(bench.memory.get());
    bench.device = nullptr;
    CHECK(bench.gpu.streams().empty());
}

TEST_CASE("each batch is told of once, in order, with its bytes there") {
    Bench bench;
    std::memset(bench.gpu.inside(), 7, bench.bytes);
    for (std::uint64_t i = 0; i < 16; ++i) bench.device->submit(bench.batch(i * kib, kib));
    bench.device->submit(bench.results.batch());  // of nothing
    CHECK(bench.results.errors(17) == std::vector<int>(17, 0));
    CHECK(std::memcmp(bench.memory.get(), bench.gpu.inside(), 16 * kib) == 0);
    std::memset(bench.memory.get(), 9, kib);
    bench.device->submit(bench.batch(0, kib, false));
    (void)bench.results.errors(18);
    CHECK(bench.gpu.inside()[kib - 1] == std::byte{9});
}

TEST_CASE("copies that go on where the one before ends are one") {
    Bench bench;
    std::unique_ptr<CopyBatch> batch = bench.batch(0, kib);
    for (std::uint64_t i = 1; i < 8; ++i)
        batch->add({bench.memory.get() + i * kib, bench.gpu.address() + i * kib, kib, true});
    batch->add({bench.memory.get() + 9 * kib, bench.gpu.address() + 9 * kib, kib, true});
    batch->add({bench.memory.get() + 10 * kib, bench.gpu.address() + 12 * kib, kib, true});
    bench.device->submit(std::move(batch));
    CHECK(bench.results.errors(1) == std::vector<int>{0});
    CHECK(bench.gpu.copies() == 3);
}

TEST_CASE("who submits never waits, however long the device's queue is, and no more than 64 events are in it") {
    Bench bench;
    bench.gpu.hold(true);
    constexpr std::size_t batches = 200, copies = 20;  // 4000 copies, where a call blocks from 1024 on
    for (std::size_t i = 0; i < batches; ++i) {
        std::unique_ptr<CopyBatch> batch = bench.results.batch();
        for (std::size_t j = 0; j < copies; ++j)
            batch->add({bench.memory.get() + (j % 2) * 8 * kib, bench.gpu.address(), kib, true});
        bench.device->submit(std::move(batch));
    }
    CHECK(bench.results.await_queued(40) < batches);
    CHECK(bench.results.over() == 0);
    bench.gpu.hold(false);
    CHECK(bench.results.errors(batches) == std::vector<int>(batches, 0));
    CHECK(bench.results.queued() == batches);
    CHECK(bench.gpu.pending_events_max() <= cuda_batches_max);
}

TEST_CASE("small batches are bounded, too") {
    Bench bench;
    bench.gpu.hold(true);
    for (std::size_t i = 0; i < 300; ++i) bench.device->submit(bench.batch(0, 64));
    CHECK(bench.results.await_queued(cuda_batches_max) == cuda_batches_max);
    CHECK(bench.gpu.pending_events() == cuda_batches_max);
    bench.gpu.hold(false);
    CHECK(bench.results.errors(300).size() == 300);
    CHECK(bench.gpu.pending_events_max() == cuda_batches_max);
}

TEST_CASE("once the GPU has failed, all that is outstanding ends with its error, and all that comes later") {
    for (const std::uint64_t copies : {0, 1, 5}) {
        CAPTURE(copies);
        Bench bench;
        bench.gpu.hold(true);
        bench.gpu.fail_after(copies);
        for (std::uint64_t i = 0; i < 100; ++i) bench.device->submit(bench.batch(0, kib));
        (void)bench.results.await_queued(cuda_batches_max);
        bench.gpu.hold(false);
        const std::vector<int> errors = bench.results.errors(100);
        REQUIRE(errors.size() == 100);
        const auto well = std::count(errors.begin(), errors.end(), 0);
        CHECK(static_cast<std::uint64_t>(well) <= copies);
        CHECK(std::count(errors.begin(), errors.end(), failed) == 100 - well);
        bench.device->submit(bench.batch(0, kib));
        CHECK(bench.results.errors(101).back() == failed);
        CHECK(bench.device->describe(failed) == "CUDA_ERROR_LAUNCH_FAILED");
        CHECK(bench.device->describe(12345) == "CUDA error 12345");
    }
}

TEST_CASE("a copy that the driver refuses ends its batch, once the copies before it are over, and no other") {
    Bench bench;
    bench.gpu.hold(true);
    bench.device->submit(bench.batch(0, kib));
    (void)bench.results.await_queued(1);
    bench.gpu.refuse_next();
    bench.device->submit(bench.batch(kib, kib));
    bench.gpu.hold(false);
    bench.device->submit(bench.batch(2 * kib, kib));
    std::vector<int> errors = bench.results.errors(3);
    std::sort(errors.begin(), errors.end());
    CHECK(errors == std::vector<int>{0, 0, 1});
}

TEST_CASE("a graph that another thread records stays whole while copies are made, and memory is pinned") {
    Bench bench;
    constexpr int global = 0;
    bench.gpu.begin_capture(bench.gpu.current(), global);
    for (std::uint64_t i = 0; i < 16; ++i) bench.device->submit(bench.batch(i * kib, kib));
    CHECK(bench.results.errors(16) == std::vector<int>(16, 0));
    const AlignedBytes more = allocate_aligned(4096);
    CHECK(bench.device->pin(more.get(), 4096) == 0);
    bench.device->unpin(more.get());
    CHECK(bench.gpu.end_capture(bench.gpu.current()));
    // The simulation is as strict as the driver: a thread that has not exchanged its mode ends the recording.
    bench.gpu.begin_capture(bench.gpu.current(), global);
    int found = 0;
    std::thread([&] {
        void* context = nullptr;
        (void)simulated_driver().retain_primary(&context, bench.gpu.ordinal());
        (void)simulated_driver().push_context(context);
        void* event = nullptr;
        found = simulated_driver().event_create(&event, 0);
    }).join();
    CHECK(found == cuda_capture_unsupported);
    CHECK_FALSE(bench.gpu.end_capture(bench.gpu.current()));
}

TEST_CASE("a stream that records is neither followed nor led, and its graph does not take our copies in") {
    Bench bench;
    bench.gpu.hold(true);
    bench.device->submit(bench.batch(0, kib));
    (void)bench.results.await_queued(1);
    const std::uintptr_t stream = bench.gpu.current();
    CHECK_FALSE(bench.device->is_recording(stream));
    bench.gpu.begin_capture(stream, 0);
    CHECK(bench.device->is_recording(stream));
    CHECK(bench.device->follow(stream) == cuda_capture_unsupported);
    CHECK(bench.device->lead(stream) == cuda_capture_unsupported);
    bench.device->submit(bench.batch(kib, kib));
    bench.gpu.hold(false);
    CHECK(bench.results.errors(2) == std::vector<int>(2, 0));
    CHECK(bench.gpu.copies() == 2);
    CHECK(bench.gpu.end_capture(stream));
}

TEST_CASE("copies come after what they follow, and before what they lead, on every stream") {
    Bench bench;
    const std::uintptr_t one = bench.gpu.current(), other = bench.gpu.make_stream();
    std::atomic<bool> go{false};
    const auto kernel = [&](int value) { std::memset(bench.gpu.inside(), value, kib); };
    bench.gpu.hold(true);
    bench.gpu.launch(one, [&] {
        while (!go) std::this_thread::yield();
        kernel(1);
    });
    REQUIRE(bench.device->follow(one) == 0);
    bench.device->submit(bench.batch(0, kib));
    (void)bench.results.await_queued(1);
    REQUIRE(bench.device->lead(one) == 0);
    REQUIRE(bench.device->lead(other) == 0);
    bench.gpu.launch(one, [&] { kernel(2); });
    bench.gpu.launch(other, [&] { kernel(3); });
    go = true;
    bench.gpu.hold(false);
    CHECK(bench.results.errors(1) == std::vector<int>{0});
    CHECK(bench.memory.get()[kib - 1] == std::byte{1});
    bench.gpu.synchronize(one);
    bench.gpu.synchronize(other);
    REQUIRE(bench.device->lead(one) == 0);  // of nothing
}

TEST_CASE("what waits for early copies does not wait for the lazy ones behind them") {
    Bench bench;
    std::unique_ptr<CopyBatch> early = bench.batch(0, kib);
    early->early = true;
    bench.gpu.hold(true);
    bench.device->submit(std::move(early));
    (void)bench.results.await_queued(1);
    const std::uintptr_t stream = bench.gpu.current();
    REQUIRE(bench.device->lead(stream, Copies::early) == 0);
    bench.gpu.launch(stream, [&] { std::memset(bench.gpu.inside(), 3, kib); });
    bench.gpu.hold(false);
    (void)bench.results.errors(1);
    CHECK(bench.memory.get()[0] == std::byte{0});  // the kernel came after the copy
    bench.gpu.synchronize(stream);
    bench.gpu.hold(true);
    bench.device->submit(bench.batch(kib, kib));
    (void)bench.results.await_queued(2);
    REQUIRE(bench.device->lead(stream, Copies::early) == 0);
    bench.gpu.launch(stream, [&] { std::memset(bench.gpu.inside(), 4, kib); });
    bench.gpu.synchronize(stream);  // ends, though the lazy copy is held
    CHECK(bench.gpu.inside()[0] == std::byte{4});
}

TEST_CASE("a copy into memory that is not pinned holds up the device's own thread, not the one that submits") {
    Bench bench;
    const AlignedBytes pageable = allocate_aligned(4096);
    std::memset(bench.gpu.inside(), 5, 4096);
    bench.gpu.hold(true);
    std::unique_ptr<CopyBatch> batch = bench.results.batch();
    batch->add({pageable.get(), bench.gpu.address(), 4096, true});
    bench.device->submit(std::move(batch));
    CHECK(bench.results.queued() == 0);
    bench.gpu.hold(false);
    CHECK(bench.results.errors(1) == std::vector<int>{0});
    CHECK(bench.gpu.pageable_copies() == 1);
    CHECK(pageable.get()[4095] == std::byte{5});
}

TEST_CASE("memory that was reserved for several gathers is enough for as many at a time") {
    Bench bench;
    const std::vector<DeviceRun> runs{{bench.gpu.address(), 4096}};
    bench.device->reserve_launches({runs.size(), 4096}, 3);
    const std::uint64_t allocations = bench.gpu.host_allocations();
    for (int round = 0; round < 2; ++round) {
        std::shared_ptr<const GatheredRuns> held[3];
        for (std::shared_ptr<const GatheredRuns>& one : held)
            REQUIRE(bench.device->gather(bench.gpu.current(), runs, one) == 0);
        CHECK(bench.gpu.host_allocations() == allocations);
        bench.gpu.synchronize(bench.gpu.current());
    }
    bench.device->reserve_launches({runs.size(), 4096}, 3);
    CHECK(bench.gpu.host_allocations() == allocations);
}

TEST_CASE("a launch takes the least memory that is enough, and leaves what was made for a larger one") {
    Bench bench(2048 * kib);
    const std::vector<DeviceRun> large{{bench.gpu.address(), 1024 * kib}}, small{{bench.gpu.address(), 1024}};
    bench.device->reserve_launches({large.size(), 1024 * kib, small.size(), 0}, 1);
    const std::uint64_t allocations = bench.gpu.host_allocations();
    std::shared_ptr<const DeviceDigests> digested;
    std::shared_ptr<const GatheredRuns> gathered;
    REQUIRE(bench.device->digest(bench.gpu.current(), small, digested) == 0);
    REQUIRE(bench.device->gather(bench.gpu.current(), large, gathered) == 0);
    CHECK(bench.gpu.host_allocations() == allocations);
    bench.gpu.synchronize(bench.gpu.current());
}

TEST_CASE("what was made for launches before memory ran out is used by the next ones") {
    Bench bench;
    bench.gpu.limit_pinned(bench.bytes + 1024 * kib);
    CHECK_THROWS_AS(bench.device->reserve_launches({1, 4096, std::uint64_t{1} << 56, 0}, 1), std::bad_alloc);
    const std::uint64_t allocations = bench.gpu.host_allocations();
    CHECK(allocations > 0);
    bench.device->reserve_launches({1, 4096}, 1);
    CHECK(bench.gpu.host_allocations() == allocations);
}

TEST_CASE("runs are gathered as the stream before left them, by one launch that takes no memory of the GPU") {
    Bench bench;
    fill_with_a_pattern(bench);
    const std::uint64_t begin = bench.gpu.address();
    const std::vector<DeviceRun> runs{{begin, 64}, {begin + 1000, 1},  {begin + 17, 333},
                                      {begin, 0},  {begin + 16, 4096}, {begin + bench.bytes - 5, 5}};
    bench.device->reserve_launches({runs.size(), 8 * kib}, 1);
    const std::uint64_t launches = bench.gpu.module_launches(), allocations = bench.gpu.host_allocations();
    std::shared_ptr<const GatheredRuns> gathered;
    const auto gather = [&](std::uintptr_t stream) { REQUIRE(bench.device->gather(stream, runs, gathered) == 0); };
    read_between_changes(bench, gather, [&](const std::vector<std::byte>& expected) {
        REQUIRE(gathered->bytes().size() == gathered_bytes(runs));
        std::uint64_t at = 0;
        for (const DeviceRun& run : runs) {
            CHECK(std::memcmp(gathered->bytes().data() + at, expected.data() + (run.address - begin), run.bytes) == 0);
            at += round_up(run.bytes, gathered_alignment_bytes);
        }
        gathered = nullptr;
    });
    CHECK(bench.gpu.module_launches() == launches + 3);
    CHECK(bench.gpu.host_allocations() == allocations);
}

TEST_CASE("memory that is gathered into is used again when the kernel is over, not before") {
    Bench bench;
    const std::uintptr_t stream = bench.gpu.current();
    const std::vector<DeviceRun> run{{bench.gpu.address(), 64}};
    std::atomic<bool> go{false};
    bench.gpu.launch(stream, [&] {
        while (!go) std::this_thread::yield();
    });
    std::shared_ptr<const GatheredRuns> first, second, third;
    REQUIRE(bench.device->gather(stream, run, first) == 0);
    const std::byte* const memory = first->bytes().data();
    first = nullptr;  // as if the save had failed
    REQUIRE(bench.device->gather(stream, run, second) == 0);
    CHECK(second->bytes().data() != memory);
    go = true;
    bench.gpu.synchronize(stream);
    REQUIRE(bench.device->gather(stream, run, third) == 0);
    CHECK(third->bytes().data() == memory);
    bench.gpu.synchronize(stream);
}

TEST_CASE("where the driver refuses the kernel, or pinned memory, runs are copied one by one") {
    for (const bool has_memory : {true, false}) {
        CAPTURE(has_memory);
        Bench bench;
        bench.device->unpin(bench.memory.get());
        bench.gpu.refuse_modules();
        bench.device = nullptr;
        bench.device = make_cuda_device(simulated_driver(), bench.gpu.ordinal(), "cuda:0");
        REQUIRE(bench.device->pin(bench.memory.get(), bench.bytes) == 0);
        if (!has_memory) bench.gpu.limit_pinned(bench.bytes);
        std::memset(bench.gpu.inside(), 6, bench.bytes);
        const std::vector<DeviceRun> runs{{bench.gpu.address(), 64}, {bench.gpu.address() + 999, 77}};
        std::shared_ptr<const GatheredRuns> gathered;
        REQUIRE(bench.device->gather(bench.gpu.current(), runs, gathered) == 0);
        bench.gpu.synchronize(bench.gpu.current());
        CHECK(bench.gpu.copies() == 2);
        CHECK(gathered->bytes()[64 + 76] == std::byte{6});
    }
}

TEST_CASE(
    "no gather of a recording stream, of 2 GiB or of 2^30 runs; one outside of the GPU's memory fails what follows") {
    Bench bench;
    const std::uintptr_t stream = bench.gpu.current();
    std::shared_ptr<const GatheredRuns> gathered;
    bench.gpu.begin_capture(stream, 0);
    CHECK(bench.device->gather(stream, std::vector<DeviceRun>{{bench.gpu.address(), 64}}, gathered) ==
          cuda_capture_unsupported);
    CHECK(gathered == nullptr);
    CHECK(bench.gpu.end_capture(stream));
    const std::uint64_t launches = bench.gpu.module_launches();
    CHECK(bench.device->gather(stream, std::vector<DeviceRun>{{bench.gpu.address(), 0x80000000U}}, gathered) ==
          cuda_invalid_value);
    const DeviceRun run{bench.gpu.address(), 0};
    const std::span<const DeviceRun> many(&run, launch_rows_max + 1);  // refused before the second one is looked at
    CHECK(bench.device->gather(stream, many, gathered) == cuda_invalid_value);
    std::shared_ptr<const DeviceDigests> digested;
    CHECK(bench.device->digest(stream, many, digested) == cuda_invalid_value);
    CHECK(bench.gpu.module_launches() == launches);
    constexpr int illegal_address = 700;
    const int error =
        bench.device->gather(stream, std::vector<DeviceRun>{{bench.gpu.address() + bench.bytes - 1, 2}}, gathered);
    CHECK((error == 0 || error == illegal_address));
    bench.gpu.synchronize(stream);
    bench.device->submit(bench.batch(0, kib));
    CHECK(bench.results.errors(1) == std::vector<int>{illegal_address});
}

TEST_CASE("runs are digested as the stream before left them, in memory that is used again when the kernel is over") {
    Bench bench;
    fill_with_a_pattern(bench);
    const std::uint64_t begin = bench.gpu.address();
    std::vector<DeviceRun> runs;
    for (const std::uint32_t bytes : {0U, 1U, 16U, 17U, 128U, 240U, 241U, 1024U, 1025U, 60'000U})
        for (const std::uint64_t skew : {0U, 1U, 6U, 8U, 16U}) runs.push_back({begin + skew, bytes});
    runs.push_back({begin + bench.bytes - 241, 241});
    bench.device->reserve_launches({0, 0, runs.size(), runs.size()}, 1);
    const std::uint64_t launches = bench.gpu.module_launches(), allocations = bench.gpu.host_allocations();
    std::shared_ptr<const DeviceDigests> digested;
    const auto digest = [&](std::uintptr_t stream) { REQUIRE(bench.device->digest(stream, runs, digested) == 0); };
    read_between_changes(bench, digest, [&](const std::vector<std::byte>& expected) {
        REQUIRE(digested);
        REQUIRE(digested->runs() == runs.size());
        for (std::size_t i = 0; i < runs.size(); ++i) {
            CAPTURE(runs[i].bytes);
            CHECK(digested->digest(i) == xxh3_64(expected.data() + (runs[i].address - begin), runs[i].bytes));
        }
        digested = nullptr;
    });
    CHECK(bench.gpu.module_launches() == launches + 6);  // a gather of the short ones with each
    CHECK(bench.gpu.host_allocations() == allocations);
}

TEST_CASE("where the driver refuses the kernel, or pinned memory, there are no digests, and that is no error") {
    for (const bool has_kernel : {true, false}) {
        CAPTURE(has_kernel);
        Bench bench;
        bench.device->unpin(bench.memory.get());
        if (!has_kernel) bench.gpu.refuse_modules();
        bench.device = nullptr;
        bench.device = make_cuda_device(simulated_driver(), bench.gpu.ordinal(), "cuda:0");
        REQUIRE(bench.device->pin(bench.memory.get(), bench.bytes) == 0);
        if (has_kernel) bench.gpu.limit_pinned(bench.bytes);
        std::shared_ptr<const DeviceDigests> digested;
        bench.device->reserve_launches({10, 1000, 10, 1}, 1);
        CHECK(bench.device->digest(bench.gpu.current(), std::vector<DeviceRun>{{bench.gpu.address(), 1024}},
                                   digested) == 0);
        CHECK(digested == nullptr);
    }
}

TEST_CASE("no digest of a recording stream or of 2 GiB; a released owner's digests end before the kernel is unloaded") {
    Bench bench;
    const std::uintptr_t stream = bench.gpu.current();
    std::shared_ptr<const DeviceDigests> digested;
    bench.gpu.begin_capture(stream, 0);
    CHECK(bench.device->digest(stream, std::vector<DeviceRun>{{bench.gpu.address(), 1024}}, digested) ==
          cuda_capture_unsupported);
    CHECK(digested == nullptr);
    CHECK(bench.gpu.end_capture(stream));
    CHECK(bench.device->digest(stream, std::vector<DeviceRun>{{bench.gpu.address(), 0x80000000U}}, digested) ==
          cuda_invalid_value);
    std::atomic<bool> go{false};
    bench.gpu.launch(stream, [&] {
        while (!go) std::this_thread::yield();
    });
    REQUIRE(bench.device->digest(stream, std::vector<DeviceRun>{{bench.gpu.address(), 1024}}, digested) == 0);
    bench.device->unpin(bench.memory.get());
    bench.device = nullptr;  // the digests keep what they need
    std::jthread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        go = true;
    });
    digested = nullptr;
    CHECK(go);
    bench.gpu.synchronize(stream);
}

TEST_CASE("a GPU that there is none of is refused with the driver's word for it") {
    try {
        (void)make_cuda_device(simulated_driver(), 1'000'000, "cuda:1000000");
        FAIL("it was made");
    } catch (const std::system_error& error) {
        CHECK(error.code().value() == ENOSYS);
        CHECK(std::string(error.what()).find("cuDeviceGet") != std::string::npos);
    }
}

}  // namespace flowstone
