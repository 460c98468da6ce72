// What tests make system calls suffer. Nothing of it is in a build that is not for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace flowstone {

enum class Direction { read, write };

/// What the next attempt suffers: an error instead of the call, or a call that is really short.
struct Trouble {
    int error = 0;
    std::uint64_t bytes_max = UINT64_MAX;
};

#ifdef FLOWSTONE_TESTING
/// Asked before every system call with the range it is about. Any thread.
using Troubles = std::function<Trouble(Direction direction, std::uint64_t offset, std::uint64_t length)>;
#else
/// None.
struct Troubles {
    Troubles(std::nullptr_t = nullptr) {}
    explicit operator bool() const { return false; }
    Trouble operator()(Direction, std::uint64_t, std::uint64_t) const { return {}; }
};
#endif

}  // namespace flowstone
