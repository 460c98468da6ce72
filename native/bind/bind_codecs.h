// Digests, codecs and encoders for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind_columns.h"
#include "bind/bind_handles.h"
#include "bounds.h"
#include "codec/cast.h"
#include "codec/codecs.h"
#include "codec/digest.h"
#include "codec/encoder.h"
#include "io/io_extents.h"
#include "capture/live_memory.h"
#include "codec/planes.h"

namespace flowstone {

struct PyEncoder : SharedHandle<const Encoder> {};
struct PyBaseCache : SharedHandle<BaseCache> {};

/// The cache; for each chunk the digest of a possible base's data, and whether there is one.
using NearColumns = std::tuple<const PyBaseCache*, Array, Array>;

/// A view of a Python buffer. Unlike an array type, the buffer protocol also accepts `bytes`.
class BufferView {
public:
    explicit BufferView(const nb::object& source) {
        if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;

    const std::byte* bytes() const { return static_cast<const std::byte*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_{};
};

inline std::uint64_t digest_buffer(const nb::object& source) {
    const BufferView view(source);
    const nb::gil_scoped_release unlocked;
    return xxh3_64(view.bytes(), view.size());
}

/// Digests of runs of memory, which the caller keeps alive and unchanged. All in one call, so that a background thread
/// waits for the interpreter lock once, not after each tensor.
inline nb::object digest_memory(const Array& address, const Array& length) {
    const std::size_t count = row_count(address, "address");
    const auto begins = column<std::uint64_t>(address, "address", count);
    const auto lengths = column<std::uint64_t>(length, "length", count);
    std::vector<std::uint64_t> digests(count);
    {
        const nb::gil_scoped_release unlocked;
        for (std::size_t i = 0; i < count; ++i)
            digests[i] = xxh3_64(reinterpret_cast<const void*>(begins[i]), lengths[i]);
    }
    return to_numpy(std::move(digests));
}

/// The stored form of a chunk; None: the chunk would be stored raw.
inline nb::object encode_planes(const nb::object& source, std::size_t width) {
    const BufferView view(source);
    if (!is_plane_width(width) || view.size() % width != 0 || view.size() > chunk_bytes)
        throw std::invalid_argument("width must be 1, 2, 4 or 8, and a chunk 1 MiB at most");
    const LentAccess live;
    std::byte* const room = (*live).coding_room();
    std::size_t length = 0;
    {
        const nb::gil_scoped_release unlocked;
        static const planes::Probe probe;
        length =
            planes::encode(view.bytes(), view.size(), width, probe.worthwhile(view.bytes(), view.size(), width), room);
    }
    return length == 0 ? nb::none() : nb::object(nb::bytes(room, length));
}

/// Decode a chunk of `data_bytes`; None: no encoder writes such bytes.
inline nb::object decode_stored_chunk(std::uint8_t codec, const nb::object& stored, std::size_t data_bytes) {
    if (data_bytes > chunk_bytes) throw std::invalid_argument("a chunk must be 1 MiB at most");
    const BufferView view(stored);
    const LentAccess live;
    std::byte* const room = (*live).coding_room();
    bool good = false;
    {
        const nb::gil_scoped_release unlocked;
        good = decode_chunk(codec, view.bytes(), view.size(), room + chunk_bytes, data_bytes, room);
    }
    return good ? nb::object(nb::bytes(room + chunk_bytes, data_bytes)) : nb::none();
}

/// File, offset, length and codec of each chunk.
using StoredColumns = std::tuple<Array, Array, Array, Array>;

inline std::vector<ChunkPlace> chunk_places(const StoredColumns& columns, std::size_t count) {
    const auto files = column<std::uint32_t>(std::get<0>(columns), "stored file", count);
    const auto offsets = column<std::uint64_t>(std::get<1>(columns), "stored offset", count);
    const auto lengths = column<std::uint32_t>(std::get<2>(columns), "stored length", count);
    const auto codecs = column<std::uint8_t>(std::get<3>(columns), "stored codec", count);
    std::vector<ChunkPlace> chunks;
    chunks.reserve(count);
    for (std::size_t i = 0; i < count; ++i) chunks.push_back({offsets[i], lengths[i], files[i], codecs[i]});
    return chunks;
}

/// `derivation`: for each row, a number of Derivation. `source_chunk`: the first chunk of the row from which it may be
/// derived.
inline void add_derivations(const Array& derivation, const Array& source_chunk, std::vector<WriteExtent>& rows) {
    const auto kinds = column<std::uint8_t>(derivation, "derivation", rows.size());
    const auto sources = column<std::uint64_t>(source_chunk, "source_chunk", rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (kinds[i] > static_cast<std::uint8_t>(Derivation::float16))
            throw std::invalid_argument("derivation must be 0 to 3");
        rows[i].derivation = static_cast<Derivation>(kinds[i]);
        rows[i].follows = sources[i];
    }
}

/// Round float32 numbers to 16 bits; None: one of them is NaN.
inline nb::object cast_numbers(const nb::object& source, std::uint32_t element, bool plain) {
    const BufferView view(source);
    if (!cast::is_element(element) || view.size() % sizeof(float) != 0 || view.size() > chunk_bytes)
        throw std::invalid_argument("element must be 2 or 3, and the float32 numbers 1 MiB at most");
    const LentAccess live;
    std::byte* const room = (*live).coding_room();
    bool good = false;
    {
        const nb::gil_scoped_release unlocked;
        good = cast::round(view.bytes(), view.size() / sizeof(float), static_cast<cast::Element>(element), room,
                           plain ? cast::Way::plain : cast::Way::best);
    }
    return good ? nb::object(nb::bytes(room, view.size() / 2)) : nb::none();
}

/// For each chunk with a base: its number, the digest of its data; the base's file, offset, length, codec and digest.
using BaseColumns = std::tuple<Array, Array, Array, Array, Array, Array, Array>;

inline std::vector<ChunkBase> chunk_bases(const BaseColumns& columns) {
    const std::size_t count = row_count(std::get<0>(columns), "chunk with a base");
    const auto chunks = column<std::uint64_t>(std::get<0>(columns), "chunk with a base", count);
    const auto data_digests = column<std::uint64_t>(std::get<1>(columns), "digest of data", count);
    const StoredColumns places{std::get<2>(columns), std::get<3>(columns), std::get<4>(columns), std::get<5>(columns)};
    const std::vector<ChunkPlace> stored = chunk_places(places, count);
    const auto digests = column<std::uint64_t>(std::get<6>(columns), "digest of a base", count);
    std::vector<ChunkBase> bases;
    bases.reserve(count);
    for (std::size_t i = 0; i < count; ++i) bases.push_back({chunks[i], data_digests[i], stored[i], digests[i]});
    return bases;
}

inline BaseChunks base_chunks(const Array& digests, const Array& known, const std::optional<Array>& codecs) {
    const std::size_t count = row_count(digests, "digests");
    const auto digest = column<std::uint64_t>(digests, "digests", count);
    const auto is_known = column<bool>(known, "known", count);
    const auto codec =
        codecs ? column<std::uint8_t>(*codecs, "codecs", count) : std::vector<std::uint8_t>(count, codec_raw);
    BaseChunks base(count);
    for (std::size_t i = 0; i < count; ++i)
        if (is_known[i]) base[i] = BaseChunk{digest[i], codec[i]};
    return base;
}

inline Near near_of(const std::optional<NearColumns>& columns) {
    if (!columns) return {};
    const auto& [cache, digests, known] = *columns;
    const std::size_t count = cache->shared->size();
    const auto digest = column<std::uint64_t>(digests, "bases", count);
    const auto is_known = column<bool>(known, "is_base", count);
    Near near{cache->shared, std::vector<std::optional<std::uint64_t>>(count)};
    for (std::size_t i = 0; i < count; ++i)
        if (is_known[i]) near.bases[i] = digest[i];
    return near;
}

inline void bind_codecs(nb::module_& module) {
    using namespace nb::literals;
    module.def("encode_planes", &encode_planes, "chunk"_a, "width"_a);
    nb::class_<PyEncoder>(module, "Encoder");
    module.def("identity_encoder", [] { return PyEncoder{{identity_encoder()}}; });
    module.def(
        "delta_encoder",
        [](const Array& digests, const Array& known, const std::optional<Array>& codecs) {
            return PyEncoder{{delta_encoder(base_chunks(digests, known, codecs))}};
        },
        "digests"_a, "known"_a, "codecs"_a = nb::none());
    nb::class_<PyBaseCache>(module, "BaseCache")
        .def(
            "__init__",
            [](PyBaseCache* self, std::uint64_t chunks, std::uint64_t budget_bytes) {
                new (self) PyBaseCache{{std::make_shared<BaseCache>(chunks, budget_bytes)}};
            },
            "chunks"_a, nb::kw_only(), "budget_bytes"_a)
        .def_prop_ro("budget_bytes", [](const PyBaseCache& cache) { return cache.shared->budget_bytes(); })
        .def_prop_ro("bytes", [](const PyBaseCache& cache) { return cache.shared->bytes(); })
        .def(
            "release", [](const PyBaseCache& cache) { cache.shared->release(); },
            nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("digests", [](const PyBaseCache& cache) {
            std::vector<std::uint64_t> digests;
            {
                const nb::gil_scoped_release unlocked;
                digests = cache.shared->digests();
            }
            return to_numpy(std::move(digests));
        });
    module.def(
        "planes_encoder",
        [](const Array& widths, const Array& digests, const Array& known, const std::optional<Array>& codecs,
           const std::optional<NearColumns>& near) {
            return PyEncoder{{planes_encoder(column<std::uint8_t>(widths, "widths", row_count(widths, "widths")),
                                             base_chunks(digests, known, codecs), near_of(near))}};
        },
        "widths"_a, "digests"_a, "known"_a, "codecs"_a = nb::none(), "near"_a = nb::none());
    module.def(
        "quantizing_encoder",
        [](const Array& elements, const Array& blocks, const Array& widths, const Array& digests, const Array& known,
           const std::optional<Array>& codecs, const std::optional<NearColumns>& near) {
            const std::size_t count = row_count(blocks, "blocks");
            const auto element = column<std::uint8_t>(elements, "elements", count);
            const auto block = column<std::uint16_t>(blocks, "blocks", count);
            std::vector<Quantization> quantized(count);
            for (std::size_t i = 0; i < count; ++i) quantized[i] = {element[i], block[i]};
            return PyEncoder{{quantizing_encoder(std::move(quantized), column<std::uint8_t>(widths, "widths", count),
                                                 base_chunks(digests, known, codecs), near_of(near))}};
        },
        "elements"_a, "blocks"_a, "widths"_a, "digests"_a, "known"_a, "codecs"_a = nb::none(), "near"_a = nb::none());
    module.def("cast_numbers", &cast_numbers, "singles"_a, "element"_a, "plain"_a = false);
    module.def("decode_chunk", &decode_stored_chunk, "codec"_a, "stored"_a, "data_bytes"_a);
}

}  // namespace flowstone
