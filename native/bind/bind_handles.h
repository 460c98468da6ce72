// Shared pointers in Python objects. For bind.cpp, and for modules that pass their own objects to it.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "gpu/device.h"

namespace flowstone {

// Python objects hold shared pointers to native objects, never the other way round: no native thread ever drops a
// Python reference.
template <class T> struct SharedHandle {
    SharedHandle(std::shared_ptr<T> object = nullptr) : shared(std::move(object)) {}
    SharedHandle(const SharedHandle&) = default;
    SharedHandle(SharedHandle&&) noexcept = default;
    SharedHandle& operator=(const SharedHandle&) = delete;
    /// In a forked child the threads of these objects do not exist: joining them would hang, so the child's copy is
    /// leaked until the process ends.
    ~SharedHandle() {
        if (shared != nullptr && inherited()) new std::shared_ptr<T>(std::move(shared));
    }
    bool inherited() const { return owner != ::getpid(); }

    std::shared_ptr<T> shared;
    pid_t owner = ::getpid();
};
/// Destructors of jobs and engines wait for threads and devices, so they run without the interpreter lock.
template <class T> struct JoiningHandle : SharedHandle<T> {
    JoiningHandle() = default;
    JoiningHandle(const JoiningHandle&) = default;
    JoiningHandle(JoiningHandle&&) noexcept = default;
    ~JoiningHandle() {
        if (this->shared == nullptr || this->inherited()) return;
        const nanobind::gil_scoped_release unlocked;
        this->shared.reset();
    }
};

struct PyDevice : SharedHandle<Device> {};

}  // namespace flowstone
