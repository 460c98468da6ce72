// Collapsing memory into huge pages, for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>
#include <vector>

#include "bind/bind_columns.h"
#include "bind/bind_handles.h"
#include "watch/collapse.h"

namespace flowstone {

struct PyCollapse : SharedHandle<Collapse> {};

inline void bind_collapse(nb::module_& module) {
    using namespace nb::literals;
    using Unlocked = nb::gil_scoped_release;
    nb::class_<PyCollapse> collapse(module, "Collapse");
    collapse.def(
        "__init__",
        [](PyCollapse* self, const Array& addresses, const Array& lengths, double share) {
            const std::size_t count = row_count(addresses, "addresses");
            const auto begins = column<std::uint64_t>(addresses, "addresses", count);
            const auto bytes = column<std::uint64_t>(lengths, "lengths", count);
            if (!(share > 0 && share <= 1)) throw std::invalid_argument("share must be above 0, and at most 1");
            std::vector<Reach> own;
            for (std::size_t i = 0; i < count; ++i) own.push_back({begins[i], begins[i] + bytes[i]});
            new (self) PyCollapse{Collapse::start(std::move(own), share)};
        },
        "addresses"_a, "lengths"_a, nb::kw_only(), "share"_a);
    collapse.def("stop", [](const PyCollapse& pass) { pass.inherited() ? void() : pass.shared->stop(); });
    collapse.def(
        "wait",
        [](const PyCollapse& pass, double timeout_s) {
            const Unlocked unlocked;
            return pass.inherited() || pass.shared->wait(timeout_s);
        },
        "timeout_s"_a);
    const auto total = [&](const char* name, auto member) {
        collapse.def_prop_ro(name, [member](const PyCollapse& pass) { return pass.shared->totals().*member; });
    };
    total("wanted_bytes", &CollapseTotals::wanted_bytes);
    total("huge_bytes", &CollapseTotals::huge_bytes);
    total("edge_bytes", &CollapseTotals::edge_bytes);
    total("scattered_bytes", &CollapseTotals::scattered_bytes);
    total("refused_bytes", &CollapseTotals::refused_bytes);
    total("left_bytes", &CollapseTotals::left_bytes);
    total("collapsed_bytes", &CollapseTotals::collapsed_bytes);
    total("error", &CollapseTotals::error);
    total("processor_s", &CollapseTotals::processor_s);
    module.def("collapse_refusal", &Collapse::refusal, nb::call_guard<Unlocked>());
}

}  // namespace flowstone
