// Shared pointers held by Python objects. For bind.cpp, and for modules that pass their own objects to it.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "device.h"

namespace flowstone {

// Python objects hold shared pointers to native objects, never the other way round: no native thread ever drops a
// Python reference.
template <class T> struct Held {
    Held(std::shared_ptr<T> shared = nullptr) : held(std::move(shared)) {}
    Held(const Held&) = default;
    Held(Held&&) noexcept = default;
    Held& operator=(const Held&) = delete;
    /// In a forked child the threads of these objects do not exist: joining them would hang, so the child's copy is
    /// leaked until the process ends.
    ~Held() {
        if (held != nullptr && inherited()) new std::shared_ptr<T>(std::move(held));
    }
    bool inherited() const { return owner != ::getpid(); }

    std::shared_ptr<T> held;
    pid_t owner = ::getpid();
};
/// Destructors of jobs and engines wait for threads and devices, so they run without the interpreter lock.
template <class T> struct Waiting : Held<T> {
    Waiting() = default;
    Waiting(const Waiting&) = default;
    Waiting(Waiting&&) noexcept = default;
    ~Waiting() {
        if (this->held == nullptr || this->inherited()) return;
        const nanobind::gil_scoped_release unlocked;
        this->held.reset();
    }
};

struct PyDevice : Held<Device> {};

}  // namespace flowstone
