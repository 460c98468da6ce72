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

#include "bind/bind_codecs.h"
#include "bind/bind_collapse.h"
#include "bind/bind_columns.h"
#include "bind/bind_device.h"
#include "bind/bind_extents.h"
#include "bind/bind_source_supply.h"
#include "bind/bind_handles.h"
#include "bind/bind_layouts.h"
#include "bind/bind_mapping.h"
#include "bind/bind_queues.h"
#include "bind/bind_tensors.h"
#include "bounds.h"
#include "io/engine.h"
#include "capture/guarded_copy.h"
#include "io/probe.h"
#include "io/requests.h"
#include "watch/mutation_detector.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flowstone {
namespace {

using Unlocked = nb::gil_scoped_release;

struct PyArena : SharedHandle<Arena> {};
struct PyFile : SharedHandle<const File> {};
struct PyWriteJob : JoiningHandle<WriteJob> {};
struct PyReadJob : JoiningHandle<ReadJob> {};
struct PyEngine : JoiningHandle<Engine> {};
struct PyGuardedCopy : JoiningHandle<GuardedCopy> {};

Priority priority_of(bool background) { return background ? Priority::background : Priority::normal; }

PyWriteJob start_write(const PyEngine& engine, const PyArena& arena,
                       const std::vector<std::tuple<const PyFile*, std::uint64_t>>& files, PyWriteExtents& rows,
                       const std::optional<WriteOptions>& options) {
    std::vector<TargetFile> targets;
    for (const auto& [file, bytes] : files) targets.push_back({file->shared, bytes});
    PyWriteJob job;
    std::shared_ptr<MutationDetector> detector = std::move(rows.watch.shared);
    const Unlocked unlocked;
    job.shared =
        engine.shared->write(arena.shared, targets, rows.shared, options.value_or(WriteOptions()), std::move(detector));
    return job;
}

PyReadJob start_read(const PyEngine& engine, const PyArena& arena, const std::vector<std::optional<PyFile>>& files,
                     const PyReadExtents& rows, const std::optional<ReadOptions>& options) {
    std::vector<std::shared_ptr<const File>> opened;
    for (const std::optional<PyFile>& file : files) opened.push_back(file ? file->shared : nullptr);
    PyReadJob job;
    const Unlocked unlocked;
    job.shared = engine.shared->read(arena.shared, std::move(opened), rows.shared, options.value_or(ReadOptions()));
    return job;
}

/// File, begin, end of each window; for windows whose place an encoder decides, the planned ones.
std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> window_ranges(const PyWriteJob& job) {
    std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> ranges;
    for (const WriteWindow& window : job.shared->windows()) ranges.emplace_back(window.file, window.begin, window.end);
    return ranges;
}

/// Columns: file, offset, address, length.
using RequestColumns = std::tuple<Array, Array, Array, Array>;

std::optional<Fault> run_plain_requests(const std::string& backend, const std::string& direction,
                                        std::uint32_t queue_depth, const std::vector<const PyFile*>& files,
                                        const RequestColumns& columns, bool register_memory) {
    PlainRequests requests{direction_of(direction), {}, {}, register_memory};
    for (const PyFile* file : files) requests.files.push_back(file->shared);
    requests.rows.resize(row_count(std::get<0>(columns), "file"));
    fill(requests.rows, &PlainRequest::file, std::get<0>(columns), "file");
    fill(requests.rows, &PlainRequest::offset, std::get<1>(columns), "offset");
    fill(requests.rows, &PlainRequest::address, std::get<2>(columns), "address");
    fill(requests.rows, &PlainRequest::length, std::get<3>(columns), "length");
    const Unlocked unlocked;
    return run_requests(backend, queue_depth, requests);
}

/// The members that both kinds of job share.
template <class Job> nb::class_<Job> bind_job(nb::module_& module, const char* name) {
    return nb::class_<Job>(module, name)
        .def(
            "wait",
            [](const Job& job, double timeout_s) {
                const Unlocked unlocked;
                return job.shared->wait(timeout_s);
            },
            "timeout_s"_a)
        .def("cancel",
             [](const Job& job) {
                 const Unlocked unlocked;
                 job.shared->cancel();
             })
        .def_prop_ro("done_bytes", [](const Job& job) { return job.shared->done_bytes(); })
        .def_prop_ro("fault", [](const Job& job) { return job.shared->fault(); })
        .def_prop_ro("cancelled", [](const Job& job) { return job.shared->cancelled(); })
        .def_prop_ro("copied_bytes", [](const Job& job) { return job.shared->copied_bytes(); })
        .def_prop_ro("requests", [](const Job& job) { return job.shared->requests(); })
        .def_prop_ro("spans", [](const Job& job) {
            if (!job.shared->wait(0)) throw std::invalid_argument("spans are complete after wait");
            return span_columns(job.shared->spans());
        });
}

void bind_memory(nb::module_& module) {
    nb::class_<PyArena>(module, "Arena")
        .def(
            "__init__",
            [](PyArena* self, std::uint64_t budget_bytes, std::uint64_t block_bytes, bool background) {
                new (self) PyArena{{std::make_shared<Arena>(budget_bytes, block_bytes, priority_of(background))}};
            },
            nb::kw_only(), "budget_bytes"_a, "block_bytes"_a, "background"_a = false)
        .def_prop_ro("budget_bytes", [](const PyArena& arena) { return arena.shared->budget_bytes(); })
        .def_prop_ro("block_bytes", [](const PyArena& arena) { return arena.shared->block_bytes(); })
        .def_prop_ro("touched_bytes", [](const PyArena& arena) { return arena.shared->touched_bytes(); })
        .def_prop_ro("free_bytes", [](const PyArena& arena) { return arena.shared->free_bytes(); })
        .def(
            "grow",
            [](const PyArena& arena, std::uint64_t total_bytes, bool when_idle) {
                arena.shared->grow(total_bytes, when_idle);
            },
            "total_bytes"_a, nb::kw_only(), "when_idle"_a = false)
        .def(
            "grow_at_once",
            [](const PyArena& arena, std::uint64_t total_bytes, std::size_t threads) {
                const Unlocked unlocked;
                arena.shared->grow_at_once(total_bytes, threads);
            },
            "total_bytes"_a, nb::kw_only(), "threads"_a)
        .def(
            "wait_grown",
            [](const PyArena& arena, double timeout_s) {
                const Unlocked unlocked;
                return arena.shared->wait_grown(timeout_s);
            },
            "timeout_s"_a)
        .def(
            "use",
            [](const PyArena& arena, const PyDevice& device) {
                const Unlocked unlocked;
                arena.shared->use({&device.shared, 1});
            },
            "device"_a)
        .def(
            "place", [](const PyArena& arena, int node) { return arena.shared->place(node); }, "node"_a)
        .def_prop_ro("pinned_bytes", [](const PyArena& arena) { return arena.shared->pinned_bytes(); })
        .def_prop_ro("refusal", [](const PyArena& arena) { return arena.shared->refusal(); })
        .def("close", [](const PyArena& arena) {
            const Unlocked unlocked;
            arena.shared->close();
        });
    bind_mapping(module);
    nb::class_<PyFile>(module, "File")
        .def(
            "__init__",
            [](PyFile* self, int fd, std::string path, std::uint32_t alignment, std::uintptr_t mapped,
               const std::optional<PyMapping>& mapping, std::uint32_t of_path, bool may_move) {
                File file{fd,      std::make_shared<std::string>(std::move(path)), alignment, mapped, nullptr, of_path,
                          may_move};
                if (mapping) file.mapped = mapping->shared->address(), file.mapping = mapping->shared;
                new (self) PyFile{{std::make_shared<const File>(std::move(file))}};
            },
            nb::kw_only(), "fd"_a, "path"_a, "alignment"_a, "mapped"_a = 0, "mapping"_a = nb::none(), "of_path"_a = 0,
            "may_move"_a = false)
        .def_prop_ro("fd", [](const PyFile& file) { return file.shared->fd; })
        .def_prop_ro("alignment", [](const PyFile& file) { return file.shared->alignment; })
        .def_prop_ro("path", [](const PyFile& file) { return *file.shared->path; });
}

std::vector<CopyRow> copy_rows(const Array& source, const Array& length, const Array& target) {
    const std::size_t count = row_count(source, "source");
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
        .def(
            "__init__",
            [](PyGuardedCopy* self, const Array& source, const Array& length, const Array& target, bool guard) {
                std::vector<CopyRow> rows = copy_rows(source, length, target);
                std::shared_ptr<GuardedCopy> copy;
                {
                    const Unlocked unlocked;
                    copy = std::make_shared<GuardedCopy>(std::move(rows), guard);
                }
                new (self) PyGuardedCopy();
                self->shared = std::move(copy);
            },
            nb::kw_only(), "source"_a, "length"_a, "target"_a, "guard"_a = true)
        .def(
            "wait",
            [](const PyGuardedCopy& copy, double timeout_s) {
                const Unlocked unlocked;
                return copy.shared->wait(std::chrono::duration<double>(timeout_s));
            },
            "timeout_s"_a)
        .def_prop_ro("gone", [](const PyGuardedCopy& copy) { return copy.shared->gone(); })
        .def_prop_ro("guarded_bytes", [](const PyGuardedCopy& copy) { return copy.shared->guarded_bytes(); });
    module.def("guarded_copy_refusal", &GuardedCopy::refusal, nb::call_guard<Unlocked>());
}

void bind_lines(nb::module_& module) {
    module.def(
        "line_begins",
        [](const Array& row_bytes, const Array& seed) {
            if (row_bytes.ndim() != 1) throw std::invalid_argument("row_bytes: wrong dtype or number of dimensions");
            const auto lengths = column<std::uint64_t>(row_bytes, "row_bytes", row_bytes.shape(0));
            const auto seeds = column<std::uint64_t>(seed, "seed", lengths.size());
            std::vector<std::uint64_t> begins;
            for (std::size_t i = 0; i < lengths.size(); ++i)
                for (std::uint64_t line = 0; line < chunk_count(lengths[i]) * lines_per_chunk; ++line)
                    begins.push_back(line_begin(lengths[i], line, seeds[i]));
            return to_numpy(std::move(begins));
        },
        "row_bytes"_a, "seed"_a);
    module.attr("LINE_BYTES") = sizeof(Line);
    module.attr("LINES_PER_CHUNK") = lines_per_chunk;
}

void bind_jobs(nb::module_& module) {
    nb::class_<Fault>(module, "Fault")
        .def_ro("operation", &Fault::operation)
        .def_ro("errno", &Fault::error)
        .def_prop_ro("path", [](const Fault& fault) { return fault.path == nullptr ? std::string() : *fault.path; })
        .def_ro("offset", &Fault::offset)
        .def_ro("length", &Fault::length)
        .def("__repr__", [](const Fault& fault) {
            return "Fault(operation='" + fault.operation + "', errno=" + std::to_string(fault.error) + ", path='" +
                (fault.path == nullptr ? std::string() : *fault.path) + "', offset=" + std::to_string(fault.offset) +
                ", length=" + std::to_string(fault.length) + ")";
        });
    bind_job<PyWriteJob>(module, "WriteJob")
        .def("files_ready",
             [](const PyWriteJob& job) {
                 const Unlocked unlocked;
                 job.shared->files_ready();
             })
        .def("expedite",
             [](const PyWriteJob& job) {
                 const Unlocked unlocked;
                 job.shared->expedite();
             })
        .def(
            "wait_early",
            [](const PyWriteJob& job, double timeout_s) {
                const Unlocked unlocked;
                return job.shared->wait_early(timeout_s);
            },
            "timeout_s"_a)
        .def(
            "wait_queued",
            [](const PyWriteJob& job, double timeout_s) {
                const Unlocked unlocked;
                return job.shared->wait_queued(timeout_s);
            },
            "timeout_s"_a)
        .def(
            "wait_captured",
            [](const PyWriteJob& job, double timeout_s) {
                const Unlocked unlocked;
                return job.shared->wait_captured(timeout_s);
            },
            "timeout_s"_a)
        .def(
            "first_bad",
            [](const PyWriteJob& job, std::uint32_t file, int fd) {
                if (!job.shared->wait(0)) throw std::invalid_argument("digests are complete after wait");
                const Unlocked unlocked;
                return job.shared->first_bad(file, fd);
            },
            "file"_a, "fd"_a)
        .def_prop_ro("huge_bytes", [](const PyWriteJob& job) { return job.shared->detector().pages().huge_bytes(); })
        .def_prop_ro("exact_bytes",
                     [](const PyWriteJob& job) {
                         return job.shared->detector().pages().exact_bytes() + job.shared->detector().digested_bytes();
                     })
        .def_prop_ro("sampled_bytes", [](const PyWriteJob& job) { return job.shared->detector().sampled_bytes(); })
        .def_prop_ro("sampled_first",
                     [](const PyWriteJob& job) -> std::optional<std::tuple<std::size_t, std::string>> {
                         const std::optional<ExtentPages::UnheldRow>& left = job.shared->detector().pages().left();
                         if (!left) return std::nullopt;
                         return std::tuple(left->row, left->reason);
                     })
        .def_prop_ro("digests",
                     [](const PyWriteJob& job) {
                         if (!job.shared->wait(0)) throw std::invalid_argument("digests are complete after wait");
                         return to_numpy(job.shared->digests());
                     })
        .def_prop_ro("stored",
                     [](const PyWriteJob& job) {
                         if (!job.shared->wait(0)) throw std::invalid_argument("stored is complete after wait");
                         using Columns = std::optional<decltype(stored_columns({}))>;
                         return job.shared->file_ends().empty() ? Columns()
                                                                : Columns(stored_columns(job.shared->stored()));
                     })
        .def_prop_ro("windows", &window_ranges)
        .def_prop_ro("file_ends", [](const PyWriteJob& job) { return job.shared->file_ends(); });
    bind_job<PyReadJob>(module, "ReadJob")
        .def("aim",
             [](const PyReadJob& job, const PyReadExtents& rows) {
                 const Unlocked unlocked;
                 job.shared->aim(rows.shared);
             })
        .def_prop_ro("requested_bytes", [](const PyReadJob& job) { return job.shared->requested_bytes(); })
        .def_prop_ro("direct_bytes", [](const PyReadJob& job) { return job.shared->direct_bytes(); })
        .def_prop_ro("bad_chunks", [](const PyReadJob& job) { return to_numpy(job.shared->bad_chunks()); })
        .def_prop_ro("touched", [](const PyReadJob& job) { return to_numpy_bool(job.shared->touched()); });
}

void bind_options(nb::module_& module) {
    nb::class_<WriteOptions>(module, "WriteOptions")
        .def(
            "__init__",
            [](WriteOptions* self, std::uint64_t gap_bytes, std::optional<std::uint32_t> blocks,
               std::uint64_t bytes_per_s, std::uint64_t cap_bytes_per_s, const std::string& watch, bool files_ready) {
                new (self) WriteOptions{.gap_bytes = gap_bytes,
                                        .blocks = blocks.value_or(UINT32_MAX),
                                        .bytes_per_s = bytes_per_s,
                                        .cap_bytes_per_s = cap_bytes_per_s,
                                        .watching = watching_of(watch),
                                        .files_ready = files_ready};
            },
            nb::kw_only(), "gap_bytes"_a = 0, "blocks"_a = nb::none(), "bytes_per_s"_a = 0, "cap_bytes_per_s"_a = 0,
            "watch"_a = "samples", "files_ready"_a = true);
    nb::class_<ReadOptions>(module, "ReadOptions")
        .def(
            "__init__",
            [](ReadOptions* self, bool stop_at_bad, bool in_place, std::uint64_t request_bytes, bool ahead, bool lent) {
                new (self) ReadOptions{.stop_at_bad = stop_at_bad,
                                       .in_place = in_place,
                                       .request_bytes = request_bytes,
                                       .ahead = ahead,
                                       .lent = lent};
            },
            nb::kw_only(), "stop_at_bad"_a = true, "in_place"_a = true, "request_bytes"_a = 0, "ahead"_a = false,
            "lent"_a = false);
}

void bind_engine(nb::module_& module) {
    nb::class_<PyEngine> engine(module, "Engine");
    engine
        .def(
            "__init__",
            [](PyEngine* self, std::string backend, std::uint32_t queue_depth, std::uint64_t request_bytes,
               std::uint32_t workers, bool background, const std::vector<const PyEngine*>& paths) {
                std::vector<std::shared_ptr<Engine>> engines;
                for (const PyEngine* path : paths) engines.push_back(path->shared);
                auto engine = std::make_shared<Engine>(EngineOptions{std::move(backend), queue_depth, request_bytes,
                                                                     workers, nullptr, priority_of(background)},
                                                       engines);
                new (self) PyEngine();
                self->shared = std::move(engine);
            },
            nb::kw_only(), "backend"_a, "queue_depth"_a, "request_bytes"_a, "workers"_a, "background"_a = false,
            "paths"_a = std::vector<const PyEngine*>())
        .def_prop_ro("backend", [](const PyEngine& engine) { return engine.shared->backend(); })
        .def("write", &start_write, "arena"_a, "files"_a, "rows"_a, "options"_a = nb::none())
        .def("read", &start_read, "arena"_a, "files"_a, "rows"_a, "options"_a = nb::none())
        .def("close", [](const PyEngine& engine) {
            const Unlocked unlocked;
            engine.shared->close();
        });
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
    module.def("run_requests", &run_plain_requests, nb::kw_only(), "backend"_a, "direction"_a, "queue_depth"_a,
               "files"_a, "columns"_a, "register"_a = false);
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
    bind_source_supply(module);
    bind_write_extents(module);
    bind_read_extents(module);
    bind_tensors(module);
    bind_jobs(module);
    bind_options(module);
    bind_engine(module);
}

}  // namespace flowstone
