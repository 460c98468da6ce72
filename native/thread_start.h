// Threads that are all started, or none.
#pragma once

#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace flowstone {

/// A thread's first call. False if there is no memory for what the C++ runtime allocates per throwing thread: allocated
/// at the first throw, its lack would end the process.
inline bool settle_in() noexcept {
    constexpr std::size_t enough_bytes = std::size_t{64} << 10;
    void* volatile const room = std::malloc(enough_bytes);
    if (room == nullptr) return false;
    std::free(room);
    (void)std::uncaught_exceptions();
    return true;
}

/// `count` threads that run `body(number)`. If the system has too few threads, or no memory for them, `stop()` makes
/// the running ones return, and the exception propagates (std::system_error, std::bad_alloc); without `stop()`, joining
/// them would never end.
template <class Body, class Stop>
std::vector<std::jthread> start_threads(std::size_t count, Body body, Stop stop) {
    std::mutex mutex;
    std::condition_variable told;
    std::size_t settled = 0;
    bool all_well = true;
    const auto tell = [&](bool well) {
        const std::lock_guard lock(mutex);
        ++settled;
        all_well = all_well && well;
        told.notify_one();
    };
    std::vector<std::jthread> threads;
    // The threads use these variables until all have reported.
    const auto listen = [&] {
        std::unique_lock lock(mutex);
        told.wait(lock, [&] { return settled == threads.size(); });
    };
    threads.reserve(count);
    try {
        for (std::size_t i = 0; i < count; ++i)
            threads.emplace_back([body, i, &tell] {
                const bool well = settle_in();
                tell(well);
                if (well) body(i);
            });
        listen();
        if (!all_well) throw std::bad_alloc();
    } catch (...) {
        listen();
        stop();
        throw;
    }
    return threads;
}

}  // namespace flowstone
