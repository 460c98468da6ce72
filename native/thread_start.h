// Threads that are started together, or not at all.
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

/// The first thing that a thread does. False where it has no memory for what the C++ runtime keeps for each thread that
/// throws: asked for when something is thrown, that would end the process.
inline bool settle_in() noexcept {
    constexpr std::size_t enough_bytes = std::size_t{64} << 10;
    void* volatile const room = std::malloc(enough_bytes);
    if (room == nullptr) return false;
    std::free(room);
    (void)std::uncaught_exceptions();
    return true;
}

/// `count` threads that run `body(number)`. Where the system has too few, or no memory for them, `stop()` makes those that
/// run return, and the exception goes on (std::system_error, std::bad_alloc): a thread that nobody asks to stop is waited
/// for without end.
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
    // They use what lies here until all have told.
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
