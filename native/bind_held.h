// What Python objects of ours hold. For bind.cpp, and for modules beside it that hand it objects of their own.
#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

#include "device.h"

namespace flowstone {

// Python objects hold shared pointers of ours rather than be shared themselves: no thread of ours
// ever drops a Python reference.
template <class T> struct Held {
    Held(std::shared_ptr<T> shared = nullptr) : held(std::move(shared)) {}
    Held(const Held&) = default;
    Held(Held&&) noexcept = default;
    Held& operator=(const Held&) = delete;
    /// In a forked child the threads behind these objects do not exist: joining them would hang,
    /// so the child's copy is left to the end of its process.
    ~Held() {
        if (held != nullptr && inherited()) new std::shared_ptr<T>(std::move(held));
    }
    bool inherited() const { return owner != ::getpid(); }

    std::shared_ptr<T> held;
    pid_t owner = ::getpid();
};
struct PyDevice : Held<Device> {};

}  // namespace flowstone
