// A feed for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "bind_columns.h"
#include "bind_held.h"
#include "feed.h"

namespace flowstone {

struct PyFeed : Held<Feed> {};

inline void bind_feed(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<PyFeed>(module, "Feed")
        .def("__init__", [](PyFeed* self, const Array& length) {
            new (self) PyFeed{{std::make_shared<Feed>(column<std::uint64_t>(length, "length", row_count(length)))}};
        }, "length"_a)
        .def("offer", [](const PyFeed& feed, std::size_t rows) {
            if (rows > feed.held->rows()) throw std::invalid_argument("feed: more rows than it has");
            const nb::gil_scoped_release unlocked;
            feed.held->offer(rows);
        }, "rows"_a)
        .def_prop_ro("ended", [](const PyFeed& feed) { return feed.held->ended(); })
        .def("await_captured", [](const PyFeed& feed, std::size_t rows, double timeout_s) {
            const nb::gil_scoped_release unlocked;
            return feed.held->await_captured(rows, std::chrono::duration<double>(timeout_s));
        }, "rows"_a, "timeout_s"_a);
}

}  // namespace flowstone
