// Rows of writes and reads, for Python. For bind.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind_codecs.h"
#include "bind/bind_columns.h"
#include "bind/bind_device.h"
#include "bind/bind_source_supply.h"
#include "bind/bind_handles.h"
#include "bind/bind_layouts.h"
#include "io/io_extents.h"
#include "io/write_plan.h"
#include "watch/mutation_detector.h"

namespace flowstone {

struct PyWriteExtents : SharedHandle<WriteExtents> {
    SharedHandle<MutationDetector> watch{};  // until a job takes it over; null: the job begins a watch
};
struct PyReadExtents : SharedHandle<ReadExtents> {};

inline Watching watching_of(const std::string& name) {
    if (name == "samples") return Watching::samples;
    if (name == "auto" || name == "digests") return Watching::automatic;  // the rows have the digests
    if (name == "exact") return Watching::exact;
    throw std::invalid_argument("watch must be 'auto', 'digests', 'exact' or 'samples'");
}

inline std::vector<std::shared_ptr<Device>> devices_of(const std::vector<const PyDevice*>& handles) {
    std::vector<std::shared_ptr<Device>> devices;
    for (const PyDevice* device : handles) devices.push_back(device->shared);
    return devices;
}

/// Lines in the caller's memory.
inline std::vector<std::span<const Line>> lines_of(const std::vector<Array>& samples) {
    std::vector<std::span<const Line>> lines;
    for (const Array& sample : samples) {
        const bool fits =
            sample.ndim() == 1 && sample.dtype() == nb::dtype<std::uint8_t>() && sample.shape(0) % sizeof(Line) == 0;
        if (!fits || (sample.shape(0) != 0 && sample.stride(0) != 1))
            throw std::invalid_argument("samples: wrong dtype, length or number of dimensions");
        lines.emplace_back(static_cast<const Line*>(sample.data()), sample.shape(0) / sizeof(Line));
    }
    return lines;
}

/// Set `member` of each row to its item of a column.
template <class Row, class Item>
void fill(std::vector<Row>& rows, Item Row::* member, const Array& items, const char* name) {
    const auto values = column<Item>(items, name, rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i].*member = values[i];
}

inline void bind_write_extents(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<PyWriteExtents>(module, "WriteExtents")
        .def(
            "__init__",
            [](PyWriteExtents* self, const Array& file, const Array& offset, const Array& length, const Array& address,
               const Array& chunk, const Array& layout, const std::vector<const PyGather*>& layouts,
               std::uint64_t chunks) {
                auto extents = std::make_shared<WriteExtents>();
                std::vector<WriteExtent>& rows = extents->rows;
                rows.resize(row_count(file, "file"));
                fill(rows, &WriteExtent::file, file, "file");
                fill(rows, &WriteExtent::offset, offset, "offset");
                fill(rows, &WriteExtent::length, length, "length");
                fill(rows, &WriteExtent::address, address, "address");
                fill(rows, &WriteExtent::chunk, chunk, "chunk");
                fill(rows, &WriteExtent::layout, layout, "layout");
                extents->layouts = layouts_of(layouts);
                extents->chunks = chunks;
                new (self) PyWriteExtents{{std::move(extents)}, {}};
            },
            nb::kw_only(), "file"_a, "offset"_a, "length"_a, "address"_a, "chunk"_a, "layout"_a, "layouts"_a,
            "chunks"_a)
        .def(
            "mark_lazy",
            [](PyWriteExtents& extents, const Array& lazy, const std::optional<Array>& seed) {
                fill(extents.shared->rows, &WriteExtent::lazy, lazy, "lazy");
                if (seed) fill(extents.shared->rows, &WriteExtent::seed, *seed, "seed");
            },
            "lazy"_a, "seed"_a = nb::none())
        .def(
            "place_on_devices",
            [](PyWriteExtents& extents, const Array& device, const std::vector<const PyDevice*>& devices,
               const std::optional<Array>& gathered, const std::vector<Array>& samples,
               const std::vector<std::optional<PyDeviceDigests>>& digested) {
                fill(extents.shared->rows, &WriteExtent::device, device, "device");
                if (gathered) fill(extents.shared->rows, &WriteExtent::gathered, *gathered, "gathered");
                extents.shared->devices = devices_of(devices);
                extents.shared->samples = lines_of(samples);
                extents.shared->digested.clear();
                for (const std::optional<PyDeviceDigests>& digests : digested)
                    extents.shared->digested.push_back(digests ? digests->digested.shared.get() : nullptr);
            },
            "device"_a, "devices"_a, nb::kw_only(), "gathered"_a = nb::none(), "samples"_a = std::vector<Array>(),
            "digested"_a = std::vector<std::optional<PyDeviceDigests>>())
        .def(
            "mark_derived",
            [](PyWriteExtents& extents, const Array& derivation, const Array& source_chunk) {
                add_derivations(derivation, source_chunk, extents.shared->rows);
            },
            "derivation"_a, "source_chunk"_a)
        .def(
            "attach_supply",
            [](PyWriteExtents& extents, const PySourceSupply& supply) {
                if (supply.shared->rows() != extents.shared->rows.size())
                    throw std::invalid_argument("supply: it has a different number of rows");
                extents.shared->supply = supply.shared;
            },
            "supply"_a)
        .def(
            "encode",
            [](PyWriteExtents& extents, const PyEncoder& encoder, std::uint32_t encoded_from) {
                extents.shared->encoder = encoder.shared;
                extents.shared->encoded_from = encoded_from;
            },
            "encoder"_a, "encoded_from"_a)
        .def(
            "watch",
            [](PyWriteExtents& extents, const std::string& how) {
                std::shared_ptr<MutationDetector> watch;
                {
                    const nb::gil_scoped_release unlocked;
                    watch = std::make_shared<MutationDetector>(*extents.shared, watching_of(how));
                }
                extents.watch.shared = std::move(watch);
            },
            "how"_a)
        .def("changed_rows",
             [](const PyWriteExtents& extents) {
                 const std::shared_ptr<MutationDetector> watch = extents.watch.shared;
                 if (watch == nullptr) throw std::invalid_argument("changed_rows: these rows are not watched");
                 const nb::gil_scoped_release unlocked;
                 return watch->changed_rows();
             })
        .def("unwatch",
             [](PyWriteExtents& extents) {
                 const std::shared_ptr<MutationDetector> watch = std::move(extents.watch.shared);
                 const nb::gil_scoped_release unlocked;
                 if (watch != nullptr) watch->release();
             })
        .def("sample_digests",
             [](const PyWriteExtents& extents) {
                 std::vector<std::uint64_t> digests;
                 {
                     const nb::gil_scoped_release unlocked;
                     digests = sample_digests(*extents.shared);
                 }
                 return to_numpy(std::move(digests));
             })
        .def(
            "copy",
            [](const PyWriteExtents& extents, std::size_t row, std::uint64_t begin, std::uint64_t end,
               std::uintptr_t target) {
                const nb::gil_scoped_release unlocked;
                return copy_part(*extents.shared, row, begin, end, reinterpret_cast<std::byte*>(target));
            },
            "row"_a, "begin"_a, "end"_a, "target"_a);
}

inline void bind_read_extents(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<PyReadExtents>(module, "ReadExtents")
        .def(
            "__init__",
            [](PyReadExtents* self, const Array& file, const Array& offset, const Array& length, const Array& chunk,
               const Array& first, const Array& last, const Array& digests) {
                auto extents = std::make_shared<ReadExtents>();
                std::vector<ReadExtent>& rows = extents->rows;
                rows.resize(row_count(file, "file"));
                fill(rows, &ReadExtent::file, file, "file");
                fill(rows, &ReadExtent::offset, offset, "offset");
                fill(rows, &ReadExtent::length, length, "length");
                fill(rows, &ReadExtent::chunk, chunk, "chunk");
                fill(rows, &ReadExtent::first, first, "first");
                fill(rows, &ReadExtent::last, last, "last");
                extents->digests = column<std::uint64_t>(digests, "digests", row_count(digests, "digests"));
                new (self) PyReadExtents{{std::move(extents)}};
            },
            nb::kw_only(), "file"_a, "offset"_a, "length"_a, "chunk"_a, "first"_a, "last"_a, "digests"_a)
        .def(
            "aim",
            [](PyReadExtents& extents, const Array& address, const Array& layout,
               const std::vector<const PyScatter*>& layouts) {
                fill(extents.shared->rows, &ReadExtent::address, address, "address");
                fill(extents.shared->rows, &ReadExtent::layout, layout, "layout");
                extents.shared->layouts = layouts_of(layouts);
            },
            "address"_a, "layout"_a, "layouts"_a)
        .def(
            "place_on_devices",
            [](PyReadExtents& extents, const Array& device, const std::vector<const PyDevice*>& devices) {
                fill(extents.shared->rows, &ReadExtent::device, device, "device");
                extents.shared->devices = devices_of(devices);
            },
            "device"_a, "devices"_a)
        .def(
            "locate_chunks",
            [](PyReadExtents& extents, const std::optional<StoredColumns>& stored,
               const std::optional<BaseColumns>& bases) {
                if (stored) extents.shared->stored = chunk_places(*stored, extents.shared->digests.size());
                if (bases) extents.shared->bases = chunk_bases(*bases);
            },
            "stored"_a, "bases"_a)
        .def_prop_ro("file_groups", [](const PyReadExtents& extents) { return file_groups_of(*extents.shared); });
}

}  // namespace flowstone
