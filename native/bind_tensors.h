// What tensors say of themselves through DLPack's exchange functions: one pass, without a call of Python for each property.
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

#include "bind_columns.h"

namespace flowstone {

/// DLPack's table of functions (github.com/dmlc/dlpack, dlpack.h, version 1): of these one is called here.
struct TensorExchange {
    std::uint32_t major, minor;
    TensorExchange* older;
    void* unused[3];
    int (*describe)(void* tensor, nb::dlpack::dltensor* out);  // 0, or -1 with a Python error set; may be null
    void* also_unused;
};

/// Reads tensors of one framework. Holds the shapes that it has met, so that equal ones are one Python object.
class TensorReader {
public:
    /// `exchange` is the type's `__dlpack_c_exchange_api__`; raises ValueError if it is of another version, or cannot do this.
    explicit TensorReader(const nb::capsule& exchange)
        : table(static_cast<TensorExchange*>(exchange.data("dlpack_exchange_api"))) {
        while (table != nullptr && table->major > 1) table = table->older;
        if (table == nullptr || table->major != 1 || table->describe == nullptr)
            throw std::invalid_argument("exchange: no version 1 of DLPack's functions");
    }

    /// From now on, tensors of the same type as `tensor` are of `type`; of no type, if DLPack has another one alike.
    /// Whether that worked.
    bool name_type(nb::handle tensor, nb::object type) {
        nb::dlpack::dltensor found;
        if (!described(tensor, found)) return false;
        const auto [known, is_new] = types.emplace(code(found), std::move(type));
        if (!is_new) known->second = nb::none();
        return true;
    }

    /// Columns of the tensors in a list: address of the first element, type, shape; positions of those whose type has others
    /// alike, of those that are not one run of memory in row-major order; whether one is complex; number of the device, -1 for
    /// the host, and of each device the position of its first tensor. None if one of them cannot be described so.
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
            const std::pair device(static_cast<std::int32_t>(found.device.device_type), static_cast<std::int32_t>(found.device.device_id));
            const auto known = std::find(devices.begin(), devices.end(), device);
            numbers[at] = static_cast<std::int32_t>(known - devices.begin());
            if (known != devices.end()) continue;
            devices.push_back(device);
            firsts.append(at);
        }
        return nb::make_tuple(to_numpy(std::move(addresses)), kinds, sizes, alike, odd, is_complex, to_numpy(std::move(numbers)), firsts);
    }

private:
    bool described(nb::handle tensor, nb::dlpack::dltensor& found) const {
        found = {};
        if (table->describe(tensor.ptr(), &found) == 0) return true;
        // Dropped: the caller then asks the tensor's own methods, which serve tensors that DLPack does not know (conjugate
        // ones, types of its own), or raise what is wrong with it, by name.
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
