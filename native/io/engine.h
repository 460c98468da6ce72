// The entry point: one queue to the device, a few workers, and the jobs that run on them.
//
// write_plan and read_plan turn rows into windows; write_job and read_job run those on the workers and a backend (uring
// or posix), whose common interface is in backend.h.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/caller_backend.h"
#include "io/paths_backend.h"
#include "io/read_job.h"
#include "io/write_job.h"

namespace flowstone {

struct EngineOptions {
    std::string backend;  // "io_uring", "posix", "caller" (see caller_backend.h), or "paths" (paths_backend.h)
    std::uint32_t queue_depth = 0;  // requests in flight, at most
    std::uint64_t request_bytes = 0;  // a multiple of 4096
    std::uint32_t workers = 0;
    FaultInjector injector = nullptr;
    Priority priority = Priority::normal;  // of all its threads
};

/// A planned file: its size is fixed before the first byte is written.
struct TargetFile {
    std::shared_ptr<const File> file;
    std::uint64_t bytes = 0;
};

/// Jobs of one engine share its queue and workers, and may run concurrently. Any thread.
class Engine {
public:
    /// Throws std::invalid_argument (options), std::system_error (the backend cannot start). `paths`: only for backend
    /// "paths": the engine of each path, whose queue moves that path's bytes. They may be closed while jobs of this
    /// engine run.
    explicit Engine(const EngineOptions& options, const std::vector<std::shared_ptr<Engine>>& paths = {});
    ~Engine() { close(); }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    std::string backend() const { return backend_name_; }

    /// Start a job. Throws std::invalid_argument for invalid rows, a closed engine, or an arena whose blocks are
    /// smaller than a request. `detector`: see WriteJob.
    std::shared_ptr<WriteJob> write(std::shared_ptr<Arena> arena, const std::vector<TargetFile>& files,
                                    std::shared_ptr<const WriteExtents> rows, const WriteOptions& options,
                                    std::shared_ptr<MutationDetector> detector = nullptr);
    std::shared_ptr<ReadJob> read(std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
                                  std::shared_ptr<const ReadExtents> rows, const ReadOptions& options);

    /// The queue of ops that the caller carries out. Throws std::invalid_argument for another backend, or a closed
    /// engine.
    std::shared_ptr<CallerBackend> caller();

    /// The backend for several paths. Throws std::invalid_argument for another backend, or a closed engine.
    std::shared_ptr<PathsBackend> paths();

    /// Blocks until the running jobs have finished, then stops the threads. May be called again.
    void close();

private:
    std::shared_ptr<Backend> queue();
    std::size_t path_count();
    Machine machine_locked(const Arena& arena, std::uint64_t request_bytes = 0) const;
    template <class Running> void keep_locked(const std::shared_ptr<Running>& job);

    std::string backend_name_;
    std::mutex mutex_;
    Machine machine_;  // empty once closed
    std::shared_ptr<CallerBackend> caller_;  // the machine's backend, if it is of this type
    std::shared_ptr<PathsBackend> paths_;  // the machine's backend, if it is of this type
    std::vector<std::weak_ptr<Job>> jobs_;
    std::shared_ptr<const WrittenPages> written_pages_;  // kept open between jobs
};

}  // namespace flowstone
