// The extension module flowstone._native: converts arguments, and releases the interpreter lock. No policy.
// The contract is src/flowstone/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_codecs.h"
#include "bind_collapse.h"
#include "bind_columns.h"
#include "bind_device.h"
#include "bind_feed.h"
#include "bind_held.h"
#include "bind_layouts.h"
#include "bind_mapping.h"
#include "bind_queues.h"
#include "bind_tensors.h"
#include "bounds.h"
#include "engine.h"
#include "guarded_copy.h"
#include "probe.h"
#include "requests.h"
#include "mutation_detector.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flowstone {
namespace {

using Unlocked = nb::gil_scoped_release;

struct PyArena : Held<Arena> {};
struct PyFile : Held<const File> {};
struct PyWriteExtents : Held<WriteExtents> {
    Held<MutationDetector> watch{};  // until a job takes it over; null: the job begins one
};
struct PyReadExtents : Held<const ReadExtents> {};

struct PyWriteJob : Waiting<WriteJob> {};
struct PyReadJob : Waiting<ReadJob> {};
struct PyEngine : Waiting<Engine> {};
struct PyGuardedCopy : Waiting<GuardedCopy> {};

Priority priority_of(bool background) { return background ? Priority::background : Priority::normal; }

std::vector<std::shared_ptr<Device>> devices_of(const std::vector<const PyDevice*>& found) {
    std::vector<std::shared_ptr<Device>> devices;
    for (const PyDevice* device : found) devices.push_back(device->held);
    return devices;
}

/// Lines in the caller's memory.
std::vector<std::span<const Line>> lines_of(const std::vector<Array>& samples) {
    std::vector<std::span<const Line>> lines;
    for (const Array& one : samples) {
        const bool fits = one.ndim() == 1 && one.dtype() == nb::dtype<std::uint8_t>() && one.shape(0) % sizeof(Line) == 0;
        if (!fits || (one.shape(0) != 0 && one.stride(0) != 1))
            throw std::invalid_argument("samples: wrong dtype, length or number of dimensions");
        lines.emplace_back(static_cast<const Line*>(one.data()), one.shape(0) / sizeof(Line));
    }
    return lines;
}

PyWriteExtents make_write_extents(const Array& file, const Array& offset, const Array& length, const Array& address,
                            const Array& chunk, const Array& layout, const std::vector<const PyGather*>& layouts,
                            std::uint64_t chunks, const std::optional<Array>& lazy, const std::optional<Array>& device,
                            const std::vector<const PyDevice*>& devices, const std::vector<Array>& samples,
                            const std::optional<Array>& seed, const std::optional<DerivedColumns>& derived, const std::optional<PyFeed>& feed,
                            const std::optional<Array>& gathered, const std::vector<std::optional<PyDigested>>& digested) {
    const std::size_t count = row_count(file);
    const auto files = column<std::uint32_t>(file, "file", count);
    const auto offsets = column<std::uint64_t>(offset, "offset", count);
    const auto lengths = column<std::uint64_t>(length, "length", count);
    const auto addresses = column<std::uint64_t>(address, "address", count);
    const auto first_chunks = column<std::uint64_t>(chunk, "chunk", count);
    const auto numbers = column<std::int64_t>(layout, "layout", count);
    const auto flags = lazy ? column<bool>(*lazy, "lazy", count) : std::vector<bool>(count, false);
    const auto places = device ? column<std::int32_t>(*device, "device", count) : std::vector<std::int32_t>(count, on_host);
    const auto seeds = seed ? column<std::uint64_t>(*seed, "seed", count) : std::vector<std::uint64_t>(count, 0);
    auto rows = std::make_shared<WriteExtents>();
    rows->devices = devices_of(devices);
    rows->samples = lines_of(samples);
    for (const std::optional<PyDigested>& one : digested) rows->digested.push_back(one ? one->digested.held.get() : nullptr);
    rows->layouts = layouts_of(layouts);
    rows->chunks = chunks;
    rows->rows.reserve(count);
    for (std::size_t i = 0; i < count; ++i)
        rows->rows.push_back(
            {offsets[i], lengths[i], addresses[i], first_chunks[i], numbers[i], files[i], flags[i], places[i], seeds[i]});
    if (gathered) {
        const auto are_gathered = column<bool>(*gathered, "gathered", count);
        for (std::size_t i = 0; i < count; ++i) rows->rows[i].gathered = are_gathered[i];
    }
    if (derived) add_derivations(*derived, rows->rows);
    if (feed) {
        if (feed->held->rows() != count) throw std::invalid_argument("feed: not as many rows");
        if (lazy || device) throw std::invalid_argument("feed: rows that are lazy or on a device");
        rows->feed = feed->held;
    }
    return {{std::move(rows)}, {}};
}

PyReadExtents make_read_extents(const Array& file, const Array& offset, const Array& length, const Array& address,
                          const Array& chunk, const Array& first, const Array& last, const Array& layout,
                          const std::vector<const PyScatter*>& layouts, const Array& digests, const std::optional<Array>& device,
                          const std::vector<const PyDevice*>& devices, const std::optional<StoredColumns>& stored,
                          const std::optional<BaseColumns>& bases) {
    const std::size_t count = row_count(file);
    const auto files = column<std::uint32_t>(file, "file", count);
    const auto offsets = column<std::uint64_t>(offset, "offset", count);
    const auto lengths = column<std::uint64_t>(length, "length", count);
    const auto addresses = column<std::uint64_t>(address, "address", count);
    const auto zero_chunks = column<std::uint64_t>(chunk, "chunk", count);
    const auto firsts = column<std::uint64_t>(first, "first", count);
    const auto lasts = column<std::uint64_t>(last, "last", count);
    const auto numbers = column<std::int64_t>(layout, "layout", count);
    if (digests.ndim() != 1) throw std::invalid_argument("digests: wrong dtype or number of dimensions");
    const auto places = device ? column<std::int32_t>(*device, "device", count) : std::vector<std::int32_t>(count, on_host);
    auto rows = std::make_shared<ReadExtents>();
    rows->devices = devices_of(devices);
    rows->layouts = layouts_of(layouts);
    rows->digests = column<std::uint64_t>(digests, "digests", digests.shape(0));
    if (stored) rows->stored = chunk_places(*stored, rows->digests.size());
    if (bases) rows->bases = chunk_bases(*bases);
    rows->rows.reserve(count);
    for (std::size_t i = 0; i < count; ++i)
        rows->rows.push_back(
            {offsets[i], lengths[i], addresses[i], zero_chunks[i], firsts[i], lasts[i], numbers[i], files[i], places[i]});
    return {{std::move(rows)}};
}

Watching watching_of(const std::string& name) {
    if (name == "samples") return Watching::samples;
    if (name == "auto" || name == "digests") return Watching::automatic;  // digests come with the rows
    if (name == "exact") return Watching::exact;
    throw std::invalid_argument("watch must be 'auto', 'digests', 'exact' or 'samples'");
}

PyWriteJob start_write(const PyEngine& engine, const PyArena& arena,
                       const std::vector<std::tuple<const PyFile*, std::uint64_t>>& files, PyWriteExtents& rows,
                       std::uint64_t gap_bytes, std::optional<std::uint32_t> blocks, std::uint64_t bytes_per_s,
                       std::uint64_t cap_bytes_per_s, const std::string& watch, bool files_ready) {
    std::vector<TargetFile> targets;
    for (const auto& [file, bytes] : files) targets.push_back({file->held, bytes});
    PyWriteJob job;
    std::shared_ptr<MutationDetector> detector = std::move(rows.watch.held);
    const Unlocked unlocked;
    const WriteOptions options{gap_bytes, blocks.value_or(UINT32_MAX), bytes_per_s, cap_bytes_per_s, watching_of(watch), files_ready};
    job.held = engine.held->write(arena.held, targets, rows.held, options, std::move(detector));
    return job;
}

PyReadJob start_read(const PyEngine& engine, const PyArena& arena, const std::vector<std::optional<PyFile>>& files,
                     const PyReadExtents& rows, bool stop_at_bad, bool in_place, std::uint64_t request_bytes, bool ahead, bool lent) {
    std::vector<std::shared_ptr<const File>> opened;
    for (const std::optional<PyFile>& file : files) opened.push_back(file ? file->held : nullptr);
    PyReadJob job;
    const Unlocked unlocked;
    job.held = engine.held->read(arena.held, std::move(opened), rows.held, {stop_at_bad, in_place, request_bytes, ahead, lent});
    return job;
}

/// File, begin, end; of windows whose place an encoder decides, these are where they were planned.
std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> window_ranges(const PyWriteJob& job) {
    std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> ranges;
    for (const WriteWindow& window : job.held->windows()) ranges.emplace_back(window.file, window.begin, window.end);
    return ranges;
}

std::optional<Fault> run_plain_requests(const std::string& backend, const std::string& direction, std::uint32_t queue_depth,
                                        const std::vector<const PyFile*>& files, const Array& file, const Array& offset,
                                        const Array& address, const Array& length, bool register_memory) {
    const std::size_t count = row_count(file);
    PlainRequests requests{direction_of(direction), {}, {}, register_memory};
    for (const PyFile* opened : files) requests.files.push_back(opened->held);
    const auto numbers = column<std::uint32_t>(file, "file", count);
    const auto offsets = column<std::uint64_t>(offset, "offset", count);
    const auto addresses = column<std::uint64_t>(address, "address", count);
    const auto lengths = column<std::uint64_t>(length, "length", count);
    requests.rows.reserve(count);
    for (std::size_t i = 0; i < count; ++i) requests.rows.push_back({offsets[i], addresses[i], lengths[i], numbers[i]});
    const Unlocked unlocked;
    return run_requests(backend, queue_depth, requests);
}

/// The members that both kinds of job share.
template <class Job> nb::class_<Job> bind_job(nb::module_& module, const char* name) {
    return nb::class_<Job>(module, name)
        .def("wait", [](const Job& job, double timeout_s) { const Unlocked unlocked; return job.held->wait(timeout_s); }, "timeout_s"_a)
        .def("cancel", [](const Job& job) { const Unlocked unlocked; job.held->cancel(); })
        .def_prop_ro("done_bytes", [](const Job& job) { return job.held->done_bytes(); })
        .def_prop_ro("fault", [](const Job& job) { return job.held->fault(); })
        .def_prop_ro("cancelled", [](const Job& job) { return job.held->cancelled(); })
        .def_prop_ro("copied_bytes", [](const Job& job) { return job.held->copied_bytes(); })
        .def_prop_ro("requests", [](const Job& job) { return job.held->requests(); })
        .def_prop_ro("spans", [](const Job& job) {
            if (!job.held->wait(0)) throw std::invalid_argument("spans are complete after wait");
            return span_columns(job.held->spans());
        });
}

void bind_memory(nb::module_& module) {
    nb::class_<PyArena>(module, "Arena")
        .def("__init__", [](PyArena* self, std::uint64_t budget_bytes, std::uint64_t block_bytes, bool background) {
            new (self) PyArena{{std::make_shared<Arena>(budget_bytes, block_bytes, priority_of(background))}};
        }, nb::kw_only(), "budget_bytes"_a, "block_bytes"_a, "background"_a = false)
        .def_prop_ro("budget_bytes", [](const PyArena& arena) { return arena.held->budget_bytes(); })
        .def_prop_ro("block_bytes", [](const PyArena& arena) { return arena.held->block_bytes(); })
        .def_prop_ro("touched_bytes", [](const PyArena& arena) { return arena.held->touched_bytes(); })
        .def_prop_ro("free_bytes", [](const PyArena& arena) { return arena.held->free_bytes(); })
        .def("grow", [](const PyArena& arena, std::uint64_t total_bytes, bool when_idle) {
            arena.held->grow(total_bytes, when_idle);
        }, "total_bytes"_a, nb::kw_only(), "when_idle"_a = false)
        .def("grow_at_once", [](const PyArena& arena, std::uint64_t total_bytes, std::size_t threads) {
            const Unlocked unlocked;
            arena.held->grow_at_once(total_bytes, threads);
        }, "total_bytes"_a, nb::kw_only(), "threads"_a)
        .def("wait_grown", [](const PyArena& arena, double timeout_s) { const Unlocked unlocked; return arena.held->wait_grown(timeout_s); }, "timeout_s"_a)
        .def("use", [](const PyArena& arena, const PyDevice& device) { const Unlocked unlocked; arena.held->use({&device.held, 1}); }, "device"_a)
        .def("place", [](const PyArena& arena, int node) { return arena.held->place(node); }, "node"_a)
        .def_prop_ro("pinned_bytes", [](const PyArena& arena) { return arena.held->pinned_bytes(); })
        .def_prop_ro("refusal", [](const PyArena& arena) { return arena.held->refusal(); })
        .def("close", [](const PyArena& arena) { const Unlocked unlocked; arena.held->close(); });
    bind_mapping(module);
    nb::class_<PyFile>(module, "File")
        .def("__init__", [](PyFile* self, int fd, std::string path, std::uint32_t alignment, std::uintptr_t mapped,
                            const std::optional<PyMapping>& mapping, std::uint32_t of_path, bool may_move) {
            File file{fd, std::make_shared<std::string>(std::move(path)), alignment, mapped, nullptr, of_path, may_move};
            if (mapping) file.mapped = mapping->held->address(), file.mapping = mapping->held;
            new (self) PyFile{{std::make_shared<const File>(std::move(file))}};
        }, nb::kw_only(), "fd"_a, "path"_a, "alignment"_a, "mapped"_a = 0, "mapping"_a = nb::none(), "of_path"_a = 0, "may_move"_a = false)
        .def_prop_ro("fd", [](const PyFile& file) { return file.held->fd; })
        .def_prop_ro("alignment", [](const PyFile& file) { return file.held->alignment; })
        .def_prop_ro("path", [](const PyFile& file) { return *file.held->path; });
}

std::vector<CopyRow> copy_rows(const Array& source, const Array& length, const Array& target) {
    const std::size_t count = row_count(source);
    const auto sources = column<std::uint64_t>(source, "source", count);
    const auto lengths = column<std::uint64_t>(length, "length", count);
    const auto targets = column<std::uint64_t>(target, "target", count);
    std::vector<CopyRow> rows;
    rows.reserve(count);
    for (std::size_t i = 0; i < count; ++i) rows.push_back({sources[i], lengths[i], targets[i]});
    return rows;
}

void bind_copies(nb::module_& module) {
    nb::class_<PyGuardedCopy>(module, "GuardedCopy")
        .def("__init__", [](PyGuardedCopy* self, const Array& source, const Array& length, const Array& target, bool guard) {
            std::vector<CopyRow> rows = copy_rows(source, length, target);
            std::shared_ptr<GuardedCopy> copy;
            {
                const Unlocked unlocked;
                copy = std::make_shared<GuardedCopy>(std::move(rows), guard);
            }
            new (self) PyGuardedCopy();
            self->held = std::move(copy);
        }, nb::kw_only(), "source"_a, "length"_a, "target"_a, "guard"_a = true)
        .def("wait", [](const PyGuardedCopy& copy, double timeout_s) {
            const Unlocked unlocked;
            return copy.held->wait(std::chrono::duration<double>(timeout_s));
        }, "timeout_s"_a)
        .def_prop_ro("gone", [](const PyGuardedCopy& copy) { return copy.held->gone(); })
        .def_prop_ro("guarded_bytes", [](const PyGuardedCopy& copy) { return copy.held->guarded_bytes(); });
    module.def("guarded_copy_refusal", &GuardedCopy::refusal, nb::call_guard<Unlocked>());
}

void bind_lines(nb::module_& module) {
    module.def("line_begins", [](const Array& row_bytes, const Array& seed) {
        if (row_bytes.ndim() != 1) throw std::invalid_argument("row_bytes: wrong dtype or number of dimensions");
        const auto lengths = column<std::uint64_t>(row_bytes, "row_bytes", row_bytes.shape(0));
        const auto seeds = column<std::uint64_t>(seed, "seed", lengths.size());
        std::vector<std::uint64_t> begins;
        for (std::size_t i = 0; i < lengths.size(); ++i)
            for (std::uint64_t line = 0; line < chunk_count(lengths[i]) * lines_per_chunk; ++line)
                begins.push_back(line_begin(lengths[i], line, seeds[i]));
        return to_numpy(std::move(begins));
    }, "row_bytes"_a, "seed"_a);
    module.attr("LINE_BYTES") = sizeof(Line);
    module.attr("LINES_PER_CHUNK") = lines_per_chunk;
}

void bind_rows(nb::module_& module) {
    bind_feed(module);
    nb::class_<PyWriteExtents>(module, "WriteExtents")
        .def("__init__", [](PyWriteExtents* self, const Array& file, const Array& offset, const Array& length, const Array& address,
                            const Array& chunk, const Array& layout, const std::vector<const PyGather*>& layouts, std::uint64_t chunks,
                            const std::optional<Array>& lazy, const std::optional<Array>& device,
                            const std::vector<const PyDevice*>& devices, const std::vector<Array>& samples,
                            const std::optional<Array>& seed, const std::optional<DerivedColumns>& derived, const std::optional<PyFeed>& feed,
                            const std::optional<Array>& gathered, const std::vector<std::optional<PyDigested>>& digested) {
            new (self) PyWriteExtents(make_write_extents(file, offset, length, address, chunk, layout, layouts, chunks, lazy, device, devices,
                                                   samples, seed, derived, feed, gathered, digested));
        }, nb::kw_only(), "file"_a, "offset"_a, "length"_a, "address"_a, "chunk"_a, "layout"_a, "layouts"_a, "chunks"_a,
           "lazy"_a = nb::none(), "device"_a = nb::none(), "devices"_a = std::vector<const PyDevice*>(), "samples"_a = std::vector<Array>(),
           "seed"_a = nb::none(), "derived"_a = nb::none(), "feed"_a = nb::none(),
           "gathered"_a = nb::none(), "digested"_a = std::vector<std::optional<PyDigested>>())
        .def("encode", [](PyWriteExtents& rows, const PyEncoder& encoder, std::uint32_t encoded_from) {
            if (rows.held->feed != nullptr) throw std::invalid_argument("encode: rows of a feed");
            rows.held->encoder = encoder.held;
            rows.held->encoded_from = encoded_from;
        }, "encoder"_a, "encoded_from"_a)
        .def("watch", [](PyWriteExtents& rows, const std::string& how) {
            std::shared_ptr<MutationDetector> watch;
            {
                const Unlocked unlocked;
                watch = std::make_shared<MutationDetector>(*rows.held, watching_of(how));
            }
            rows.watch.held = std::move(watch);
        }, "how"_a)
        .def("changed_rows", [](const PyWriteExtents& rows) {
            const std::shared_ptr<MutationDetector> watch = rows.watch.held;
            if (watch == nullptr) throw std::invalid_argument("changed_rows: these rows are not watched");
            const Unlocked unlocked;
            return watch->changed_rows();
        })
        .def("unwatch", [](PyWriteExtents& rows) {
            const std::shared_ptr<MutationDetector> watch = std::move(rows.watch.held);
            const Unlocked unlocked;
            if (watch != nullptr) watch->let_go();
        })
        .def("sample_digests", [](const PyWriteExtents& rows) {
            std::vector<std::uint64_t> digests;
            {
                const Unlocked unlocked;
                digests = sample_digests(*rows.held);
            }
            return to_numpy(std::move(digests));
        })
        .def("copy", [](const PyWriteExtents& rows, std::size_t row, std::uint64_t begin, std::uint64_t end, std::uintptr_t target) {
            const Unlocked unlocked;
            return copy_part(*rows.held, row, begin, end, reinterpret_cast<std::byte*>(target));
        }, "row"_a, "begin"_a, "end"_a, "target"_a);
    nb::class_<PyReadExtents>(module, "ReadExtents")
        .def("__init__", [](PyReadExtents* self, const Array& file, const Array& offset, const Array& length, const Array& address,
                            const Array& chunk, const Array& first, const Array& last, const Array& layout,
                            const std::vector<const PyScatter*>& layouts, const Array& digests,
                            const std::optional<Array>& device, const std::vector<const PyDevice*>& devices,
                            const std::optional<StoredColumns>& stored, const std::optional<BaseColumns>& bases) {
            new (self) PyReadExtents(make_read_extents(file, offset, length, address, chunk, first, last, layout, layouts, digests,
                                                       device, devices, stored, bases));
        }, nb::kw_only(), "file"_a, "offset"_a, "length"_a, "address"_a, "chunk"_a, "first"_a, "last"_a, "layout"_a,
           "layouts"_a, "digests"_a, "device"_a = nb::none(), "devices"_a = std::vector<const PyDevice*>(),
           "stored"_a = nb::none(), "bases"_a = nb::none())
        .def_prop_ro("file_groups", [](const PyReadExtents& rows) { return file_groups_of(*rows.held); });
}

void bind_jobs(nb::module_& module) {
    nb::class_<Fault>(module, "Fault")
        .def_ro("operation", &Fault::operation)
        .def_ro("errno", &Fault::error)
        .def_prop_ro("path", [](const Fault& fault) { return fault.path == nullptr ? std::string() : *fault.path; })
        .def_ro("offset", &Fault::offset)
        .def_ro("length", &Fault::length)
        .def("__repr__", [](const Fault& fault) {
            return "Fault(operation='" + fault.operation + "', errno=" + std::to_string(fault.error) + ", path='" + (fault.path == nullptr ? std::string() : *fault.path) +
                   "', offset=" + std::to_string(fault.offset) + ", length=" + std::to_string(fault.length) + ")";
        });
    bind_job<PyWriteJob>(module, "WriteJob")
        .def("files_ready", [](const PyWriteJob& job) { const Unlocked unlocked; job.held->files_ready(); })
        .def("expedite", [](const PyWriteJob& job) { const Unlocked unlocked; job.held->expedite(); })
        .def("wait_early", [](const PyWriteJob& job, double timeout_s) {
            const Unlocked unlocked;
            return job.held->wait_early(timeout_s);
        }, "timeout_s"_a)
        .def("wait_queued", [](const PyWriteJob& job, double timeout_s) {
            const Unlocked unlocked;
            return job.held->wait_queued(timeout_s);
        }, "timeout_s"_a)
        .def("wait_captured", [](const PyWriteJob& job, double timeout_s) {
            const Unlocked unlocked;
            return job.held->wait_captured(timeout_s);
        }, "timeout_s"_a)
        .def("first_bad", [](const PyWriteJob& job, std::uint32_t file, int fd) {
            if (!job.held->wait(0)) throw std::invalid_argument("digests are complete after wait");
            const Unlocked unlocked;
            return job.held->first_bad(file, fd);
        }, "file"_a, "fd"_a)
        .def_prop_ro("huge_bytes", [](const PyWriteJob& job) { return job.held->detector().pages().huge_bytes(); })
        .def_prop_ro("exact_bytes", [](const PyWriteJob& job) { return job.held->detector().pages().exact_bytes() + job.held->detector().digested_bytes(); })
        .def_prop_ro("sampled_bytes", [](const PyWriteJob& job) { return job.held->detector().sampled_bytes(); })
        .def_prop_ro("sampled_first", [](const PyWriteJob& job) -> std::optional<std::tuple<std::size_t, std::string>> {
            const std::optional<ExtentPages::Left>& left = job.held->detector().pages().left();
            if (!left) return std::nullopt;
            return std::tuple(left->row, left->reason);
        })
        .def_prop_ro("digests", [](const PyWriteJob& job) {
            if (!job.held->wait(0)) throw std::invalid_argument("digests are complete after wait");
            return to_numpy(job.held->digests());
        })
        .def_prop_ro("stored", [](const PyWriteJob& job) {
            if (!job.held->wait(0)) throw std::invalid_argument("what is stored is known after wait");
            using Columns = std::optional<decltype(stored_columns({}))>;
            return job.held->file_ends().empty() ? Columns() : Columns(stored_columns(job.held->stored()));
        })
        .def_prop_ro("windows", &window_ranges)
        .def_prop_ro("file_ends", [](const PyWriteJob& job) { return job.held->file_ends(); });
    bind_job<PyReadJob>(module, "ReadJob")
        .def("aim", [](const PyReadJob& job, const PyReadExtents& rows) { const Unlocked unlocked; job.held->aim(rows.held); })
        .def_prop_ro("requested_bytes", [](const PyReadJob& job) { return job.held->requested_bytes(); })
        .def_prop_ro("direct_bytes", [](const PyReadJob& job) { return job.held->direct_bytes(); })
        .def_prop_ro("bad_chunks", [](const PyReadJob& job) { return to_numpy(job.held->bad_chunks()); })
        .def_prop_ro("touched", [](const PyReadJob& job) { return to_numpy_bool(job.held->touched()); });
}

void bind_engine(nb::module_& module) {
    nb::class_<PyEngine> engine(module, "Engine");
    engine
        .def("__init__", [](PyEngine* self, std::string backend, std::uint32_t queue_depth, std::uint64_t request_bytes,
                            std::uint32_t workers, bool background, const std::vector<const PyEngine*>& paths) {
            std::vector<std::shared_ptr<Engine>> engines;
            for (const PyEngine* path : paths) engines.push_back(path->held);
            auto engine = std::make_shared<Engine>(
                EngineOptions{std::move(backend), queue_depth, request_bytes, workers, nullptr, priority_of(background)}, engines);
            new (self) PyEngine();
            self->held = std::move(engine);
        }, nb::kw_only(), "backend"_a, "queue_depth"_a, "request_bytes"_a, "workers"_a, "background"_a = false, "paths"_a = std::vector<const PyEngine*>())
        .def_prop_ro("backend", [](const PyEngine& engine) { return engine.held->backend(); })
        .def("write", &start_write, "arena"_a, "files"_a, "rows"_a, nb::kw_only(), "gap_bytes"_a = 0,
             "blocks"_a = nb::none(), "bytes_per_s"_a = 0, "cap_bytes_per_s"_a = 0,
             "watch"_a = "samples", "files_ready"_a = true)
        .def("read", &start_read, "arena"_a, "files"_a, "rows"_a, nb::kw_only(), "stop_at_bad"_a = true,
             "in_place"_a = true, "request_bytes"_a = 0, "ahead"_a = false, "lent"_a = false)
        .def("close", [](const PyEngine& engine) { const Unlocked unlocked; engine.held->close(); });
    bind_queues<PyEngine, PyFile>(engine);
}

}  // namespace

NB_MODULE(_native, module) {
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const std::system_error& failure) {
            const nb::object arguments = nb::make_tuple(failure.code().value(), failure.what());
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
        } catch (const std::bad_alloc&) {
            // Reported as an OS error, so that Python translates it like others.
            errno = ENOMEM;
            PyErr_SetFromErrno(PyExc_OSError);
        }
    });
    module.attr("BLOCK_ALIGNMENT_BYTES") = block_alignment_bytes;
    module.attr("CHUNK_BYTES") = chunk_bytes;
    module.attr("NO_DIGEST") = no_digest;
    module.attr("PHASES") = std::vector<std::string>{"capture", "encode", "write", "read", "deliver"};
    module.attr("VERIFY_ONLY") = verify_only;
    module.def("has_io_uring", &has_io_uring, nb::call_guard<Unlocked>());
    module.def("probe_direct", &probe_direct, "directory"_a, nb::call_guard<Unlocked>());
    module.def("is_byte_addressable", &is_byte_addressable, "fd"_a, nb::call_guard<Unlocked>());
    module.def("reserve_file", &reserve_file, "fd"_a, "size_bytes"_a, nb::call_guard<Unlocked>());
    module.def("run_requests", &run_plain_requests, nb::kw_only(), "backend"_a, "direction"_a, "queue_depth"_a, "files"_a,
               "file"_a, "offset"_a, "address"_a, "length"_a, "register"_a = false);
    module.def("xxh3_64", &digest_buffer);
    module.def("digest_memory", &digest_memory, "address"_a, "length"_a);
    module.def("written_pages_refusal", &PageWatch::refusal, nb::call_guard<Unlocked>());
    bind_collapse(module);
    bind_memory(module);
    bind_copies(module);
    bind_devices(module);
    bind_lines(module);
    bind_codecs(module);
    bind_layouts(module);
    bind_rows(module);
    bind_tensors(module);
    bind_jobs(module);
    bind_engine(module);
}

}  // namespace flowstone
