// A mapping of a file for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "bind/bind_handles.h"
#include "io/mapping.h"

namespace flowstone {

struct PyMapping : SharedHandle<const Mapping> {};

inline void bind_mapping(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<PyMapping>(module, "Mapping")
        .def(
            "__init__",
            [](PyMapping* self, int fd, std::uint64_t bytes, bool writable) {
                new (self) PyMapping{{std::make_shared<const Mapping>(fd, bytes, writable)}};
            },
            nb::kw_only(), "fd"_a, "bytes"_a, "writable"_a)
        .def_prop_ro("address", [](const PyMapping& mapping) { return mapping.shared->address(); })
        .def_prop_ro("bytes", [](const PyMapping& mapping) { return mapping.shared->bytes(); });
    module.def("reserve_memory", &reserve_memory, "fd"_a, "begin"_a, "end"_a, nb::call_guard<nb::gil_scoped_release>());
    module.def("has_huge_pages_by_advice", &has_huge_pages_by_advice);
}

}  // namespace flowstone
