// Plain requests: what a study of a device measures with; and what the backend may be told beforehand.
#include <sys/resource.h>

#include <cstring>

#include "tests/io_fixture.h"
#include "io/requests.h"

namespace flowstone {
namespace {

std::vector<std::string> backends() {
    std::vector<std::string> names{"sync", "posix"};
    if (has_io_uring()) names.push_back("io_uring");
    return names;
}

PlainRequests whole_file(const ScratchFile& scratch, Direction direction, const Memory& memory, std::uint64_t bytes,
                         std::uint64_t request_bytes) {
    PlainRequests requests{direction, {scratch.file()}, {}, false};
    for (std::uint64_t at = 0; at < bytes; at += request_bytes)
        requests.rows.push_back({at, memory.address() + at, request_bytes, 0});
    return requests;
}

void fill(const Memory& memory, std::uint64_t bytes, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::uint64_t at = 0; at < bytes; at += 8) {
        const std::uint64_t word = random();
        std::memcpy(memory.start() + at, &word, 8);
    }
}

}  // namespace

TEST_CASE("plain requests move every byte to its place and back") {
    constexpr std::uint64_t bytes = 4 * mib;
    for (const std::string& backend : backends())
        for (const bool direct : {false, true}) {
            if (direct && probe_direct(std::filesystem::temp_directory_path()) == 0) continue;
            for (const bool is_registered : {false, true}) {
                if (is_registered && backend != "io_uring") continue;
                CAPTURE(backend);
                CAPTURE(direct);
                CAPTURE(is_registered);
                const ScratchFile scratch(direct, bytes);
                const Memory source(bytes, 0);
                const Memory target(bytes, 0);
                fill(source, bytes, 7);
                PlainRequests write = whole_file(scratch, Direction::write, source, bytes, 64 * kib);
                PlainRequests read = whole_file(scratch, Direction::read, target, bytes, 256 * kib);
                write.register_memory = read.register_memory = is_registered;
                REQUIRE_FALSE(run_requests(backend, 8, write));
                REQUIRE_FALSE(run_requests(backend, 3, read));
                CHECK(std::memcmp(source.start(), target.start(), bytes) == 0);
            }
        }
}

TEST_CASE("the first failure of plain requests stops the others and is told") {
    for (const std::string& backend : backends()) {
        CAPTURE(backend);
        const ScratchFile scratch(false, mib);
        const Memory target(4 * mib, 0);
        const auto fault = run_requests(backend, 2, whole_file(scratch, Direction::read, target, 4 * mib, 64 * kib));
        REQUIRE(fault);
        CHECK(fault->operation == "end of file");
        CHECK(fault->offset >= mib);
    }
}

TEST_CASE("wrong plain requests are refused") {
    const ScratchFile scratch(false, 4096);
    const PlainRequests nothing{Direction::read, {scratch.file()}, {}, false};
    CHECK_FALSE(run_requests("sync", 1, nothing));
    CHECK_THROWS_AS(run_requests("sync", 0, nothing), std::invalid_argument);
    CHECK_THROWS_AS(run_requests("aio", 1, nothing), std::invalid_argument);
    PlainRequests wrong = nothing;
    wrong.rows = {{0, 4096, 4096, 1}};
    CHECK_THROWS_AS(run_requests("sync", 1, wrong), std::invalid_argument);
    wrong.rows = {{0, 4096, 0, 0}};
    CHECK_THROWS_AS(run_requests("sync", 1, wrong), std::invalid_argument);
}

TEST_CASE("only io_uring registers memory and files, and its slots come back") {
    for (const std::string& name : {std::string("posix"), std::string("io_uring")}) {
        if (name == "io_uring" && !has_io_uring()) continue;
        CAPTURE(name);
        const ScratchFile scratch(false, 4096);
        const Memory memory(4096, 0);
        const auto backend = name == "posix" ? make_posix_backend(1) : make_uring_backend(1);
        const bool can = name == "io_uring";
        for (int round = 0; round < 3000; ++round) {  // more than there are slots
            const int block = backend->register_memory({memory.start(), 4096});
            const int file = backend->register_file(scratch.file()->fd);
            REQUIRE((block >= 0) == can);
            REQUIRE((file >= 0) == can);
            if (!can) break;
            backend->unregister_memory(block);
            backend->unregister_file(file);
        }
    }
}

TEST_CASE("a job whose arena is smaller than its data reuses blocks, registered, and lets go of them") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        CAPTURE(setup.direct);
        const Sample sample = plain_sample(40 * mib + 5, 64);
        IoFixture fixture(setup, sample.file_bytes);
        const auto job = fixture.engine.write(fixture.arena, {{fixture.scratch.file(), sample.file_bytes}},
                                              std::make_shared<WriteExtents>(sample.rows), {});
        REQUIRE(job->wait(forever_s));
        REQUIRE_FALSE(job->fault());
        CHECK(job->copied_bytes() == 40 * mib + 5);
        CHECK(same(fixture.scratch.contents(), sample.expected));
        fixture.arena->close();  // refused while a block were out
    }
}

}  // namespace flowstone
