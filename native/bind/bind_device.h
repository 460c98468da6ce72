// Devices for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bind/bind_columns.h"
#include "bind/bind_handles.h"
#include "bind/bind_layouts.h"
#include "gpu/device_cuda.h"
#include "gpu/digest_kernel.h"
#include "gpu/gather_kernel.h"
#include "io/io_extents.h"
#include "gpu/pack_kernel.h"

namespace flowstone {

/// Error numbers of a device are not errnos: 2 is no missing file.
inline void check_device(const Device& device, const char* what, int error) {
    if (error != 0)
        throw std::system_error(EIO, std::generic_category(),
                                std::string(what) + " " + device.name() + " (" + device.describe(error) + ")");
}

/// The owner of an array of gathered bytes: returns the memory to the device's pool.
struct GatheredArray {
    SharedHandle<Device> device;
    SharedHandle<const GatheredRuns> gathered;  // destroyed first
};

inline nb::object gather(const PyDevice& device, std::uintptr_t stream, const Array& address, const Array& begin,
                         const Array& length, const Array& layout, const std::vector<const PyGather*>& layouts) {
    const std::size_t count = address.ndim() == 1 ? address.shape(0) : 0;
    const auto addresses = column<std::uint64_t>(address, "address", count);
    const auto begins = column<std::uint64_t>(begin, "begin", count);
    const auto lengths = column<std::uint32_t>(length, "length", count);
    const auto numbers = column<std::int64_t>(layout, "layout", count);
    std::vector<DeviceRun> runs(count);
    for (std::size_t i = 0; i < count; ++i) {
        if (numbers[i] == contiguous) {
            runs[i] = {addresses[i] + begins[i], lengths[i]};
            continue;
        }
        const Layout& strided = layouts.at(static_cast<std::size_t>(numbers[i]))->layout;
        if (begins[i] > strided.packed_bytes() || lengths[i] > strided.packed_bytes() - begins[i])
            throw std::invalid_argument("a run ends beyond its layout");
        runs[i] = {addresses[i], lengths[i], &strided, begins[i]};
    }
    std::shared_ptr<const GatheredRuns> gathered;
    {
        const nb::gil_scoped_release unlocked;
        check_device(*device.shared, "gather behind a stream of", device.shared->gather(stream, runs, gathered));
    }
    const std::span<const std::byte> bytes = gathered->bytes();
    auto kept = std::make_unique<GatheredArray>(device.shared, std::move(gathered));
    const nb::capsule owner(kept.release(), [](void* one) noexcept { delete static_cast<GatheredArray*>(one); });
    return nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>(bytes.data(), {bytes.size()}, owner).cast();
}

/// Digests that a device computes, in host memory, which it returns to the device's pool.
struct PyDeviceDigests {
    SharedHandle<Device> device;
    SharedHandle<const DeviceDigests> digested;  // destroyed first
};

/// Digest the chunks of rows, one after the other; empty if the device cannot digest.
inline std::optional<PyDeviceDigests> digest_chunks(const PyDevice& device, std::uintptr_t stream, const Array& address,
                                                    const Array& length, const std::optional<Array>& layout,
                                                    const std::vector<const PyGather*>& layouts) {
    const std::size_t count = address.ndim() == 1 ? address.shape(0) : 0;
    const auto addresses = column<std::uint64_t>(address, "address", count);
    const auto lengths = column<std::uint64_t>(length, "length", count);
    const auto numbers =
        layout ? column<std::int64_t>(*layout, "layout", count) : std::vector<std::int64_t>(count, contiguous);
    std::vector<const Layout*> strided(count, nullptr);
    for (std::size_t i = 0; i < count; ++i) {
        if (numbers[i] == contiguous) continue;
        strided[i] = &layouts.at(static_cast<std::size_t>(numbers[i]))->layout;
        if (lengths[i] != strided[i]->packed_bytes())
            throw std::invalid_argument("a row's length differs from its layout's");
    }
    std::shared_ptr<const DeviceDigests> digested;
    {
        const nb::gil_scoped_release unlocked;
        std::vector<DeviceRun> runs;
        for (std::size_t i = 0; i < count; ++i)
            for (std::uint64_t at = 0; at < lengths[i]; at += chunk_bytes) {
                const auto bytes = static_cast<std::uint32_t>(std::min(chunk_bytes, lengths[i] - at));
                runs.push_back(strided[i] == nullptr ? DeviceRun{addresses[i] + at, bytes}
                                                     : DeviceRun{addresses[i], bytes, strided[i], at});
            }
        check_device(*device.shared, "digest behind a stream of", device.shared->digest(stream, runs, digested));
    }
    if (digested == nullptr) return std::nullopt;
    return PyDeviceDigests{device.shared, std::move(digested)};
}

inline void bind_devices(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<PyDevice>(module, "Device")
        .def("synchronize",
             [](const PyDevice& device) {
                 const nb::gil_scoped_release unlocked;
                 std::promise<int> reached;
                 device.shared->submit(
                     std::make_unique<CopyBatch>(nullptr, [&](int error) { reached.set_value(error); }));
                 check_device(*device.shared, "wait for", reached.get_future().get());
             })
        .def(
            "follow",
            [](const PyDevice& device, std::uintptr_t stream) {
                const nb::gil_scoped_release unlocked;
                check_device(*device.shared, "order copies behind a stream of", device.shared->follow(stream));
            },
            "stream"_a)
        .def(
            "lead",
            [](const PyDevice& device, std::uintptr_t stream, bool early) {
                const nb::gil_scoped_release unlocked;
                check_device(*device.shared, "order a stream behind copies of",
                             device.shared->lead(stream, early ? Copies::early : Copies::all));
            },
            "stream"_a, nb::kw_only(), "early"_a = false)
        .def("gather", &gather, "stream"_a, nb::kw_only(), "address"_a, "begin"_a, "length"_a, "layout"_a, "layouts"_a)
        .def_prop_ro("packs", [](const PyDevice& device) { return device.shared->packs(); })
        .def("digest", &digest_chunks, "stream"_a, "address"_a, "length"_a, "layout"_a = nb::none(),
             "layouts"_a = std::vector<const PyGather*>())
        .def(
            "reserve_launches",
            [](const PyDevice& device, std::uint64_t runs, std::uint64_t strided, std::uint64_t bytes,
               std::uint64_t chunks, std::uint64_t strided_chunks, std::uint64_t short_chunks, std::size_t times) {
                const nb::gil_scoped_release unlocked;
                device.shared->reserve_launches({runs, bytes, chunks, short_chunks, strided, strided_chunks}, times);
            },
            nb::kw_only(), "runs"_a, "strided"_a, "bytes"_a, "chunks"_a, "strided_chunks"_a, "short_chunks"_a,
            "times"_a)
        .def_prop_ro("pci_address", [](const PyDevice& device) { return device.shared->pci_address(); })
        .def(
            "is_recording",
            [](const PyDevice& device, std::uintptr_t stream) { return device.shared->is_recording(stream); },
            "stream"_a);
    nb::class_<PyDeviceDigests>(module, "DeviceDigests").def("digests", [](const PyDeviceDigests& digested) {
        const DeviceDigests& held = *digested.digested.shared;
        std::vector<std::uint64_t> all(held.runs());
        {
            const nb::gil_scoped_release unlocked;
            for (std::size_t i = 0; i < all.size(); ++i) all[i] = held.digest(i);
        }
        return to_numpy(std::move(all));
    });
    module.attr("DIGESTED_BY_HOST_MAX") = digested_by_host_max;
    module.attr("DIGEST_PTX") = digest_text.ptx;
    module.attr("STRIDED_DIGEST_PTX") = strided_digest_text.ptx;
    module.attr("GATHER_PTX") = gather_text.ptx;
    module.attr("PACK_PTX") = pack_text.ptx;
    // A kernel's table, for a test: the table with which it writes these packed bytes of a layout at `address`.
    module.def(
        "pack_table",
        [](const PyGather& gather, std::uint64_t address, std::uint64_t begin, std::uint64_t bytes,
           std::uint64_t target) {
            std::vector<PackPart> parts;
            add_parts(gather.layout, address, begin, bytes, target, parts);
            return nb::bytes(parts.data(), parts.size() * sizeof(PackPart));
        },
        "layout"_a, nb::kw_only(), "address"_a, "begin"_a, "bytes"_a, "target"_a);
    // For a test: the table row with which the kernel digests these packed bytes; the digest goes to `target`.
    module.def(
        "digest_table",
        [](const PyGather& gather, std::uint64_t address, std::uint64_t begin, std::uint64_t bytes,
           std::uint64_t target) {
            PackPart part = part_of(gather.layout, address, begin, bytes);
            part.target = target;
            return nb::bytes(&part, sizeof part);
        },
        "layout"_a, nb::kw_only(), "address"_a, "begin"_a, "bytes"_a, "target"_a);
    module.attr("GATHERED_ALIGNMENT_BYTES") = gathered_alignment_bytes;
    module.def(
        "cuda_device",
        [](int ordinal, std::string name) {
            const nb::gil_scoped_release unlocked;
            return PyDevice{{make_cuda_device(cuda_driver(), ordinal, std::move(name))}};
        },
        nb::kw_only(), "ordinal"_a, "name"_a);
}

}  // namespace flowstone
