// The extension module delayed_device, built for the tests only: a device for flowstone._native.
#include <nanobind/nanobind.h>

#include <chrono>
#include <memory>

#include "bind_held.h"
#include "delayed_device.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flowstone {
namespace {

struct PyDelayedDevice : PyDevice {
    DelayedDevice& delayed() const { return static_cast<DelayedDevice&>(*held); }
};

}  // namespace
}  // namespace flowstone

NB_MODULE(delayed_device, module) {
    using flowstone::DelayedDevice, flowstone::PyDelayedDevice, flowstone::PyDevice;
    nb::module_::import_("flowstone._native");  // which declares Device
    nb::class_<PyDelayedDevice, PyDevice>(module, "DelayedDevice")
        .def("__init__", [](PyDelayedDevice* self, std::uint64_t memory_bytes, double delay_s) {
            const std::chrono::microseconds delay(static_cast<std::int64_t>(delay_s * 1e6));
            new (self) PyDelayedDevice{{{std::make_shared<DelayedDevice>(memory_bytes, delay)}}};
        }, nb::kw_only(), "memory_bytes"_a, "delay_s"_a = 0.0)
        .def_prop_ro("address", [](const PyDelayedDevice& device) { return device.delayed().address(); })
        .def_prop_ro("inside", [](const PyDelayedDevice& device) {
            return reinterpret_cast<std::uintptr_t>(device.delayed().inside());
        })
        .def_prop_ro("copies", [](const PyDelayedDevice& device) { return device.delayed().copies(); })
        .def_prop_ro("pinned_bytes", [](const PyDelayedDevice& device) { return device.delayed().pinned_bytes(); })
        .def("hold", [](const PyDelayedDevice& device, bool held) { device.delayed().hold(held); }, "held"_a)
        .def("fail_after", [](const PyDelayedDevice& device, std::uint64_t copies) { device.delayed().fail_after(copies); }, "copies"_a);
}
