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

/// Call it first on each thread. It makes the C++ runtime allocate its memory for exceptions of this thread, as a
/// failure to do so at the first throw would end the process. Returns false if there is no memory.
inline bool reserve_throw_memory() noexcept {
    constexpr std::size_t enough_bytes = std::size_t{64} << 10;
    void* volatile const room = std::malloc(enough_bytes);
    if (room == nullptr) return false;
    std::free(room);
    (void)std::uncaught_exceptions();
    return true;
}

/// Start `count` threads that run `body(number)`, or none. If the system refuses a thread, or memory for one, `stop()`
/// is called to make the running threads return, and the exception propagates (std::system_error, std::bad_alloc).
template <class Body, class Stop> std::vector<std::jthread> start_threads(std::size_t count, Body body, Stop stop) {
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
                const bool well = reserve_throw_memory();
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
