// The extension module delayed_device, built for the tests only: a device for flowstone._native.
#include <nanobind/nanobind.h>

#include <chrono>
#include <cstring>
#include <memory>

#include "bind/bind_handles.h"
#include "tests/simulated/delayed_device.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flowstone {
namespace {

struct PyDelayedDevice : PyDevice {
    DelayedDevice& delayed() const { return static_cast<DelayedDevice&>(*shared); }
};

}  // namespace
}  // namespace flowstone

NB_MODULE(delayed_device, module) {
    using flowstone::DelayedDevice, flowstone::PyDelayedDevice, flowstone::PyDevice;
    nb::module_::import_("flowstone._native");  // which declares Device
    nb::class_<PyDelayedDevice, PyDevice>(module, "DelayedDevice")
        .def(
            "__init__",
            [](PyDelayedDevice* self, std::uint64_t memory_bytes, double delay_s, bool refuses_kernels) {
                const std::chrono::microseconds delay(static_cast<std::int64_t>(delay_s * 1e6));
                new (self) PyDelayedDevice{{{std::make_shared<DelayedDevice>(memory_bytes, delay, refuses_kernels)}}};
            },
            nb::kw_only(), "memory_bytes"_a, "delay_s"_a = 0.0, "refuses_kernels"_a = false)
        .def_prop_ro("address", [](const PyDelayedDevice& device) { return device.delayed().address(); })
        .def_prop_ro(
            "inside",
            [](const PyDelayedDevice& device) { return reinterpret_cast<std::uintptr_t>(device.delayed().inside()); })
        .def_prop_ro("copies", [](const PyDelayedDevice& device) { return device.delayed().copies(); })
        .def_prop_ro("copied_bytes", [](const PyDelayedDevice& device) { return device.delayed().copied_bytes(); })
        .def_prop_ro("packed_copies", [](const PyDelayedDevice& device) { return device.delayed().packed_copies(); })
        .def_prop_ro("copies_of_rows", [](const PyDelayedDevice& device) { return device.delayed().copies_of_rows(); })
        .def_prop_ro("pageable_copies",
                     [](const PyDelayedDevice& device) { return device.delayed().pageable_copies(); })
        .def(
            "unmap",
            [](const PyDelayedDevice& device, std::uint64_t begin, std::uint64_t bytes) {
                device.delayed().unmap(begin, bytes);
            },
            "begin"_a, "bytes"_a)
        .def_prop_ro("launches", [](const PyDelayedDevice& device) { return device.delayed().module_launches(); })
        .def_prop_ro("host_allocations",
                     [](const PyDelayedDevice& device) { return device.delayed().host_allocations(); })
        .def(
            "settle", [](const PyDelayedDevice& device) { device.delayed().settle(); },
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "fill", [](const PyDelayedDevice& device, bool is_full) { device.delayed().fill(is_full); }, "is_full"_a)
        .def_prop_ro("pinned_bytes", [](const PyDelayedDevice& device) { return device.delayed().pinned_bytes(); })
        .def_prop_ro("pins", [](const PyDelayedDevice& device) { return device.delayed().pins(); })
        .def_prop_ro("pins_beside_copies",
                     [](const PyDelayedDevice& device) { return device.delayed().pins_beside_copies(); })
        .def(
            "limit_pinned",
            [](const PyDelayedDevice& device, std::uint64_t bytes) { device.delayed().limit_pinned(bytes); }, "bytes"_a)
        .def_prop_ro("pending_events_max",
                     [](const PyDelayedDevice& device) { return device.delayed().pending_events_max(); })
        .def_prop_ro("current", [](const PyDelayedDevice& device) { return device.delayed().current(); })
        .def(
            "make_current",
            [](const PyDelayedDevice& device, std::uintptr_t stream) { device.delayed().make_current(stream); },
            "stream"_a)
        .def("make_stream", [](const PyDelayedDevice& device) { return device.delayed().make_stream(); })
        .def(
            "write",
            [](const PyDelayedDevice& device, std::uintptr_t stream, std::uintptr_t target, std::uint64_t bytes,
               int value) {
                device.delayed().launch(stream, [=] { std::memset(reinterpret_cast<void*>(target), value, bytes); });
            },
            "stream"_a, "target"_a, "bytes"_a, "value"_a)
        .def(
            "wait_for",
            [](const PyDelayedDevice& device, std::uintptr_t stream) { device.delayed().synchronize(stream); },
            "stream"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "begin_capture",
            [](const PyDelayedDevice& device, std::uintptr_t stream) { device.delayed().begin_capture(stream, 0); },
            "stream"_a)
        .def(
            "end_capture",
            [](const PyDelayedDevice& device, std::uintptr_t stream) { return device.delayed().end_capture(stream); },
            "stream"_a)
        .def(
            "replay", [](const PyDelayedDevice& device, std::uintptr_t stream) { device.delayed().replay(stream); },
            "stream"_a)
        .def(
            "hold", [](const PyDelayedDevice& device, bool held) { device.delayed().hold(held); }, "held"_a)
        .def(
            "fail_after",
            [](const PyDelayedDevice& device, std::uint64_t copies) { device.delayed().fail_after(copies); },
            "copies"_a);
}
