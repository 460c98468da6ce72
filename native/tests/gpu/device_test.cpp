// Rows in device memory: only the device touches them, in either direction.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "tests/io_fixture.h"
#include "tests/simulated/delayed_device.h"

namespace flowstone {
namespace {

using std::chrono::microseconds;

/// A sample of which every other row, or each, lies on a device.
struct Far {
    std::shared_ptr<DelayedDevice> device;
    std::vector<std::uint64_t> place;  // per row, in the device's memory; or nowhere
    std::vector<Line> samples;
    std::shared_ptr<const DeviceDigests> digested;
    WriteExtents rows;

    static constexpr std::uint64_t nowhere = ~std::uint64_t{0};

    explicit Far(const Sample& sample, microseconds delay = microseconds(0), std::size_t every = 2)
        : place(sample.rows.rows.size(), nowhere), rows(sample.rows) {
        std::uint64_t bytes = 0;
        for (std::size_t i = 0; i < rows.rows.size(); ++i)
            if (i % every == 0) place[i] = bytes, bytes += memory_bytes(rows.rows[i]) + i % 7;
        device = std::make_shared<DelayedDevice>(bytes + 1, delay);
        rows.devices = {device};
        rows.samples = {{}};
        for (std::size_t i = 0; i < rows.rows.size(); ++i) {
            if (place[i] == nowhere) continue;
            WriteExtent& row = rows.rows[i];
            std::memcpy(device->inside() + place[i], row.source(), memory_bytes(row));
            row.address = device->address() + place[i];
            row.device = 0;
        }
    }

    /// Of a strided row every third byte is one of its own (io_fixture.cpp).
    static std::uint64_t stride(const WriteExtent& row) { return row.layout == contiguous ? 1 : 3; }
    static std::uint64_t memory_bytes(const WriteExtent& row) { return row.length * stride(row); }

    /// Let all rows be captured lazily; the device's are sampled now, unless it digests them.
    void be_lazy() {
        samples.clear();
        for (std::size_t i = 0; i < rows.rows.size(); ++i) {
            WriteExtent& row = rows.rows[i];
            row.lazy = true;
            if (row.device == on_host || digested) continue;
            for (std::uint64_t line = 0; line < chunk_count(row.length) * lines_per_chunk; ++line) {
                const std::uint64_t begin = line_begin(row.length, line, row.seed);
                const std::uint64_t bytes = std::min<std::uint64_t>(sizeof(Line), row.length - begin);
                Line& sampled = samples.emplace_back();
                for (std::uint64_t at = 0; at < bytes; ++at)
                    sampled[at] = device->inside()[place[i] + (begin + at) * stride(row)];
            }
        }
        rows.samples = {samples};
    }

    /// The same, and digested by the device, behind what its current stream holds.
    void be_digested() {
        std::vector<DeviceRun> runs;
        for (const WriteExtent& row : rows.rows)
            for (std::uint64_t at = 0; row.device != on_host && at < row.length; at += chunk_bytes) {
                const auto bytes = static_cast<std::uint32_t>(std::min(chunk_bytes, row.length - at));
                if (row.layout == contiguous)
                    runs.push_back({row.address + at, bytes});
                else
                    runs.push_back({row.address, bytes, &rows.layouts[static_cast<std::size_t>(row.layout)], at});
            }
        REQUIRE(device->digest(device->current(), runs, digested) == 0);
        REQUIRE(digested);
        REQUIRE(device->follow(device->current()) == 0);
        rows.digested = {digested.get()};
        be_lazy();
    }
};

std::shared_ptr<WriteJob> start(IoFixture& fixture, const WriteExtents& rows, const WriteOptions& options = {}) {
    return fixture.engine.write(fixture.arena, {{fixture.scratch.file(), fixture.file_bytes}},
                                std::make_shared<WriteExtents>(rows), options);
}

}  // namespace

TEST_CASE("lines of a row lie in its quarters, whole and in order") {
    for (const std::uint64_t bytes : {std::uint64_t{64}, 65 * kib, mib, mib + 1, 3 * mib + 100, 7 * mib + 64})
        for (std::uint64_t line = 0; line < chunk_count(bytes) * lines_per_chunk; ++line)
            for (std::uint64_t seed = 0; seed < 50; ++seed) {
                CAPTURE(bytes);
                CAPTURE(line);
                CAPTURE(seed);
                const std::uint64_t begin = line_begin(bytes, line, seed);
                CHECK((begin % sizeof(Line) == 0 || begin + sizeof(Line) == bytes));
                CHECK(begin + sizeof(Line) <= bytes);
                const std::uint64_t quarter = chunk_bytes / lines_per_chunk;
                if ((line + 1) * quarter <= bytes) CHECK(begin / quarter == line);
            }
    CHECK(line_begin(0, 0, 7) == 0);
    CHECK(line_begin(63, 0, 7) == 0);
}

TEST_CASE("every byte of a row is looked at by some seed") {
    const std::uint64_t bytes =
        256 * kib + 1000;  // the last part has 16 places, the last of them not a whole line further
    std::vector<bool> seen(bytes, false);
    for (std::uint64_t seed = 0; seed < 60'000; ++seed)
        for (const std::uint64_t line : {0, 1}) {
            const std::uint64_t begin = line_begin(bytes, line, seed);
            std::fill_n(seen.begin() + static_cast<std::ptrdiff_t>(begin), sizeof(Line), true);
        }
    CHECK(std::all_of(seen.begin(), seen.end(), [](bool one) { return one; }));
}

TEST_CASE("rows on a device come back, among rows on the host") {
    for (const Setup& setup : setups())
        for (std::uint64_t seed = 0; seed < 8; ++seed) {
            CAPTURE(setup.backend);
            CAPTURE(setup.direct);
            CAPTURE(seed);
            const Sample sample = random_sample(seed, 24);
            Far far(sample, microseconds(seed % 2 ? 100 : 0));
            if (seed % 4 > 1) far.be_lazy();
            IoFixture fixture(setup, sample.file_bytes, nullptr, seed % 3 ? 3 : 20);
            const auto job = start(fixture, far.rows);
            REQUIRE(job->wait_early(forever_s));
            if (seed > 5) job->expedite();
            REQUIRE(job->wait(forever_s));
            REQUIRE_FALSE(job->fault());
            REQUIRE(same(fixture.scratch.contents(), sample.expected));

            std::vector<Memory> targets;
            ReadExtents back = read_back(sample, job->digests(), targets, seed);
            std::vector<std::byte*> inside(back.rows.size(), nullptr);
            std::uint64_t bytes = 1;
            for (const ReadExtent& row : back.rows) bytes += row.length;
            const auto device = std::make_shared<DelayedDevice>(bytes, microseconds(10));
            std::uint64_t at = 1;
            back.devices = {device};
            for (std::size_t i = 0; i < back.rows.size(); ++i) {
                ReadExtent& row = back.rows[i];
                if (row.layout != contiguous || i % 3 == 0) continue;
                inside[i] = device->inside() + at;
                row.address = device->address() + at;
                row.device = 0;
                at += row.length;
            }
            const auto load = fixture.run(back);
            REQUIRE_FALSE(load->fault());
            for (std::size_t i = 0; i < back.rows.size(); ++i)
                if (inside[i] != nullptr && !sample.stored[i].empty())
                    REQUIRE(std::memcmp(inside[i], sample.stored[i].data(), sample.stored[i].size()) == 0);
        }
}

namespace {

/// What a plain sample's row is read into: `device` memory in one run, or in a layout.
ReadExtents onto(const std::shared_ptr<DelayedDevice>& device, const Sample& sample,
                 const std::vector<std::uint64_t>& digests, std::vector<Layout> layouts = {}) {
    std::vector<Memory> targets;
    ReadExtents back = read_back(sample, digests, targets, 0);
    back.devices = {device};
    back.rows[0].address = device->address();
    back.rows[0].device = 0;
    if (!layouts.empty()) back.rows[0].layout = 0;
    back.layouts = std::move(layouts);
    return back;
}

}  // namespace

TEST_CASE("each run of verified chunks goes to a device in one copy") {
    const Sample sample = plain_sample(8 * mib - 100);
    IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 4);
    const auto written = fixture.run(sample.rows);
    const auto device = std::make_shared<DelayedDevice>(8 * mib, microseconds(0));
    const auto read = [&](std::uint64_t request_bytes) {
        const auto load = fixture.engine.read(fixture.arena, {fixture.scratch.file()},
                                              std::make_shared<ReadExtents>(onto(device, sample, written->digests())),
                                              {.request_bytes = request_bytes});
        REQUIRE(load->wait(forever_s));
        REQUIRE_FALSE(load->fault());
        return load->requests();
    };
    CHECK(device->copies() == 0);
    const std::uint64_t requests = read(2 * mib);
    CHECK(requests < 8);
    CHECK(device->copies() == requests);
    CHECK(std::memcmp(device->inside(), sample.stored[0].data(), sample.stored[0].size()) == 0);
}

TEST_CASE("columns and parts of a matrix go straight to their place on a device, a band of rows in each copy") {
    constexpr std::uint64_t rows = 3001, columns = 700, item = 4;
    struct Part {
        std::uint64_t row, column, rows, columns;
        std::int64_t pitch;  // of the target, in bytes; may be as long as the part is wide
        std::uint64_t copies_max;
    };
    const Sample sample = plain_sample(rows * columns * item);
    IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 4);
    const auto written = fixture.run(sample.rows);
    for (const Part& part :
         {Part{1000, 0, 1500, 700, 2800, 12}, Part{0, 300, 3001, 200, 800, 40}, Part{7, 1, 2900, 699, 4096, 40},
          Part{0, 0, 3001, 700, 3072, 40}, Part{500, 200, 2, 1, 4, 4}}) {
        CAPTURE(part.row);
        CAPTURE(part.columns);
        const std::array<std::uint64_t, 2> extent{rows, columns}, offset{part.row, part.column},
            shape{part.rows, part.columns};
        const std::array<std::int64_t, 2> strides{part.pitch, item};
        const Layout layout = Layout::box(item, extent, offset, shape, strides);
        const std::uint64_t bytes = static_cast<std::uint64_t>(part.pitch) * part.rows;
        const auto device = std::make_shared<DelayedDevice>(bytes, microseconds(0));
        std::memset(device->inside(), 0x77, bytes);
        std::vector<std::byte> expected(bytes, std::byte{0x77});
        layout.scatter(0, layout.packed_bytes(), sample.stored[0].data(), expected.data());
        fixture.arena =
            std::make_shared<Arena>(4 * huge_page_bytes,
                                    huge_page_bytes);  // what is pinned for one simulated GPU is for that alone
        const auto load = fixture.run(onto(device, sample, written->digests(), {layout}));
        REQUIRE_FALSE(load->fault());
        CHECK(std::memcmp(device->inside(), expected.data(), bytes) == 0);
        CHECK(device->copies() <= part.copies_max);
        CHECK(device->pageable_copies() == 0);
        CHECK((device->copies_of_rows() != 0) == (part.pitch != 2800));
    }
}

TEST_CASE("rows of a device that lie backwards are copied one by one") {
    const Sample sample = plain_sample(64 * 1024);
    IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 4);
    const auto written = fixture.run(sample.rows);
    const std::array<std::uint64_t, 2> shape{16, 1024}, origin{0, 0};
    for (const std::int64_t pitch : {std::int64_t{-4096}, std::int64_t{5000}}) {
        const std::array<std::int64_t, 2> strides{pitch, 4};
        const auto device = std::make_shared<DelayedDevice>(128 * 1024, microseconds(0));
        std::vector<std::byte> expected(128 * 1024, std::byte{0});
        std::memset(device->inside(), 0, expected.size());
        const std::uint64_t start = pitch < 0 ? 15 * 4096 : 0;
        const Layout layout = Layout::box(4, shape, origin, shape, strides);
        layout.scatter(0, layout.packed_bytes(), sample.stored[0].data(), expected.data() + start);
        ReadExtents back = onto(device, sample, written->digests(), {layout});
        back.rows[0].address += start;
        REQUIRE_FALSE(fixture.run(back)->fault());
        CHECK(std::memcmp(device->inside(), expected.data(), expected.size()) == 0);
        CHECK(device->copies() == (pitch < 0 ? 16 : 1));
    }
}

TEST_CASE("a fence need not wait for copies that are queued") {
    const Sample sample = plain_sample(5 * mib + 1000);
    Far far(sample);
    far.be_lazy();
    IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 8);
    fixture.arena->grow(8 * huge_page_bytes);
    far.device->hold(true);
    const auto job = start(fixture, far.rows);
    job->expedite();
    REQUIRE(job->wait_queued(forever_s));
    CHECK_FALSE(job->wait_captured(0));
    CHECK(far.device->copies() == 0);
    // What the device does from here on comes after those copies.
    const std::uintptr_t stream = far.device->current();
    REQUIRE(far.device->lead(stream) == 0);
    far.device->launch(stream, [&] { std::memset(far.device->inside(), 0, 5 * mib); });
    far.device->hold(false);
    REQUIRE(job->wait(forever_s));
    REQUIRE_FALSE(job->fault());
    CHECK(same(fixture.scratch.contents(), sample.expected));
}

TEST_CASE("while the arena is full, a fence waits for copies that are not queued") {
    const Sample sample = plain_sample(9 * mib);
    Far far(sample);
    far.be_lazy();
    IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 2);
    far.device->hold(true);
    const auto job = start(fixture, far.rows);
    job->expedite();
    CHECK_FALSE(job->wait_queued(0.05));
    far.device->hold(false);
    REQUIRE(job->wait_queued(forever_s));
    REQUIRE(job->wait(forever_s));
    CHECK(same(fixture.scratch.contents(), sample.expected));
}

TEST_CASE("early rows on a device are queued, not waited for") {
    const Sample sample = plain_sample(mib);
    Far far(sample);
    IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 2);
    far.device->hold(true);
    const auto job = start(fixture, far.rows);
    REQUIRE(job->wait_early(forever_s));
    CHECK_FALSE(job->wait_captured(0));
    far.device->hold(false);
    REQUIRE(job->wait(forever_s));
    CHECK(same(fixture.scratch.contents(), sample.expected));
}

TEST_CASE("a change on the device that came before its copy is found") {
    for (const std::uint64_t length : {2 * mib, 2 * mib + 17}) {
        const Sample sample = plain_sample(length);
        Far far(sample);
        far.be_lazy();
        for (std::uint64_t i = 0; i < length; ++i) far.device->inside()[i] ^= std::byte{1};
        IoFixture fixture(setups().front(), sample.file_bytes);
        const auto job = fixture.run(far.rows);
        REQUIRE(job->fault());
        CHECK(job->fault()->operation == "capture");
        CHECK(job->fault()->length <= sizeof(Line));
    }
}

TEST_CASE(
    "a write of one byte on the device before its copy is found by digests wherever it is, by samples almost nowhere") {
    const std::uint64_t length = 3 * mib + 100;  // the end is gathered
    const Sample sample = plain_sample(length);
    std::vector<std::uint64_t> places{
        0, 1, 63, 1023 * kib, mib - 1, mib, mib + 511, 2 * mib - 64, 2 * mib - 1, 3 * mib - 1, 3 * mib, length - 1};
    std::size_t by_samples = 0;
    for (const std::uint64_t place : places)
        for (const bool is_digested : {true, false}) {
            CAPTURE(place);
            Far far(sample);
            far.be_lazy();
            if (is_digested) far.be_digested();
            far.device->settle();  // the processor plays what comes behind
            far.device->inside()[place] ^= std::byte{0x10};
            IoFixture fixture(setups().front(), sample.file_bytes);
            const auto job = fixture.run(far.rows);
            if (!is_digested) {
                by_samples += job->fault() ? 1 : 0;
                continue;
            }
            CHECK(job->detector().digested_bytes() == length);
            CHECK(job->detector().sampled_bytes() == 0);
            REQUIRE(job->fault());
            CHECK(job->fault()->operation == "capture");
            CHECK(job->fault()->offset == place / mib * mib);
            CHECK(job->fault()->length == std::min(mib, length - place / mib * mib));
        }
    CHECK(by_samples <= 1 + 1);  // the end of 100 bytes is in a sample, by more than half
}

TEST_CASE("device digests find every changed byte, and nothing else, in rows of all kinds and windows that cut them") {
    for (std::uint64_t seed = 0; seed < 24; ++seed) {
        CAPTURE(seed);
        const Sample sample = random_sample(seed, 24);
        Far far(sample, microseconds(0), 1 + seed % 2);
        far.be_lazy();
        far.be_digested();
        far.device->settle();
        std::mt19937_64 chance(seed);
        const bool is_changed = seed % 3 != 0;
        std::size_t changed = far.place.size();
        if (is_changed) {
            do changed = chance() % far.place.size();
            while (far.place[changed] == Far::nowhere || far.rows.rows[changed].length == 0);
            const WriteExtent& row = far.rows.rows[changed];
            far.device->inside()[far.place[changed] + chance() % row.length * Far::stride(row)] ^=
                static_cast<std::byte>(1U << chance() % 8);
        }
        IoFixture fixture(setups().front(), sample.file_bytes, nullptr, seed % 5 ? 3 : 20);
        const auto job = fixture.run(far.rows);
        REQUIRE(job->fault().has_value() == is_changed);
        if (!is_changed) {
            CHECK(same(fixture.scratch.contents(), sample.expected));
            continue;
        }
        const WriteExtent& row = far.rows.rows[changed];
        CHECK(job->fault()->offset >= row.offset);
        CHECK(job->fault()->offset + job->fault()->length <= row.end());
    }
}

TEST_CASE("digests that the device has not made yet are waited for, and those of a job that is given up harm nothing") {
    const Sample sample = plain_sample(2 * mib + 5);
    for (const bool is_given_up : {false, true}) {
        Far far(sample);
        far.be_lazy();
        std::atomic<bool> go{false};
        const std::uintptr_t stream = far.device->current();
        far.device->launch(stream, [&] {
            while (!go) std::this_thread::yield();
        });
        far.be_digested();
        IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 4);
        const auto job = start(fixture, far.rows);
        CHECK_FALSE(job->wait_captured(0.02));
        if (is_given_up) job->cancel();
        go = true;
        REQUIRE(job->wait(forever_s));
        CHECK_FALSE(job->fault());
        if (!is_given_up) CHECK(same(fixture.scratch.contents(), sample.expected));
    }
}

TEST_CASE("a device that fails ends the job, with its name, and gives every block back") {
    for (std::uint64_t copies = 0; copies < 8; ++copies) {
        CAPTURE(copies);
        const Sample sample = plain_sample(17 * mib);
        Far far(sample, microseconds(50));
        IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 3);
        far.device->fail_after(copies);
        const auto job = fixture.run(far.rows);
        REQUIRE(job->fault());
        CHECK(job->fault()->operation == "copy from or to delayed:0 (CUDA_ERROR_LAUNCH_FAILED)");
        CHECK(job->fault()->error == EIO);
        CHECK(fixture.arena->free_bytes() == fixture.arena->touched_bytes());

        // Into a device that fails, too.
        IoFixture other(setups().front(), sample.file_bytes, nullptr, 3);
        const auto written = other.run(sample.rows);
        std::vector<Memory> targets;
        ReadExtents back = read_back(sample, written->digests(), targets, 0);
        const auto device = std::make_shared<DelayedDevice>(17 * mib, microseconds(50));
        device->fail_after(copies);
        back.devices = {device};
        back.rows[0].address = device->address();
        back.rows[0].device = 0;
        const auto load = other.run(back);
        REQUIRE(load->fault());
        CHECK(load->fault()->error == EIO);
        CHECK(load->touched()[0]);
        CHECK(other.arena->free_bytes() == other.arena->touched_bytes());
    }
}

TEST_CASE("blocks are pinned for the device until the arena closes") {
    const Sample sample = plain_sample(5 * mib);
    Far far(sample);
    {
        IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 2);
        REQUIRE_FALSE(fixture.run(far.rows)->fault());
        CHECK(far.device->pinned_bytes() > 0);
        CHECK(far.device->pinned_bytes() <= 2 * huge_page_bytes);
        REQUIRE_FALSE(fixture.run(far.rows)->fault());
        fixture.arena->close();
        CHECK(far.device->pinned_bytes() == 0);
    }
}

TEST_CASE("rows in slots are copied once, in windows as long as a block, and written in requests") {
    constexpr std::uint64_t block = 8 * mib, request = 2 * mib;
    const std::uint64_t lengths[] = {20 * mib, 3 * mib + 17, 64 * kib, 9 * mib + 4096, 100 * kib};
    Sample sample;
    for (const std::uint64_t length : lengths) {
        Sample one = plain_sample(length);
        WriteExtent row = one.rows.rows[0];
        row.offset = sample.file_bytes;
        row.chunk = sample.rows.chunks;
        sample.rows.rows.push_back(row);
        sample.rows.chunks += chunk_count(length);
        sample.memory.push_back(std::move(one.memory[0]));
        sample.expected.insert(sample.expected.end(), one.expected.begin(), one.expected.end());
        sample.expected.resize(sample.expected.size() + block_alignment_bytes,
                               std::byte{0xEE});  // of the slot, not written
        sample.file_bytes = sample.expected.size();
    }
    Far far(sample, microseconds(0), 1);
    far.be_lazy();
    ScratchFile scratch(false, sample.file_bytes);
    const auto arena = std::make_shared<Arena>(4 * block, block);
    Engine engine({"posix", 4, request, 2, nullptr});
    const auto job =
        engine.write(arena, {{scratch.file(), sample.file_bytes}}, std::make_shared<WriteExtents>(far.rows), {});
    REQUIRE(job->wait(forever_s));
    REQUIRE_FALSE(job->fault());
    CHECK(same(scratch.contents(), sample.expected));
    std::uint64_t bytes = 0;
    for (const std::uint64_t length : lengths) bytes += length;
    CHECK(far.device->copied_bytes() == bytes);
    CHECK(job->windows().size() == 5);  // 33 MiB
    CHECK(job->requests() >= sample.file_bytes / request);
}

TEST_CASE("rows that the device gathers are captured once they are there, and change afterwards as they like") {
    const Sample sample = random_sample(3, 40);
    Far far(sample, microseconds(100), 1);
    std::vector<DeviceRun> runs;
    for (WriteExtent& row : far.rows.rows)
        if (row.device != on_host && row.length < 64 * kib)
            runs.push_back(
                {row.address, static_cast<std::uint32_t>(row.length),
                 row.layout == contiguous ? nullptr : &far.rows.layouts[static_cast<std::size_t>(row.layout)], 0});
    REQUIRE(runs.size() > 10);
    const std::uintptr_t stream = far.device->current();
    std::atomic<bool> go{false};
    far.device->launch(stream, [&] {
        while (!go) std::this_thread::yield();
    });
    std::shared_ptr<const GatheredRuns> gathered;
    REQUIRE(far.device->gather(stream, runs, gathered) == 0);
    std::uint64_t at = reinterpret_cast<std::uint64_t>(gathered->bytes().data());
    for (WriteExtent& row : far.rows.rows) {
        if (row.device == on_host || row.length >= 64 * kib) continue;
        row.gathered = true;
        row.layout = contiguous;
        row.address = at;
        at += round_up(row.length, gathered_alignment_bytes);
    }
    REQUIRE(far.device->follow(stream) == 0);
    IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 40);
    fixture.arena->grow(40 * huge_page_bytes);
    const auto job = start(fixture, far.rows);
    REQUIRE(job->wait_early(forever_s));
    CHECK_FALSE(job->wait_captured(0.02));
    go = true;
    REQUIRE(job->wait(forever_s));
    REQUIRE_FALSE(job->fault());
    CHECK(same(fixture.scratch.contents(), sample.expected));
    far.rows.rows[0].gathered = true;
    far.rows.rows[0].lazy = true;
    CHECK_THROWS_AS((void)fixture.start(far.rows), std::invalid_argument);
}

TEST_CASE("a capture pins no block by itself") {
    const Sample sample = plain_sample(60 * mib);
    Far far(sample);
    IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 32);
    fixture.arena->grow(32 * huge_page_bytes);
    while (!fixture.arena->wait_grown(1)) {}
    REQUIRE_FALSE(fixture.run(far.rows)->fault());
    CHECK(far.device->pins() == 1);
    CHECK(far.device->pins_beside_copies() == 0);
    CHECK(far.device->pageable_copies() == 0);
}

TEST_CASE("cancelled while the device holds its copies, a job ends when they do") {
    const Sample sample = plain_sample(9 * mib);
    Far far(sample);
    IoFixture fixture(setups().front(), sample.file_bytes, nullptr, 2);
    far.device->hold(true);
    const auto job = start(fixture, far.rows);
    while (far.device->pending_events() == 0) REQUIRE_FALSE(job->wait_queued(0.001));
    job->cancel();
    CHECK_FALSE(job->wait(0.02));  // the blocks are the device's
    far.device->hold(false);
    REQUIRE(job->wait(forever_s));
    CHECK(job->cancelled());
    CHECK(fixture.arena->free_bytes() == fixture.arena->touched_bytes());
}

TEST_CASE("rows that name no device, or have not the samples and digests that they need, are refused") {
    const Sample sample = plain_sample(mib);
    Far far(sample);
    IoFixture fixture(setups().front(), sample.file_bytes);
    WriteExtents rows = far.rows;
    rows.rows[0].device = 1;
    CHECK_THROWS_AS((void)fixture.start(rows), std::invalid_argument);
    rows = far.rows;
    rows.rows[0].lazy = true;
    CHECK_THROWS_AS((void)fixture.start(rows), std::invalid_argument);  // without samples
    far.be_lazy();
    far.be_digested();
    rows = far.rows;
    rows.rows[0].lazy = false;
    CHECK_THROWS_AS((void)fixture.start(rows), std::invalid_argument);  // with a digest too many
}

TEST_CASE("where there is no CUDA driver, asking for its device says so") {
    try {
        (void)make_cuda_device(cuda_driver(), 0, "cuda:0");
        MESSAGE("this machine has CUDA: tests/stage/test_cuda_capture.py uses it");
    } catch (const std::system_error& error) { CHECK(error.code().value() == ENOSYS); }
}

}  // namespace flowstone
