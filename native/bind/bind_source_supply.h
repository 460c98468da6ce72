// A source supply for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "bind/bind_columns.h"
#include "bind/bind_handles.h"
#include "io/source_supply.h"

namespace flowstone {

struct PySourceSupply : SharedHandle<SourceSupply> {};

inline void bind_source_supply(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<PySourceSupply>(module, "SourceSupply")
        .def(
            "__init__",
            [](PySourceSupply* self, const Array& length) {
                new (self) PySourceSupply{{std::make_shared<SourceSupply>(
                    column<std::uint64_t>(length, "length", row_count(length, "length")))}};
            },
            "length"_a)
        .def(
            "offer",
            [](const PySourceSupply& supply, std::size_t rows) {
                if (rows > supply.shared->rows()) throw std::invalid_argument("offer: more rows than the supply has");
                const nb::gil_scoped_release unlocked;
                supply.shared->offer(rows);
            },
            "rows"_a)
        .def_prop_ro("ended", [](const PySourceSupply& supply) { return supply.shared->ended(); })
        .def(
            "await_captured",
            [](const PySourceSupply& supply, std::size_t rows, double timeout_s) {
                const nb::gil_scoped_release unlocked;
                return supply.shared->await_captured(rows, std::chrono::duration<double>(timeout_s));
            },
            "rows"_a, "timeout_s"_a);
}

}  // namespace flowstone
