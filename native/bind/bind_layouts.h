// Layouts of strided memory, for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "io/io_extents.h"

namespace flowstone {

/// How a row's bytes lie in strided memory.
struct PyGather {
    Layout layout;
};
struct PyScatter {
    Layout layout;
};

template <class Kind> std::vector<Layout> layouts_of(const std::vector<const Kind*>& kinds) {
    std::vector<Layout> layouts;
    layouts.reserve(kinds.size());
    for (const Kind* kind : kinds) layouts.push_back(kind->layout);
    return layouts;
}

inline void bind_layouts(nanobind::module_& module) {
    namespace nb = nanobind;
    using namespace nb::literals;
    using Sizes = std::vector<std::uint64_t>;
    using Strides = std::vector<std::int64_t>;
    nb::class_<PyGather>(module, "GatherLayout")
        .def(
            "__init__",
            [](PyGather* self, std::uint64_t item_bytes, const Sizes& shape, const Strides& strides_bytes) {
                if (strides_bytes.size() != shape.size())
                    throw std::invalid_argument("shape and strides_bytes differ in length");
                new (self) PyGather{Layout::whole(item_bytes, shape, strides_bytes)};
            },
            nb::kw_only(), "item_bytes"_a, "shape"_a, "strides_bytes"_a)
        .def_prop_ro("is_shallow", [](const PyGather& self) { return self.layout.is_shallow(); });
    nb::class_<PyScatter>(module, "ScatterLayout")
        .def(
            "__init__",
            [](PyScatter* self, std::uint64_t item_bytes, const Sizes& extent_shape, const Sizes& offset,
               const Sizes& shape, const Strides& strides_bytes) {
                new (self) PyScatter{Layout::box(item_bytes, extent_shape, offset, shape, strides_bytes)};
            },
            nb::kw_only(), "item_bytes"_a, "extent_shape"_a, "offset"_a, "shape"_a, "strides_bytes"_a);
}

}  // namespace flowstone
