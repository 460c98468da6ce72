// Threads that cannot be started: an exception, nothing waits, and what was there goes on.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <system_error>

#include "tests/io_fixture.h"
#include "io/workers.h"

// Sanitizers have a pthread_create of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace {

std::atomic<int> starts_left{-1};  // before one fails; negative: none does

}  // namespace

extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* thread,
                                                                     const pthread_attr_t* attributes,
                                                                     void* (*body)(void*), void* argument) {
    using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    static const auto create = reinterpret_cast<Create>(::dlsym(RTLD_NEXT, "pthread_create"));
    if (starts_left == 0) return EAGAIN;
    if (starts_left > 0) --starts_left;
    return create(thread, attributes, body, argument);
}

namespace flowstone {
namespace {

/// From now on only `count` threads start; as many as are asked for, again, when it ends.
class FewThreads {
public:
    explicit FewThreads(int count) { starts_left = count; }
    ~FewThreads() { starts_left = -1; }
    FewThreads(const FewThreads&) = delete;
    FewThreads& operator=(const FewThreads&) = delete;
};

}  // namespace

TEST_CASE("an engine that cannot start all its threads says so at once") {
    for (const char* const backend : {"posix", "io_uring"}) {
        if (std::string(backend) == "io_uring" && !has_io_uring()) continue;
        const int threads = std::string(backend) == "posix" ? 4 + 2 : 1 + 2;
        for (int count = 0; count <= threads; ++count) {
            CAPTURE(backend);
            CAPTURE(count);
            const FewThreads few(count);
            if (count == threads)
                Engine({backend, 4, mib, 2});
            else
                CHECK_THROWS_AS(Engine({backend, 4, mib, 2}), std::system_error);
        }
    }
    const FewThreads none(0);
    CHECK_THROWS_AS(Arena(2 * huge_page_bytes, huge_page_bytes), std::system_error);
}

TEST_CASE("a job that cannot start its thread leaves no trace: the next one works, and the arena closes") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        const Sample sample = plain_sample(3 * mib, 64);
        IoFixture fixture(setup, sample.file_bytes);
        {
            const FewThreads none(0);
            CHECK_THROWS_AS(fixture.start(sample.rows), std::system_error);
        }
        const auto job = fixture.run(sample.rows);
        REQUIRE_FALSE(job->fault());
        std::vector<Memory> targets;
        const ReadExtents back = read_back(sample, job->digests(), targets, 1);
        {
            const FewThreads none(0);
            CHECK_THROWS_AS(fixture.start(back), std::system_error);
        }
        const auto load = fixture.run(back);
        REQUIRE_FALSE(load->fault());
        CHECK(load->bad_chunks().empty());
        fixture.arena->close();
    }
}

}  // namespace flowstone

#endif
