// Plans are pure: which ranges, which windows, which way.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>

#include "bounds.h"
#include "io/read_plan.h"
#include "io/window_order.h"
#include "io/write_plan.h"

namespace flowstone {
namespace {

constexpr std::uint64_t kib = 1024;
constexpr std::uint64_t mib = 1024 * kib;
constexpr std::uint64_t page = block_alignment_bytes;

WriteExtent write_row(std::uint64_t offset, std::uint64_t length, std::uint64_t address = 0x10000000,
                      std::uint32_t file = 0) {
    return {offset, length, address, no_digest, contiguous, file};
}

ReadExtent read_row(std::uint64_t offset, std::uint64_t length, std::uint64_t address, std::uint32_t file = 0) {
    return {offset, length, address, 0, 0, chunk_count(length), contiguous, file};
}

WriteExtents random_extents(std::mt19937_64& random) {
    WriteExtents rows;
    for (std::uint32_t file = 0; file < 3; ++file) {
        std::uint64_t at = random() % 20000;
        for (std::uint64_t i = random() % 40; i > 0; --i) {
            const std::uint64_t length = random() % 4 == 0 ? random() % (3 * mib) : random() % 9000;
            rows.rows.push_back(write_row(at, length, 0x10000000 + random() % 9000, file));
            at += length + (random() % 3 == 0 ? random() % 90000 : random() % 200 * (random() % 2));
        }
    }
    return rows;
}

using Blocks = std::set<std::pair<std::uint32_t, std::uint64_t>>;

Blocks touched_blocks(const WriteExtents& rows) {
    Blocks blocks;
    for (const WriteExtent& row : rows.rows)
        for (std::uint64_t at = block_floor(row.offset); row.length != 0 && at < row.end(); at += page)
            blocks.insert({row.file, at});
    return blocks;
}

}  // namespace

TEST_CASE("runs without gaps are exactly the touched blocks, each once") {
    std::mt19937_64 random(3);
    for (int round = 0; round < 200; ++round) {
        const WriteExtents rows = random_extents(random);
        const std::uint64_t request_bytes = page << (random() % 10);
        Blocks written;
        for (const WriteWindow& window : plan_windows(rows, request_bytes)) {
            REQUIRE(window.end - window.begin <= request_bytes);
            for (const WriteRun& run : split_runs(rows, window, 0)) {
                REQUIRE(run.begin >= window.begin);
                REQUIRE(run.end <= window.end);
                for (std::uint64_t at = run.begin; at < run.end; at += page)
                    REQUIRE(written.insert({run.file, at}).second);
            }
        }
        REQUIRE(written == touched_blocks(rows));
    }
}

TEST_CASE("with devices, a window ends with a chunk, or leaves room for the rest of the one that it cuts") {
    std::mt19937_64 random(11);
    std::size_t cuts = 0, windows = 0;
    for (int round = 0; round < 400; ++round) {
        WriteExtents rows = random_extents(random);
        rows.devices = {nullptr};
        const bool is_aligned = round % 2 == 0;
        std::uint64_t at = 0;
        for (WriteExtent& row : rows.rows) {
            if (is_aligned) {  // as the slots of rows on devices are
                at = &row == rows.rows.data() || (&row)[-1].file != row.file ? 0 : at;
                row.offset = at;
                at = block_ceil(row.end()) + page * (random() % 3);
            }
            row.chunk = rows.chunks;
            rows.chunks += chunk_count(row.length);
        }
        const std::uint64_t window_bytes = 2 * mib + page * (random() % 700);
        Blocks written;
        for (const WriteWindow& window : plan_windows(rows, window_bytes)) {
            ++windows;
            REQUIRE(window.end > window.begin);
            REQUIRE(window.end - window.begin <= window_bytes);
            for (const WriteRun& run : split_runs(rows, window, 0))
                for (std::uint64_t block = run.begin; block < run.end; block += page)
                    REQUIRE(written.insert({run.file, block}).second);
            for (const WriteExtent& row : rows.rows) {
                if (row.file != window.file || row.offset >= window.end || row.end() <= window.end) continue;
                if ((window.end - row.offset) % chunk_bytes == 0) continue;
                ++cuts;
                REQUIRE_FALSE(is_aligned);
                REQUIRE(window.end - window.begin <= window_bytes - chunk_bytes);
            }
        }
        REQUIRE(written == touched_blocks(rows));
    }
    CHECK(cuts > 50);
    CHECK(cuts < windows / 2);
}

TEST_CASE("gap_bytes joins runs across short gaps only") {
    const WriteExtents rows{{write_row(0, 100), write_row(3 * page, 100), write_row(9 * page, 100)}, {}, 0};
    const WriteWindow window = plan_windows(rows, mib).at(0);
    CHECK(split_runs(rows, window, 0).size() == 3);
    CHECK(split_runs(rows, window, 2 * page).size() == 2);
    CHECK(split_runs(rows, window, 5 * page).size() == 1);
}

TEST_CASE("every wanted chunk lies whole in one read window, and little else is read") {
    std::mt19937_64 random(4);
    for (int round = 0; round < 100; ++round) {
        ReadExtents rows;
        for (std::uint64_t i = 0; i < 30; ++i) {
            const std::uint64_t length = random() % 3 == 0 ? random() % (20 * mib) : random() % 9000;
            ReadExtent row =
                read_row(random() % (200 * mib), length, random() % 2 ? 0x10000000 + random() % 9000 : verify_only,
                         static_cast<std::uint32_t>(random() % 2));
            row.last = random() % (row.last + 1);
            row.first = row.last == 0 ? 0 : random() % row.last;
            rows.rows.push_back(row);
        }
        const std::uint64_t request_bytes = mib << (random() % 4);
        const ReadPlan plan = plan_reads(rows, request_bytes, 8 * mib);
        std::size_t next = 0;
        for (const ReadWindow& window : plan.windows) {
            REQUIRE(window.first == next);
            REQUIRE(window.end - window.begin <= std::max(request_bytes, chunk_bytes + 2 * page));
            for (std::size_t i = window.first; i < window.last; ++i) {
                REQUIRE(plan.chunks[i].file == window.file);
                REQUIRE(plan.chunks[i].begin >= window.begin);
                REQUIRE(plan.chunks[i].end() <= window.needed_end);
            }
            REQUIRE(window.needed_end <= window.end);
            next = window.last;
        }
        REQUIRE(next == plan.chunks.size());
    }
}

TEST_CASE("chunks are asked for where they are stored, shorter and in another order, and nothing is read in place") {
    ReadExtents rows{
        {read_row(0, 5 * mib, 0x10000000), read_row(8 * mib, 2 * mib, 0x20000000)}, {}, std::vector<std::uint64_t>(7)};
    rows.rows[1].chunk = 5;
    for (std::uint64_t i = 0; i < 7; ++i)
        rows.stored.push_back({(6 - i) * 300 * kib, static_cast<std::uint32_t>(200 * kib + i), 3});
    const ReadPlan plan = plan_reads(rows, 8 * mib, 8 * mib);
    REQUIRE(plan.chunks.size() == 7);
    for (std::uint64_t at = 0; at < 7; ++at) {
        const WantedChunk& chunk = plan.chunks[at];
        const std::uint64_t i = 6 - at;
        CHECK(chunk.begin == at * 300 * kib);
        CHECK(chunk.length == 200 * kib + i);
        CHECK(chunk.file == 3);
        CHECK(chunk.row == (i < 5 ? 0 : 1));
        CHECK(chunk.logical_begin() == (i < 5 ? i : i - 5) * mib);
    }
    for (const ReadWindow& window : plan.windows) CHECK_FALSE(window.direct);
    CHECK(plan_reads({rows.rows, {}, rows.digests}, 8 * mib, 8 * mib).windows.at(0).direct);
}

TEST_CASE("a raw chunk that is not as long as the chunk is refused, and so is a codec that nothing decodes") {
    ReadExtents rows{{read_row(0, mib + 5, 0x10000000)}, {}, {0, 0}};
    rows.stored = {{0, static_cast<std::uint32_t>(mib), 0}, {2 * mib, 5, 0}};
    CHECK_NOTHROW(check_extents(rows, 1));
    rows.stored[1].length = 4;
    CHECK_THROWS_WITH(check_extents(rows, 1), doctest::Contains("must be as long as the chunk"));
    rows.stored[1].codec = 77;
    CHECK_THROWS_WITH(check_extents(rows, 1), doctest::Contains("unknown codec"));
    rows.stored[1] = {2 * mib, 5, 1};
    CHECK_THROWS_WITH(check_extents(rows, 1), doctest::Contains("not an index into files"));
    rows.stored.pop_back();
    CHECK_THROWS_WITH(check_extents(rows, 1), doctest::Contains("one entry for each digest"));
}

TEST_CASE("reading large neighbours asks for at most 2 percent more") {
    ReadExtents rows;
    std::uint64_t wanted = 0;
    for (std::uint64_t i = 0; i < 20; ++i) {
        rows.rows.push_back(read_row(i * 50 * mib + 64, 50 * mib - 5000, 0x10000000 + (i % 2) * 64));
        wanted += rows.rows.back().length;
    }
    std::uint64_t asked = 0;
    for (const ReadWindow& window : plan_reads(rows, 8 * mib, 8 * mib).windows) asked += window.end - window.begin;
    CHECK(static_cast<double>(asked) < 1.02 * static_cast<double>(wanted));
}

TEST_CASE("gaps are read across only where they are few against what is wanted") {
    const auto count = [](std::uint64_t length, std::uint64_t gap) {
        ReadExtents rows;
        for (std::uint64_t i = 0; i < 100; ++i) rows.rows.push_back(read_row(i * (length + gap), length, 0x10000000));
        std::uint64_t asked = 0;
        const ReadPlan plan = plan_reads(rows, 8 * mib, 8 * mib, false);
        for (const ReadWindow& window : plan.windows) asked += window.end - window.begin;
        CHECK(static_cast<double>(asked) <= 1.02 * static_cast<double>(100 * length));
        return plan.windows.size();
    };
    CHECK(count(page, page) == 100);
    CHECK(count(page, 15 * page) == 100);
    CHECK(count(64 * page, page) < 5);
    CHECK(count(128 * page, 3 * page) == 34);
}

TEST_CASE("small neighbours share a window") {
    ReadExtents rows;
    for (std::uint64_t i = 0; i < 100; ++i) rows.rows.push_back(read_row(i * 1000, 900, 0x10000000));
    CHECK(plan_reads(rows, mib, 8 * mib).windows.size() == 1);
}

TEST_CASE("rows are checked before a byte moves") {
    const std::uint64_t sizes[] = {8192, 4096};
    const auto check = [&](std::vector<WriteExtent> rows) {
        check_extents(WriteExtents{std::move(rows), {}, 0}, sizes);
    };
    check({write_row(0, 10), write_row(10, 0), write_row(10, 8182), write_row(0, 4096, 1, 1)});
    CHECK_THROWS_WITH(check({write_row(10, 10), write_row(0, 10)}), "row 1: rows of a file are not sorted, or overlap");
    CHECK_THROWS_WITH(check({write_row(0, 10), write_row(9, 10)}), "row 1: rows of a file are not sorted, or overlap");
    CHECK_THROWS_WITH(check({write_row(0, 1, 1, 1), write_row(0, 1)}), "row 1: rows are not sorted by file");
    CHECK_THROWS_WITH(check({write_row(8192, 1)}), "row 0: the range ends beyond the file's size");
    ReadExtents rows{{read_row(0, mib + 1, 1)}, {}, {1, 2}};
    check_extents(rows, 1);
    rows.rows[0].chunk = 1;
    CHECK_THROWS_WITH(check_extents(rows, 1), "row 0: its chunks are beyond the digests");
    rows.rows[0].last = 3;
    CHECK_THROWS_WITH(check_extents(rows, 1), "row 0: first..last are not chunks of the extent");
}

TEST_CASE("windows of derived rows begin a few windows after what they follow from, early ones before the others") {
    constexpr std::uint64_t layer = 64 * mib, window_bytes = 4 * mib;
    WriteExtents rows;
    rows.encoder = delta_encoder({});
    rows.encoded_from = 1;
    const auto add = [&rows](std::uint64_t at, std::uint64_t length, std::uint32_t file, bool lazy) -> WriteExtent& {
        rows.rows.push_back(write_row(at, length, 0x10000000, file));
        rows.rows.back().chunk = rows.chunks;
        rows.rows.back().lazy = lazy;
        rows.chunks += chunk_count(length);
        return rows.rows.back();
    };
    constexpr std::uint64_t layers = 6;
    for (std::uint64_t i = 0; i < layers; ++i) add(i * layer, layer, 0, i >= layers / 2);
    for (std::uint64_t i = 0; i < layers; ++i) {
        WriteExtent& row = add(i * layer / 2, layer / 2, 1, i >= layers / 2);
        row.derivation = Derivation::bfloat16;
        row.follows = i * chunk_count(layer);
    }
    const DerivedChunks derived(rows);
    const std::vector<WriteWindow> windows =
        ordered_windows(rows, {window_bytes, 64 * kib}, {nullptr, nullptr}, &derived);
    REQUIRE(windows.size() == layers * (layer + layer / 2) / window_bytes);
    std::set<std::uint64_t> begun;
    std::size_t late = 0, begun_late = 0;  // derived windows between others, and how many windows lazy ones have
    for (std::size_t i = 0; i < windows.size(); ++i) {
        const std::vector<std::uint64_t> chunks = chunks_beginning_in(rows, windows[i]);
        REQUIRE(chunks.size() == window_bytes / chunk_bytes);
        if (windows[i].lazy) ++begun_late;
        CHECK((begun_late == 0) == !windows[i].lazy);
        const std::vector<std::uint64_t> sources = derived.sources_of(chunks);
        CHECK(sources.size() == (windows[i].derived ? 2 * chunks.size() : 0));
        for (const std::uint64_t source : sources) CHECK(begun.count(source) == 1);
        begun.insert(chunks.begin(), chunks.end());
        if (windows[i].derived && i + 1 < windows.size() && !windows[i + 1].derived) ++late;
    }
    CHECK(begun.size() == rows.chunks);
    CHECK(late > layers);
    const auto is_other = [](const WriteWindow& window) { return !window.derived; };
    CHECK(std::find_if(windows.rbegin(), windows.rend(), is_other) - windows.rbegin() <=
          5);  // half of the lag, and one
}

}  // namespace flowstone
