// StridedArray memory of a device, in row-major order on the host: the kernel's table, copies, gathers, and rows of
// jobs.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "tests/io_fixture.h"
#include "tests/simulated/delayed_device.h"
#include "gpu/pack_kernel.h"

namespace flowstone {
namespace {

using std::chrono::microseconds;
using Sizes = std::vector<std::uint64_t>;
using Strides = std::vector<std::int64_t>;

/// An array in memory of a device, and what it is in row-major order.
struct StridedArray {
    std::uint64_t item_bytes;
    Sizes shape;
    Strides strides;
    std::uint64_t origin;  // of its element 0, in the device's memory

    Layout layout() const { return Layout::whole(item_bytes, shape, strides); }
    std::uint64_t bytes() const { return std::accumulate(shape.begin(), shape.end(), item_bytes, std::multiplies<>()); }
    /// Element by element, by no code of the engine's.
    std::vector<std::byte> packed(const std::byte* memory) const {
        std::vector<std::byte> made(bytes());
        for (std::uint64_t at = 0; at < made.size(); ++at) {
            std::uint64_t rest = at / item_bytes;
            std::int64_t place = static_cast<std::int64_t>(origin + at % item_bytes);
            for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d])
                place += static_cast<std::int64_t>(rest % shape[d]) * strides[d];
            made[at] = memory[place];
        }
        return made;
    }
};

/// With dimensions in any order, spread, repeated (of stride 0), or backwards; at any address.
StridedArray random_strided(std::mt19937_64& random, std::uint64_t memory_bytes) {
    const auto upto = [&](std::uint64_t most) { return random() % (most + 1); };
    for (;;) {
        StridedArray made{std::uint64_t{1} << upto(4), {}, {}, 0};
        const std::size_t ndim = 1 + upto(8);
        std::vector<std::size_t> order(ndim);
        std::iota(order.begin(), order.end(), 0);
        if (upto(3) != 0) std::shuffle(order.begin(), order.end(), random);
        made.shape.resize(ndim);
        made.strides.resize(ndim);
        std::uint64_t stride = made.item_bytes * (1 + upto(2) / 2), below = 0;
        for (std::size_t k = ndim; k-- > 0;) {
            const std::size_t d = order[k];
            made.shape[d] = ndim > 4 ? 1 + upto(4) : 1 + upto(upto(2) == 0 ? 300 : 20);
            made.strides[d] = upto(9) == 0 ? 0 : static_cast<std::int64_t>(stride);
            if (made.strides[d] != 0 && upto(9) == 0) {
                made.strides[d] = -made.strides[d];
                below += stride * (made.shape[d] - 1);
            }
            stride *= made.shape[d];
            if (upto(2) == 0) stride += made.item_bytes * upto(5);
        }
        made.origin = below + (upto(1) == 0 ? made.item_bytes * upto(9) : upto(40));
        if (made.origin + stride + 16 < memory_bytes && made.bytes() < memory_bytes) return made;
    }
}

/// A device with a pattern in its memory, and host memory that is pinned for it.
struct Bench {
    static constexpr std::uint64_t bytes = 4 * mib;

    explicit Bench(bool refuses = false) : memory(allocate_aligned(bytes)) {
        std::uint64_t drawn = 1;
        for (std::uint64_t i = 0; i < bytes; ++i)
            gpu.inside()[i] = static_cast<std::byte>((drawn = drawn * 6364136223846793005u + 1) >> 56);
        if (refuses) gpu.refuse_modules();
        device = make_cuda_device(simulated_driver(), gpu.ordinal(), "cuda:0");
        REQUIRE(device->pin(memory.get(), bytes) == 0);
        std::memset(memory.get(), 0xEE, bytes);
    }
    ~Bench() { device->unpin(memory.get()); }

    int run(const std::vector<DeviceCopy>& copies) {
        std::promise<int> over;
        auto batch = std::make_unique<CopyBatch>(nullptr, [&](int error) { over.set_value(error); });
        for (const DeviceCopy& copy : copies) batch->add(copy);
        device->submit(std::move(batch));
        return over.get_future().get();
    }
    DeviceCopy copy(const StridedArray& from, const Layout& layout, std::uint64_t begin, std::uint64_t length,
                    std::uint64_t at) {
        return {memory.get() + at, gpu.address() + from.origin, length, true, 1, 0, 0, &layout, begin};
    }

    SimulatedGpu gpu{bytes, microseconds(0)};
    AlignedBytes memory;
    std::shared_ptr<Device> device;
};

}  // namespace

TEST_CASE("any part of a strided array is copied in row-major order to its place alone, by a kernel or run by run") {
    for (const bool refuses : {false, true}) {
        CAPTURE(refuses);
        Bench bench(refuses);
        CHECK(bench.device->packs() != refuses);
        std::mt19937_64 random(refuses ? 2 : 1);
        for (int round = 0; round < 300; ++round) {
            CAPTURE(round);
            const StridedArray from = random_strided(random, refuses ? 100 * kib : Bench::bytes / 2);
            const Layout layout = from.layout();
            const std::uint64_t all = from.bytes(), unit = round % 4 == 0 ? 1 : from.item_bytes;
            const std::uint64_t begin = random() % (all / unit) * unit,
                                length = std::min(all - begin, (1 + random() % (all / unit)) * unit);
            const std::uint64_t at = 64 + (round % 3 == 0 ? random() % 64 : 0);
            REQUIRE(bench.run({bench.copy(from, layout, begin, length, at)}) == 0);
            const std::vector<std::byte> expected = from.packed(bench.gpu.inside());
            REQUIRE(std::memcmp(bench.memory.get() + at, expected.data() + begin, length) == 0);
            CHECK(bench.memory[at - 1] == std::byte{0xEE});
            CHECK(bench.memory[at + length] == std::byte{0xEE});
            std::memset(bench.memory.get() + at, 0xEE, length);
        }
        CHECK((bench.gpu.packed_copies() > 100) == !refuses);
    }
}

TEST_CASE(
    "a kernel in the place of copies has few blocks, however long a window is: they would keep others from the GPU") {
    Bench bench;
    const StridedArray turned{2, {900, 1100}, {2, 1800}, 0};
    const Layout layout = turned.layout();
    std::vector<DeviceCopy> copies;
    for (std::uint64_t i = 0; i < 50; ++i)
        copies.push_back(bench.copy(turned, layout, i * 2000, 1000, i * 1000));  // none goes on with another
    copies.push_back(bench.copy(turned, layout, 0, turned.bytes(), mib));
    REQUIRE(bench.run(copies) == 0);
    CHECK(bench.gpu.packed_blocks_max() == 32);
    std::memset(bench.memory.get(), 0xEE, 2 * mib);
    REQUIRE(bench.run({bench.copy(turned, layout, 0, turned.bytes(), 64)}) == 0);
    CHECK(std::memcmp(bench.memory.get() + 64, turned.packed(bench.gpu.inside()).data(), turned.bytes()) == 0);
}

TEST_CASE("copies of strided memory in a batch are one launch, which those that go on are joined in") {
    Bench bench;
    const StridedArray turned{4, {300, 500}, {4, 1200}, 100}, narrow{2, {1000, 7}, {200, 4}, 2};
    const Layout one = turned.layout(), other = narrow.layout();
    const std::uint64_t launches = bench.gpu.module_launches();
    auto batch = std::make_unique<CopyBatch>(nullptr, nullptr);
    batch->add(bench.copy(turned, one, 0, 1000, 0));
    batch->add(bench.copy(turned, one, 1000, turned.bytes() - 1000, 1000));
    CHECK(batch->copies.size() == 1);
    batch->add(bench.copy(turned, one, 0, 1000, turned.bytes()));
    CHECK(batch->copies.size() == 2);
    REQUIRE(bench.run({batch->copies[0], bench.copy(narrow, other, 0, narrow.bytes(), mib)}) == 0);
    CHECK(bench.gpu.module_launches() == launches + 1);
    CHECK(bench.gpu.copies() == 1);
    CHECK(std::memcmp(bench.memory.get(), turned.packed(bench.gpu.inside()).data(), turned.bytes()) == 0);
    CHECK(std::memcmp(bench.memory.get() + mib, narrow.packed(bench.gpu.inside()).data(), narrow.bytes()) == 0);
}

TEST_CASE("rows of 512 bytes and more are copied without a kernel; narrower rows are copied by one") {
    Bench bench;
    for (const auto& [from, rows, kernels] : {std::tuple{StridedArray{4, {1500, 128}, {1024, 4}, 4}, 1U, 0U},
                                              std::tuple{StridedArray{4, {1500, 127}, {1024, 4}, 4}, 0U, 1U},
                                              std::tuple{StridedArray{2, {4, 200, 512}, {300'000, 1040, 2}, 0}, 4U, 0U},
                                              std::tuple{StridedArray{2, {200, 4, 512}, {5000, 1040, 2}, 0}, 0U, 1U},
                                              std::tuple{StridedArray{4, {3, 20'000}, {0, 4}, 8}, 0U, 0U}}) {
        const Layout layout = from.layout();
        const std::uint64_t rows_before = bench.gpu.copies_of_rows(), kernels_before = bench.gpu.packed_copies();
        REQUIRE(bench.run({bench.copy(from, layout, 0, from.bytes(), 0)}) == 0);
        CHECK(bench.gpu.copies_of_rows() - rows_before == rows);
        CHECK(bench.gpu.packed_copies() - kernels_before == kernels);
        REQUIRE(std::memcmp(bench.memory.get(), from.packed(bench.gpu.inside()).data(), from.bytes()) == 0);
    }
}

TEST_CASE("a window that begins and ends within rows takes a copy for each end and one for the rows between") {
    Bench bench;
    const StridedArray from{4, {3000, 250}, {1200, 4}, 0};
    const Layout layout = from.layout();
    const std::uint64_t copies = bench.gpu.copies();
    REQUIRE(bench.run({bench.copy(from, layout, 1004, mib, 0)}) == 0);
    CHECK(bench.gpu.copies() == copies + 3);
    CHECK(std::memcmp(bench.memory.get(), from.packed(bench.gpu.inside()).data() + 1004, mib) == 0);
}

TEST_CASE("copies to unpinned memory are made run by run; released memory is refused without harm to the GPU") {
    Bench bench;
    const StridedArray turned{8, {40, 60}, {8, 320}, 2 * mib};
    const Layout layout = turned.layout();
    std::vector<std::byte> pageable(turned.bytes());
    DeviceCopy copy = bench.copy(turned, layout, 0, turned.bytes(), 0);
    copy.host = pageable.data();
    REQUIRE(bench.run({copy}) == 0);
    CHECK(pageable == turned.packed(bench.gpu.inside()));
    CHECK(bench.gpu.packed_copies() == 0);
    CHECK(bench.gpu.pageable_copies() > 0);
    bench.gpu.unmap(2 * mib + turned.bytes() - 8, 2 * mib);
    CHECK(bench.run({bench.copy(turned, layout, 0, turned.bytes(), 0)}) == cuda_invalid_value);
    CHECK(bench.gpu.packed_copies() == 0);
    const StridedArray before{8, {40, 50}, {8, 320}, 0};
    const Layout other = before.layout();
    REQUIRE(bench.run({bench.copy(before, other, 0, before.bytes(), 0)}) == 0);
    CHECK(bench.gpu.packed_copies() == 1);
}

TEST_CASE("what is read outside of the GPU's memory, or written outside of pinned memory, fails the simulated kernel") {
    constexpr int illegal_address = 700, misaligned = 716;
    const auto fail = [](const std::function<void(PackPart&)>& change) {
        Bench bench;
        const StridedArray from{4, {10, 20}, {4, 40}, 0};
        std::vector<PackPart> parts;
        add_parts(from.layout(), bench.gpu.address(), 0, from.bytes(), 0, parts);
        REQUIRE(parts.size() == 1);
        change(parts[0]);
        void* context = nullptr;
        const CudaDriver& driver = simulated_driver();
        REQUIRE(driver.retain_primary(&context, bench.gpu.ordinal()) == 0);
        REQUIRE(driver.push_context(context) == 0);
        void *module = nullptr, *function = nullptr, *table = nullptr, *out = nullptr;
        REQUIRE(driver.module_load(&module, pack_text.ptx) == 0);
        REQUIRE(driver.module_function(&function, module, pack_text.entry) == 0);
        REQUIRE(driver.host_alloc(&table, 4096, cuda_host_for_all | cuda_host_mapped) == 0);
        REQUIRE(driver.host_alloc(&out, 4096, cuda_host_for_all | cuda_host_mapped) == 0);
        std::memcpy(table, parts.data(), sizeof parts[0]);
        std::uint32_t count = 1;
        void* parameters[] = {&table, &out, &count};
        const auto stream = bench.gpu.make_stream();
        (void)driver.launch(function, 1, 1, 1, 256, 1, 1, 0, reinterpret_cast<void*>(stream), parameters, nullptr);
        bench.gpu.synchronize(stream);
        const int error = driver.stream_synchronize(reinterpret_cast<void*>(stream));
        (void)driver.module_unload(module);
        (void)driver.host_free(table);
        (void)driver.host_free(out);
        (void)driver.pop_context(&context);
        return error;
    };
    CHECK(fail([](PackPart&) {}) == 0);
    CHECK(fail([](PackPart& part) { part.source += Bench::bytes; }) == illegal_address);
    CHECK(fail([](PackPart& part) { part.target += 4096; }) == illegal_address);
    CHECK(fail([](PackPart& part) { part.source += 1; }) == misaligned);
    CHECK(fail([](PackPart& part) { part.target += 2; }) == misaligned);
}

TEST_CASE("a window's table is at most an eighth of the window: longer tables take several launches") {
    Bench bench;
    // Two dimensions more than a row of the table has levels for, of which each turn is 64 bytes: a row of 128.
    const StridedArray deep{2, {80, 80, 2, 2, 2, 2, 2}, {5120, 64, 2, 4, 8, 16, 32}, 0};
    const StridedArray spread{2, {40, 20, 3, 7, 3, 5, 2}, {26'000, 1300, 2, 6, 42, 126, 640}, 4};
    for (const StridedArray& from : {deep, spread}) {
        const Layout layout = from.layout();
        REQUIRE_FALSE(layout.is_shallow());
        for (const std::uint64_t begin : {std::uint64_t{0}, std::uint64_t{34}}) {
            CAPTURE(begin);
            const std::uint64_t length = from.bytes() - begin, launches = bench.gpu.module_launches(),
                                before = bench.gpu.host_bytes();
            std::memset(bench.memory.get(), 0xEE, 2 * mib);
            REQUIRE(bench.run({bench.copy(from, layout, begin, length, 64)}) == 0);
            CHECK(bench.gpu.module_launches() > launches + 1);
            CHECK(bench.gpu.host_bytes() - before <= std::max<std::uint64_t>(64 * kib, length / 8));
            CHECK(std::memcmp(bench.memory.get() + 64, from.packed(bench.gpu.inside()).data() + begin, length) == 0);
        }
    }
    // As short, but many: no row goes on with another.
    const StridedArray turned{2, {90, 110}, {2, 180}, 0};
    const Layout layout = turned.layout();
    std::vector<DeviceCopy> copies;
    for (std::uint64_t i = 0; i < 4000; ++i) copies.push_back(bench.copy(turned, layout, i * 4, 4, i * 8));
    const std::uint64_t before = bench.gpu.host_bytes();
    REQUIRE(bench.run(copies) == 0);
    CHECK(bench.gpu.host_bytes() == before);
    const std::vector<std::byte> expected = turned.packed(bench.gpu.inside());
    for (std::uint64_t i = 0; i < 4000; ++i)
        REQUIRE(std::memcmp(bench.memory.get() + i * 8, expected.data() + i * 4, 4) == 0);
}

TEST_CASE(
    "strided runs are gathered among others as the stream before left them, and memory for them can be reserved") {
    Bench bench;
    std::mt19937_64 random(5);
    std::vector<StridedArray> arrays;
    std::vector<Layout> layouts;
    for (int i = 0; i < 60; ++i)
        arrays.push_back(random_strided(random, 50 * kib)), layouts.push_back(arrays.back().layout());
    std::vector<DeviceRun> runs;
    std::vector<std::vector<std::byte>> expected;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        const std::uint64_t begin = random() % arrays[i].bytes(),
                            length = std::min<std::uint64_t>(1 + random() % 5000, arrays[i].bytes() - begin);
        runs.push_back(
            {bench.gpu.address() + arrays[i].origin, static_cast<std::uint32_t>(length), &layouts[i], begin});
        const std::vector<std::byte> packed = arrays[i].packed(bench.gpu.inside());
        const auto first = packed.begin() + static_cast<std::ptrdiff_t>(begin);
        expected.emplace_back(first, first + static_cast<std::ptrdiff_t>(length));
        runs.push_back({bench.gpu.address() + i, 77});
        expected.emplace_back(bench.gpu.inside() + i, bench.gpu.inside() + i + 77);
    }
    bench.device->reserve_launches({runs.size(), gathered_bytes(runs), 0, 0, runs.size() / 2 + 300}, 1);
    const std::uint64_t launches = bench.gpu.module_launches(), allocations = bench.gpu.host_allocations();
    std::shared_ptr<const GatheredRuns> gathered;
    REQUIRE(bench.device->gather(bench.gpu.current(), runs, gathered) == 0);
    bench.gpu.synchronize(bench.gpu.current());
    CHECK(bench.gpu.module_launches() == launches + 2);
    CHECK(bench.gpu.host_allocations() == allocations);
    std::uint64_t at = 0;
    for (std::size_t i = 0; i < runs.size(); ++i) {
        CAPTURE(i);
        CHECK(std::memcmp(gathered->bytes().data() + at, expected[i].data(), runs[i].bytes) == 0);
        at += round_up(runs[i].bytes, gathered_alignment_bytes);
    }
}

TEST_CASE("strided runs are digested in place like their row-major bytes, in memory that can be reserved") {
    Bench bench;
    std::mt19937_64 random(6);
    std::vector<StridedArray> arrays;
    std::vector<Layout> layouts;
    while (layouts.size() < 60) {
        StridedArray one = random_strided(random, 50 * kib);
        if (one.layout().is_shallow()) layouts.push_back(one.layout()), arrays.push_back(std::move(one));
    }
    std::vector<DeviceRun> runs;
    std::vector<std::uint64_t> expected;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        const std::uint64_t begin = random() % arrays[i].bytes(),
                            length = std::min<std::uint64_t>(random() % 9000, arrays[i].bytes() - begin);
        runs.push_back(
            {bench.gpu.address() + arrays[i].origin, static_cast<std::uint32_t>(length), &layouts[i], begin});
        expected.push_back(xxh3_64(arrays[i].packed(bench.gpu.inside()).data() + begin, length));
        runs.push_back({bench.gpu.address() + i, 777});
        expected.push_back(xxh3_64(bench.gpu.inside() + i, 777));
    }
    bench.device->reserve_launches({0, 0, runs.size(), runs.size(), 0, runs.size() / 2}, 1);
    const std::uint64_t launches = bench.gpu.module_launches(), allocations = bench.gpu.host_allocations();
    std::shared_ptr<const DeviceDigests> digested;
    REQUIRE(bench.device->digest(bench.gpu.current(), runs, digested) == 0);
    REQUIRE(digested);
    bench.gpu.launch(bench.gpu.current(), [&] { std::memset(bench.gpu.inside(), 0, Bench::bytes); });
    bench.gpu.synchronize(bench.gpu.current());
    CHECK(bench.gpu.module_launches() == launches + 3);  // one of them gathers what is short
    CHECK(bench.gpu.host_allocations() == allocations);
    for (std::size_t i = 0; i < runs.size(); ++i) {
        CAPTURE(i);
        CHECK(digested->digest(i) == expected[i]);
    }
}

TEST_CASE("a layout that no row of a table describes is not digested, and is told") {
    Bench bench;
    const StridedArray deep{2, {2, 3, 2, 3, 2, 3, 2}, {2, 24, 4, 72, 432, 8, 216}, 0}, turned{2, {30, 40}, {2, 60}, 0};
    const Layout layout = deep.layout(), other = turned.layout();
    CHECK_FALSE(layout.is_shallow());
    CHECK(other.is_shallow());
    std::shared_ptr<const DeviceDigests> digested;
    const std::vector<DeviceRun> runs{{bench.gpu.address(), static_cast<std::uint32_t>(deep.bytes()), &layout, 0}};
    CHECK(bench.device->digest(bench.gpu.current(), runs, digested) == cuda_invalid_value);
    CHECK(digested == nullptr);
}

TEST_CASE("without pinned memory strided runs are gathered one by one") {
    Bench bench;
    bench.gpu.limit_pinned(0);
    const StridedArray turned{4, {9, 11}, {4, 36}, 12};
    const Layout layout = turned.layout();
    std::shared_ptr<const GatheredRuns> gathered;
    const std::vector<DeviceRun> runs{
        {bench.gpu.address(), 100}, {bench.gpu.address() + 12, static_cast<std::uint32_t>(turned.bytes()), &layout, 0}};
    // Larger than any buffer that was made when there was pinned memory.
    bench.device->reserve_launches({1, 64 * mib}, 0);
    REQUIRE(bench.device->gather(bench.gpu.current(), runs, gathered) == 0);
    bench.gpu.synchronize(bench.gpu.current());
    CHECK(std::memcmp(gathered->bytes().data() + 128, turned.packed(bench.gpu.inside()).data(), turned.bytes()) == 0);
}

TEST_CASE("memory for the tables of as many windows as can be under way is made at once, and used again") {
    Bench bench;
    const StridedArray turned{4, {300, 500}, {4, 1200}, 100};
    const Layout layout = turned.layout();
    bench.device->reserve_launches({1, 64, 0, 0, 1}, 1);
    const std::uint64_t allocations = bench.gpu.host_allocations();
    CHECK(allocations >= cuda_batches_max);
    for (int round = 0; round < 3; ++round) {
        bench.gpu.hold(true);
        std::array<std::promise<int>, cuda_batches_max + 10> over;
        for (std::promise<int>& one : over) {
            auto batch = std::make_unique<CopyBatch>(nullptr, [&one](int error) { one.set_value(error); });
            batch->add(bench.copy(turned, layout, 0, turned.bytes(), 0));
            bench.device->submit(std::move(batch));
        }
        while (bench.gpu.pending_events() < cuda_batches_max) std::this_thread::yield();
        bench.gpu.hold(false);
        for (std::promise<int>& one : over) CHECK(one.get_future().get() == 0);
    }
    CHECK(bench.gpu.host_allocations() == allocations);
}

namespace {

/// A transposed matrix of a device's, several windows long, as the one row of a file.
struct TransposedJob {
    explicit TransposedJob(bool is_lazy)
        : device(std::make_shared<DelayedDevice>(from.bytes() + 100, microseconds(0))) {
        for (std::uint64_t i = 0; i < from.bytes() + 100; ++i)
            device->inside()[i] = static_cast<std::byte>(i * 31 + i / 4096);
        rows.layouts = {from.layout()};
        rows.devices = {device};
        rows.chunks = chunk_count(from.bytes());
        rows.rows = {{0, from.bytes(), device->address() + from.origin, 0, 0, 0, is_lazy, 0}};
        expected = from.packed(device->inside());
        if (is_lazy)
            for (std::uint64_t line = 0; line < rows.chunks * lines_per_chunk; ++line)
                std::memcpy(samples.emplace_back().data(), expected.data() + line_begin(from.bytes(), line, 0),
                            sizeof(Line));
        rows.samples = {samples};
    }

    StridedArray from{4, {2048, 1024}, {4, 8192}, 4};
    std::shared_ptr<DelayedDevice> device;
    std::vector<Line> samples;
    WriteExtents rows;
    std::vector<std::byte> expected;
};

}  // namespace

TEST_CASE(
    "a strided row of a device comes through the arena window by window, with the digests of its row-major bytes") {
    for (const bool is_lazy : {false, true}) {
        TransposedJob turned(is_lazy);
        IoFixture fixture(setups().front(), turned.expected.size(), nullptr, 2);
        const auto job = fixture.run(turned.rows);
        REQUIRE_FALSE(job->fault());
        CHECK(same(fixture.scratch.contents(), turned.expected));
        for (std::uint64_t chunk = 0; chunk < turned.rows.chunks; ++chunk)
            CHECK(job->digests()[chunk] == xxh3_64(turned.expected.data() + chunk * mib, mib));
        CHECK(turned.device->packed_copies() == job->windows().size());
        CHECK(turned.device->copied_bytes() == turned.expected.size());
        CHECK(turned.device->pageable_copies() == 0);
        CHECK(fixture.arena->touched_bytes() <= 2 * huge_page_bytes);
        if (is_lazy) CHECK(job->detector().sampled_bytes() == turned.expected.size());
    }
}

TEST_CASE("a change of strided memory before its copy is found where its samples are") {
    TransposedJob turned(true);
    const std::uint64_t begin = line_begin(turned.from.bytes(), 13, 0) / 4;
    turned.device->inside()[turned.from.origin + begin % 1024 * 8192 + begin / 1024 * 4] ^= std::byte{1};
    IoFixture fixture(setups().front(), turned.expected.size());
    const auto job = fixture.run(turned.rows);
    REQUIRE(job->fault());
    CHECK(job->fault()->operation == "capture");
    CHECK(job->fault()->offset == begin * 4);
}

TEST_CASE("digests find a change of any byte of strided memory before its copy, and no other change") {
    for (const std::int64_t place : {-1, 0, 5'000'001, 8'388'607}) {
        CAPTURE(place);
        TransposedJob turned(true);
        std::vector<DeviceRun> runs;
        for (std::uint64_t at = 0; at < turned.from.bytes(); at += mib)
            runs.push_back(
                {turned.rows.rows[0].address, static_cast<std::uint32_t>(mib), turned.rows.layouts.data(), at});
        std::shared_ptr<const DeviceDigests> digested;
        REQUIRE(turned.device->digest(turned.device->current(), runs, digested) == 0);
        REQUIRE(digested);
        turned.device->settle();
        turned.rows.digested = {digested.get()};
        turned.samples.clear();
        turned.rows.samples = {turned.samples};
        if (place >= 0) turned.device->inside()[turned.from.origin + static_cast<std::uint64_t>(place)] ^= std::byte{1};
        IoFixture fixture(setups().front(), turned.expected.size());
        const auto job = fixture.run(turned.rows);
        CHECK(job->detector().digested_bytes() == turned.expected.size());
        CHECK(job->detector().sampled_bytes() == 0);
        CHECK(job->fault().has_value() == (place >= 0));
        if (job->fault()) CHECK(job->fault()->operation == "capture");
    }
}

TEST_CASE("a job with strided memory of a device that fails or is cancelled ends, and returns every block") {
    for (const bool is_cancelled : {false, true}) {
        TransposedJob turned(true);
        IoFixture fixture(setups().front(), turned.expected.size(), nullptr, 2);
        is_cancelled ? turned.device->hold(true) : turned.device->fail_after(2);
        const auto job = fixture.start(turned.rows);
        if (is_cancelled) {
            while (turned.device->pending_events() == 0) REQUIRE_FALSE(job->wait_queued(0.001));
            job->cancel();
            CHECK_FALSE(job->wait(0.02));
            turned.device->hold(false);
        }
        REQUIRE(job->wait(forever_s));
        CHECK(job->fault().has_value() == !is_cancelled);
        CHECK(fixture.arena->free_bytes() == fixture.arena->touched_bytes());
    }
}

}  // namespace flowstone
