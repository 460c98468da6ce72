// Engines whose requests the caller carries out, or that have several paths, for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "io/engine.h"

namespace flowstone {

inline Direction direction_of(const std::string& name) {
    if (name != "read" && name != "write") throw std::invalid_argument("direction must be 'read' or 'write'");
    return name == "read" ? Direction::read : Direction::write;
}

/// Number, file, offset, address, length, needed bytes.
using TakenOp = std::tuple<std::uint64_t, int, std::uint64_t, std::uintptr_t, std::uint64_t, std::uint64_t>;

template <class PyEngine> std::vector<TakenOp> take_ops(const PyEngine& engine, const std::string& direction,
                                                        const std::tuple<int, int>& files, std::size_t count,
                                                        double timeout_s, std::optional<std::uint64_t> since) {
    const nanobind::gil_scoped_release unlocked;
    std::vector<TakenOp> ops;
    for (const CallerBackend::Request& op : engine.shared->caller()->take(direction_of(direction), std::get<0>(files),
                                                                          std::get<1>(files), count, timeout_s, since))
        ops.emplace_back(op.number, op.file, op.offset, reinterpret_cast<std::uintptr_t>(op.memory.iov_base),
                         op.memory.iov_len, op.needed_bytes);
    return ops;
}

/// For each path: bytes moved, and seconds in which it had requests in flight.
template <class PyEngine>
std::vector<std::tuple<std::uint64_t, double>> path_traffic(const PyEngine& engine, const std::string& direction) {
    const std::shared_ptr<PathsBackend> backend = engine.shared->paths();
    std::vector<std::tuple<std::uint64_t, double>> found;
    for (std::size_t path = 0; path < backend->paths(); ++path) {
        const PathTraffic traffic = backend->traffic(path, direction_of(direction));
        found.emplace_back(traffic.bytes, std::chrono::duration<double>(traffic.busy).count());
    }
    return found;
}

template <class PyEngine, class PyFile> void bind_queues(nanobind::class_<PyEngine>& engine) {
    using namespace nanobind::literals;
    using Unlocked = nanobind::gil_scoped_release;
    engine
        .def("take", &take_ops<PyEngine>, "direction"_a, "files"_a, "count"_a, "timeout_s"_a,
             "since"_a = nanobind::none())
        .def_prop_ro("wakes", [](const PyEngine& engine) { return engine.shared->caller()->wakes(); })
        .def(
            "complete",
            [](const PyEngine& engine, std::uint64_t number, std::uint64_t moved_bytes, int error,
               std::uintptr_t lent) {
                const Unlocked unlocked;
                engine.shared->caller()->complete(number, moved_bytes, error, reinterpret_cast<const std::byte*>(lent));
            },
            "number"_a, "moved_bytes"_a, "error"_a = 0, "lent"_a = 0)
        .def("traffic", &path_traffic<PyEngine>, "direction"_a)
        .def(
            "failed",
            [](const PyEngine& engine, const PyFile& file) { return engine.shared->paths()->failed(file.shared); },
            "file"_a)
        .def(
            "move",
            [](const PyEngine& engine, const PyFile& file, const PyFile& target) {
                const Unlocked unlocked;
                engine.shared->paths()->move(file.shared, target.shared);
            },
            "file"_a, "target"_a)
        .def(
            "refuse",
            [](const PyEngine& engine, const PyFile& file) {
                const Unlocked unlocked;
                engine.shared->paths()->refuse(file.shared);
            },
            "file"_a)
        .def(
            "forget",
            [](const PyEngine& engine, const PyFile& file) { return engine.shared->paths()->forget(file.shared); },
            "file"_a);
}

}  // namespace flowstone
