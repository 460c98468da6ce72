// Devices for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "bind_columns.h"
#include "bind_held.h"
#include "device_cuda.h"

namespace flowstone {

/// A device's error numbers are its own: 2 is no missing file.
inline void check_device(const Device& device, const char* what, int error) {
    if (error != 0) throw std::system_error(EIO, std::generic_category(), std::string(what) + " " + device.name() + " (" + device.describe(error) + ")");
}

inline void bind_devices(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<PyDevice>(module, "Device")
        .def("synchronize", [](const PyDevice& device) {
            const nb::gil_scoped_release unlocked;
            std::promise<int> reached;
            device.held->submit(std::make_unique<CopyBatch>(nullptr, [&](int error) { reached.set_value(error); }));
            check_device(*device.held, "wait for", reached.get_future().get());
        })
        .def("follow", [](const PyDevice& device, std::uintptr_t stream) {
            const nb::gil_scoped_release unlocked;
            check_device(*device.held, "order copies behind a stream of", device.held->follow(stream));
        }, "stream"_a)
        .def("lead", [](const PyDevice& device, std::uintptr_t stream, bool early) {
            const nb::gil_scoped_release unlocked;
            check_device(*device.held, "order a stream behind copies of", device.held->lead(stream, early ? Copies::early : Copies::all));
        }, "stream"_a, nb::kw_only(), "early"_a = false)
        .def_prop_ro("pci_address", [](const PyDevice& device) { return device.held->pci_address(); })
        .def("is_recording", [](const PyDevice& device, std::uintptr_t stream) { return device.held->is_recording(stream); }, "stream"_a);
    module.def("cuda_device", [](int ordinal, std::string name) {
        const nb::gil_scoped_release unlocked;
        return PyDevice{{make_cuda_device(cuda_driver(), ordinal, std::move(name))}};
    }, nb::kw_only(), "ordinal"_a, "name"_a);
}

}  // namespace flowstone
