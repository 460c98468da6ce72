// The fault injector, with which tests make system calls fail. Not compiled into builds that are not for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace flowstone {

enum class Direction { read, write };

/// What happens to the next attempt: an error instead of the call, or a call with a shortened length.
struct InjectedFault {
    int error = 0;
    std::uint64_t bytes_max = UINT64_MAX;
};

#ifdef FLOWSTONE_TESTING
/// Called before every system call, with its range. Any thread.
using FaultInjector = std::function<InjectedFault(Direction direction, std::uint64_t offset, std::uint64_t length)>;
#else
/// Injects nothing.
struct FaultInjector {
    FaultInjector(std::nullptr_t = nullptr) {}
    explicit operator bool() const { return false; }
    InjectedFault operator()(Direction, std::uint64_t, std::uint64_t) const { return {}; }
};
#endif

}  // namespace flowstone
