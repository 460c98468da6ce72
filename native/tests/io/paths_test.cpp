// An engine with several paths: each file's bytes go through the queue of its own, and what one refuses goes elsewhere.
#include <algorithm>
#include <cstring>

#include "tests/io_fixture.h"
#include "io/path_order.h"

namespace flowstone {
namespace {

std::shared_ptr<Engine> queue_of(FaultInjector injector = nullptr) {
    return std::make_shared<Engine>(EngineOptions{
        .backend = "posix", .queue_depth = 2, .request_bytes = mib, .workers = 1, .injector = std::move(injector)});
}

Engine across(const std::vector<std::shared_ptr<Engine>>& paths) {
    return Engine({.backend = "paths", .queue_depth = 4, .request_bytes = mib, .workers = 2}, paths);
}

std::shared_ptr<const File> on_path(const ScratchFile& scratch, std::uint32_t path, bool may_move = false) {
    File file = *scratch.file();
    file.of_path = path;
    file.may_move = may_move;
    return std::make_shared<const File>(std::move(file));
}

/// `count` files of 8 MiB, each one row of bytes of its own.
struct Sources {
    explicit Sources(std::uint32_t count) : memory(count, std::vector<std::byte>(8 * mib)) {
        rows->chunks = 0;
        for (std::uint32_t file = 0; file < count; ++file) {
            std::fill(memory[file].begin(), memory[file].end(), static_cast<std::byte>(file + 1));
            rows->rows.push_back(
                {0, 8 * mib, reinterpret_cast<std::uintptr_t>(memory[file].data()), rows->chunks, contiguous, file});
            rows->chunks += 8;
        }
    }
    std::vector<std::vector<std::byte>> memory;
    std::shared_ptr<WriteExtents> rows = std::make_shared<WriteExtents>();
};

FaultInjector fails_after(int requests, int error) {
    auto left = std::make_shared<std::atomic<int>>(requests);
    return [left, error](Direction, std::uint64_t, std::uint64_t) {
        return InjectedFault{.error = left->fetch_sub(1) > 0 ? 0 : error};
    };
}

/// Until writes into the file wait for a decision.
void await_failure(Engine& engine, const std::shared_ptr<const File>& file, const WriteJob& job) {
    while (!engine.paths()->failed(file)) {
        REQUIRE_FALSE(job.fault());
        std::this_thread::yield();
    }
}

}  // namespace

TEST_CASE("the files of each path are written by its queue, and counted") {
    const auto one = queue_of(), two = queue_of();
    Engine engine = across({one, two});
    const ScratchFile first(false, 8 * mib), second(false, 8 * mib);
    const Sources sources(2);
    const auto job = engine.write(std::make_shared<Arena>(8 * mib, 2 * mib),
                                  {{on_path(first, 0), 8 * mib}, {on_path(second, 1), 8 * mib}}, sources.rows, {});
    REQUIRE(job->wait(forever_s));
    REQUIRE_FALSE(job->fault());
    CHECK(first.contents() == sources.memory[0]);
    CHECK(second.contents() == sources.memory[1]);
    for (std::size_t path = 0; path < 2; ++path) {
        CHECK(engine.paths()->traffic(path, Direction::write).bytes == 8 * mib);
        CHECK(engine.paths()->traffic(path, Direction::write).busy.count() > 0);
        CHECK(engine.paths()->traffic(path, Direction::read).bytes == 0);
    }
}

TEST_CASE("windows of several paths take turns by their shares") {
    const std::vector<std::shared_ptr<const File>> files{std::make_shared<File>(File{1, nullptr, 1, 0, nullptr, 0}),
                                                         std::make_shared<File>(File{2, nullptr, 1, 0, nullptr, 1})};
    std::vector<WriteWindow> windows;
    for (std::uint64_t i = 0; i < 6; ++i) windows.push_back({0, i * mib, (i + 1) * mib, 0, 1});
    for (std::uint64_t i = 0; i < 3; ++i) windows.push_back({1, i * mib, (i + 1) * mib, 1, 2});
    interleave_paths(windows.begin(), windows.end(), files);
    std::string order;
    for (const WriteWindow& window : windows) order += window.file == 0 ? 'a' : 'b';
    CHECK(order == "abaabaaba");
    for (const std::uint32_t file : {0U, 1U}) {
        std::vector<std::uint64_t> begins;
        for (const WriteWindow& window : windows)
            if (window.file == file) begins.push_back(window.begin);
        CHECK(std::is_sorted(begins.begin(), begins.end()));
    }
}

TEST_CASE("what a path refuses goes into another file, with all that comes after") {
    const auto one = queue_of(), two = queue_of(fails_after(3, EIO));
    Engine engine = across({one, two});
    const ScratchFile first(false, 8 * mib), second(false, 8 * mib), instead(false, 8 * mib);
    const Sources sources(2);
    const auto moving = on_path(second, 1, true);
    const auto job = engine.write(std::make_shared<Arena>(4 * mib, 2 * mib),
                                  {{on_path(first, 0), 8 * mib}, {moving, 8 * mib}}, sources.rows, {});
    await_failure(engine, moving, *job);
    CHECK_FALSE(job->wait(0));
    engine.paths()->move(moving, on_path(instead, 0));
    REQUIRE(job->wait(forever_s));
    REQUIRE_FALSE(job->fault());
    const PathsBackend::Ranges moved = engine.paths()->forget(moving);
    CHECK(job->first_bad(1, instead.file()->fd));  // what was written before is not there yet
    std::vector<std::byte> whole = second.contents();
    const std::vector<std::byte> rest = instead.contents();
    std::uint64_t bytes = 0;
    for (const auto& [begin, end] : moved) {
        std::copy(rest.begin() + static_cast<std::ptrdiff_t>(begin), rest.begin() + static_cast<std::ptrdiff_t>(end),
                  whole.begin() + static_cast<std::ptrdiff_t>(begin));
        bytes += end - begin;
    }
    CHECK(bytes == 5 * mib);
    CHECK(whole == sources.memory[1]);
    ScratchFile copied(false, 0);
    copied.put(0, whole);
    CHECK_FALSE(job->first_bad(1, copied.file()->fd));
}

TEST_CASE("a refused file fails its job") {
    const auto one = queue_of(fails_after(0, ENOSPC));
    Engine engine = across({one});
    const ScratchFile first(false, 8 * mib);
    const Sources sources(1);
    const auto moving = on_path(first, 0, true);
    const auto job = engine.write(std::make_shared<Arena>(4 * mib, 2 * mib), {{moving, 8 * mib}}, sources.rows, {});
    await_failure(engine, moving, *job);
    engine.paths()->refuse(moving);
    REQUIRE(job->wait(forever_s));
    REQUIRE(job->fault());
    CHECK(job->fault()->error == ENOSPC);
    CHECK(engine.paths()->forget(moving).empty());
}

TEST_CASE("an engine without that path refuses the file") {
    Engine engine = across({queue_of()});
    const ScratchFile first(false, 8 * mib);
    const Sources sources(1);
    CHECK_THROWS_AS(
        engine.write(std::make_shared<Arena>(4 * mib, 2 * mib), {{on_path(first, 1), 8 * mib}}, sources.rows, {}),
        std::invalid_argument);
    CHECK_THROWS_AS(across({}), std::invalid_argument);
}

}  // namespace flowstone
