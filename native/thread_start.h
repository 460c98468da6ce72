// Threads that are started together, or not at all.
#pragma once

#include <exception>
#include <thread>
#include <utility>
#include <vector>

namespace flowstone {

/// `count` threads that run `body(number)`. Where the system has too few, `stop()` makes those that run return, and the
/// exception goes on (std::system_error): a thread that nobody asks to stop is waited for without end.
template <class Body, class Stop>
std::vector<std::jthread> start_threads(std::size_t count, Body body, Stop stop) {
    std::vector<std::jthread> threads;
    threads.reserve(count);
    try {
        for (std::size_t i = 0; i < count; ++i) threads.emplace_back([body, i] { body(i); });
    } catch (...) {
        stop();
        throw;
    }
    return threads;
}

}  // namespace flowstone
