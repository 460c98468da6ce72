// Reads the properties of tensors by DLPack's exchange functions, in one pass, without Python calls for each property.
// For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bind/bind_columns.h"

namespace flowstone {

/// DLPack's table of functions (github.com/dmlc/dlpack, dlpack.h, version 1); one of them is called here.
struct TensorExchange {
    std::uint32_t major, minor;
    TensorExchange* older;
    void* unused[3];
    int (*describe)(void* tensor, nb::dlpack::dltensor* out);  // 0, or -1 with a Python error set; may be null
    void* also_unused;
};

/// Reads tensors of one framework. Keeps the shapes that it has read, so that equal shapes are one Python object.
class TensorReader {
public:
    /// `exchange` is the type's `__dlpack_c_exchange_api__`. Raises ValueError if its version differs, or it lacks the
    /// function.
    explicit TensorReader(const nb::capsule& exchange)
        : table(static_cast<TensorExchange*>(exchange.data("dlpack_exchange_api"))) {
        while (table != nullptr && table->major > 1) table = table->older;
        if (table == nullptr || table->major != 1 || table->describe == nullptr)
            throw std::invalid_argument("exchange must be version 1 of DLPack's exchange functions");
    }

    /// Name the type of tensors like `tensor`; None: DLPack does not distinguish it from another type. Returns whether
    /// the framework describes the tensor.
    bool name_type(nb::handle tensor, nb::object type) {
        nb::dlpack::dltensor found;
        if (!described(tensor, found)) return false;
        const auto [known, is_new] = types.emplace(code(found), std::move(type));
        if (!is_new) known->second = nb::none();
        return true;
    }

    /// Columns of the tensors in a list: address of the first element, type, shape; positions of tensors with an
    /// ambiguous type, and of tensors that are not contiguous; whether one is complex; index of the device, -1 for the
    /// host; for each device the position of its first tensor. None if a tensor cannot be described so.
    nb::object read(const nb::list& tensors) {
        const std::size_t count = tensors.size();
        std::vector<std::uint64_t> addresses(count);
        std::vector<std::int32_t> numbers(count, -1);
        std::vector<std::pair<std::int32_t, std::int32_t>> devices;  // few
        nb::list kinds, sizes, alike, odd, firsts;
        bool is_complex = false;
        for (std::size_t at = 0; at < count; ++at) {
            nb::dlpack::dltensor found;
            if (!described(tensors[at], found)) return nb::none();
            const auto type = types.find(code(found));
            if (type == types.end()) return nb::none();
            addresses[at] = reinterpret_cast<std::uintptr_t>(found.data) + found.byte_offset;
            kinds.append(type->second);
            if (type->second.is_none()) alike.append(at);
            sizes.append(shape(found));
            is_complex |= found.dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Complex);
            if (!is_row_major(found)) odd.append(at);
            if (found.device.device_type == nb::device::cpu::value) continue;
            const std::pair device(static_cast<std::int32_t>(found.device.device_type),
                                   static_cast<std::int32_t>(found.device.device_id));
            const auto known = std::find(devices.begin(), devices.end(), device);
            numbers[at] = static_cast<std::int32_t>(known - devices.begin());
            if (known != devices.end()) continue;
            devices.push_back(device);
            firsts.append(at);
        }
        return nb::make_tuple(to_numpy(std::move(addresses)), kinds, sizes, alike, odd, is_complex,
                              to_numpy(std::move(numbers)), firsts);
    }

private:
    bool described(nb::handle tensor, nb::dlpack::dltensor& found) const {
        found = {};
        if (table->describe(tensor.ptr(), &found) == 0) return true;
        // The error is dropped: the caller then uses the tensor's own methods, which handle tensors that DLPack does
        // not know (conjugate ones, other types), or raise a better error.
        PyErr_Clear();
        return false;
    }

    static std::uint32_t code(const nb::dlpack::dltensor& tensor) {
        return tensor.dtype.code | tensor.dtype.bits << 8 | static_cast<std::uint32_t>(tensor.dtype.lanes) << 16;
    }

    static bool is_row_major(const nb::dlpack::dltensor& tensor) {
        if (tensor.strides == nullptr) return true;
        std::int64_t expected = 1;
        bool same = true;
        for (std::int32_t at = tensor.ndim; at-- > 0;) {
            if (tensor.shape[at] == 0) return true;
            same &= tensor.shape[at] == 1 || tensor.strides[at] == expected;
            expected *= tensor.shape[at];
        }
        return same;
    }

    nb::handle shape(const nb::dlpack::dltensor& tensor) {
        const std::span<const std::int64_t> lengths(tensor.shape, static_cast<std::size_t>(tensor.ndim));
        auto known = shapes.find(lengths);
        if (known == shapes.end()) {
            nb::list items;
            for (const std::int64_t length : lengths) items.append(length);
            known = shapes.emplace(std::vector<std::int64_t>(lengths.begin(), lengths.end()), nb::tuple(items)).first;
        }
        return known->second;
    }

    struct Lexicographic {
        using is_transparent = void;
        bool operator()(std::span<const std::int64_t> one, std::span<const std::int64_t> other) const {
            return std::lexicographical_compare(one.begin(), one.end(), other.begin(), other.end());
        }
    };

    TensorExchange* table;  // lives as long as the framework
    std::unordered_map<std::uint32_t, nb::object> types;
    std::map<std::vector<std::int64_t>, nb::tuple, Lexicographic> shapes;
};

inline void bind_tensors(nb::module_& module) {
    nb::class_<TensorReader>(module, "TensorReader")
        .def(nb::init<const nb::capsule&>(), nb::arg("exchange"))
        .def("name_type", &TensorReader::name_type, nb::arg("tensor"), nb::arg("type").none())
        .def("read", &TensorReader::read, nb::arg("tensors"));
}

}  // namespace flowstone
