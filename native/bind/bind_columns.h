// Columns of numbers between numpy and the core. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec/encoder.h"
#include "io/spans.h"

namespace flowstone {

namespace nb = nanobind;
using Array = nb::ndarray<nb::ro, nb::device::cpu>;

template <class Item> std::vector<Item> column(const Array& array, const char* name, std::size_t rows) {
    const std::string label(name);
    if (array.ndim() != 1 || array.dtype() != nb::dtype<Item>())
        throw std::invalid_argument(label + ": wrong dtype or number of dimensions");
    if (array.shape(0) != rows) throw std::invalid_argument(label + ": the columns differ in length");
    std::vector<Item> items(rows);
    const auto* first = static_cast<const Item*>(array.data());
    for (std::size_t i = 0; i < rows; ++i) items[i] = first[static_cast<std::int64_t>(i) * array.stride(0)];
    return items;
}

inline std::size_t row_count(const Array& array, const char* name) {
    if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + ": wrong dtype or number of dimensions");
    return array.shape(0);
}

template <class Item> nb::object to_numpy(std::vector<Item> items) {
    auto owned = std::make_unique<std::vector<Item>>(std::move(items));
    Item* const data = owned->data();
    const std::size_t count = owned->size();
    const nb::capsule owner(owned.release(),
                            [](void* vector) noexcept { delete static_cast<std::vector<Item>*>(vector); });
    return nb::ndarray<nb::numpy, Item, nb::ndim<1>>(data, {count}, owner).cast();
}

inline nb::object to_numpy_bool(const std::vector<bool>& flags) {
    auto owned = std::make_unique<bool[]>(flags.size() + 1);  // + 1: numpy wants an address even for an empty array
    std::copy(flags.begin(), flags.end(), owned.get());
    bool* const data = owned.release();
    const nb::capsule owner(data, [](void* bytes) noexcept { delete[] static_cast<bool*>(bytes); });
    return nb::ndarray<nb::numpy, bool, nb::ndim<1>>(data, {flags.size()}, owner).cast();
}

/// Columns: offset, length, codec, whether the base's chunk is used, the digest before encoding, whether the chunk is
/// derived from others.
inline std::tuple<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object> stored_columns(
    const std::vector<StoredChunk>& chunks) {
    std::vector<std::uint64_t> offset;
    std::vector<std::uint32_t> length;
    std::vector<std::uint8_t> codec;
    std::vector<bool> same, derived;
    std::vector<std::uint64_t> captured;
    for (const StoredChunk& chunk : chunks) {
        offset.push_back(chunk.offset);
        length.push_back(chunk.encoded.length);
        codec.push_back(chunk.encoded.codec);
        same.push_back(chunk.encoded.kind == ChunkEncoding::Kind::same);
        derived.push_back(chunk.encoded.kind == ChunkEncoding::Kind::derived);
        captured.push_back(chunk.captured_digest);
    }
    return {to_numpy(std::move(offset)), to_numpy(std::move(length)),   to_numpy(std::move(codec)),
            to_numpy_bool(same),         to_numpy(std::move(captured)), to_numpy_bool(derived)};
}

/// Columns: phase, begin and end in nanoseconds of the monotonic clock, bytes, thread.
inline std::tuple<nb::object, nb::object, nb::object, nb::object, nb::object> span_columns(
    const std::vector<PhaseSpan>& spans) {
    std::vector<std::uint8_t> phase;
    std::vector<std::int64_t> begin, end;
    std::vector<std::uint64_t> bytes;
    std::vector<std::uint32_t> thread;
    for (const PhaseSpan& span : spans) {
        phase.push_back(static_cast<std::uint8_t>(span.phase));
        begin.push_back(span.begin_ns);
        end.push_back(span.end_ns);
        bytes.push_back(span.bytes);
        thread.push_back(span.thread);
    }
    return {to_numpy(std::move(phase)), to_numpy(std::move(begin)), to_numpy(std::move(end)),
            to_numpy(std::move(bytes)), to_numpy(std::move(thread))};
}

}  // namespace flowstone
