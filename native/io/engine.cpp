#include "io/engine.h"

#include <limits>
#include <stdexcept>
#include <utility>

#include "bounds.h"

namespace flowstone {
namespace {

constexpr double forever_s = std::numeric_limits<double>::infinity();

void check_file(const File& file, std::size_t paths) {
    if (file.of_path >= paths) throw std::invalid_argument("file: of_path is not a path of the engine");
    if (file.fd < 0) throw std::invalid_argument("file: fd is negative");
    if (file.alignment == 0 || block_alignment_bytes % file.alignment != 0)
        throw std::invalid_argument("file: alignment must divide 4096");
}

void check_options(const EngineOptions& options) {
    if (options.queue_depth < 1 || options.queue_depth > queue_depth_max)
        throw std::invalid_argument("queue_depth must be 1 to 4096");
    if (options.workers < 1 || options.workers > workers_max) throw std::invalid_argument("workers must be 1 to 256");
    if (options.request_bytes == 0 || options.request_bytes % block_alignment_bytes != 0 ||
        options.request_bytes > request_bytes_max)
        throw std::invalid_argument("request_bytes must be a multiple of 4096, up to 1 GiB");
}

}  // namespace

Engine::Engine(const EngineOptions& options, const std::vector<std::shared_ptr<Engine>>& paths)
    : backend_name_(options.backend) {
    check_options(options);
    if ((options.backend == "paths") == paths.empty())
        throw std::invalid_argument("the engines of paths belong to backend 'paths'");
    if (options.backend == "io_uring")
        machine_.backend = make_uring_backend(options.queue_depth, options.injector, options.priority);
    else if (options.backend == "posix")
        machine_.backend = make_posix_backend(options.queue_depth, options.injector, options.priority);
    else if (options.backend == "caller")
        machine_.backend = caller_ = std::make_shared<CallerBackend>();
    else if (options.backend == "paths") {
        std::vector<std::shared_ptr<Backend>> queues;
        for (const std::shared_ptr<Engine>& path : paths) queues.push_back(path->queue());
        machine_.backend = paths_ = std::make_shared<PathsBackend>(std::move(queues));
    } else
        throw std::invalid_argument("backend must be 'io_uring', 'posix', 'caller' or 'paths', not '" +
                                    options.backend + "'");
    machine_.workers = std::make_shared<Workers>(options.workers, options.priority);
    machine_.priority = options.priority;
    machine_.request_bytes = options.request_bytes;
    machine_.queue_depth = options.queue_depth;
    machine_.splits_windows =
        caller_ == nullptr;  // a caller knows the windows in advance, and gets each as one request
}

Machine Engine::machine_locked(const Arena& arena, std::uint64_t request_bytes) const {
    if (machine_.backend == nullptr) throw std::invalid_argument("the engine is closed");
    Machine machine = machine_;
    if (request_bytes != 0) machine.request_bytes = request_bytes;
    if (machine.request_bytes % block_alignment_bytes != 0)
        throw std::invalid_argument("request_bytes must be a multiple of 4096");
    if (arena.block_bytes() < machine.request_bytes)
        throw std::invalid_argument("the arena's block_bytes are smaller than request_bytes");
    machine.workers->stay_near(arena.node());
    return machine;
}

template <class Running> void Engine::keep_locked(const std::shared_ptr<Running>& job) {
    std::erase_if(jobs_, [](const std::weak_ptr<Job>& other) { return other.expired(); });
    jobs_.push_back(job);
}

std::shared_ptr<WriteJob> Engine::write(std::shared_ptr<Arena> arena, const std::vector<TargetFile>& files,
                                        std::shared_ptr<const WriteExtents> rows, const WriteOptions& options,
                                        std::shared_ptr<MutationDetector> detector) {
    std::vector<std::shared_ptr<const File>> opened;
    std::vector<std::uint64_t> sizes;
    for (const TargetFile& target : files) {
        check_file(*target.file, path_count());
        if (target.file->mapping != nullptr && target.file->mapping->bytes() < target.bytes)
            throw std::invalid_argument("the mapping is shorter than its file");
        opened.push_back(target.file);
        sizes.push_back(target.bytes);
    }
    check_extents(*rows, sizes);
    if (!rows->keeps_places()) check_encodable(*rows);
    const std::lock_guard lock(mutex_);
    Machine machine = machine_locked(*arena);
    auto job = std::make_shared<WriteJob>(std::move(machine), std::move(arena), std::move(opened), std::move(sizes),
                                          std::move(rows), options, std::move(detector));
    if (auto pages = job->detector().pages().open()) written_pages_ = std::move(pages);
    keep_locked(job);
    return job;
}

std::shared_ptr<ReadJob> Engine::read(std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
                                      std::shared_ptr<const ReadExtents> rows, const ReadOptions& options) {
    for (const std::shared_ptr<const File>& file : files)
        if (file != nullptr) check_file(*file, path_count());
    check_extents(*rows, files.size());
    if (options.lent) caller();  // throws
    if (options.ahead && !options.stop_at_bad) throw std::invalid_argument("a read ahead needs stop_at_bad");
    const std::lock_guard lock(mutex_);
    Machine machine = machine_locked(*arena, options.request_bytes);
    auto job =
        std::make_shared<ReadJob>(std::move(machine), std::move(arena), std::move(files), std::move(rows), options);
    keep_locked(job);
    return job;
}

std::shared_ptr<CallerBackend> Engine::caller() {
    const std::lock_guard lock(mutex_);
    if (caller_ == nullptr) throw std::invalid_argument("the engine is closed, or its backend is not 'caller'");
    return caller_;
}

std::shared_ptr<PathsBackend> Engine::paths() {
    const std::lock_guard lock(mutex_);
    if (paths_ == nullptr) throw std::invalid_argument("the engine is closed, or its backend is not 'paths'");
    return paths_;
}

std::size_t Engine::path_count() {
    const std::lock_guard lock(mutex_);
    return paths_ == nullptr ? 1 : paths_->paths();
}

std::shared_ptr<Backend> Engine::queue() {
    const std::lock_guard lock(mutex_);
    if (machine_.backend == nullptr) throw std::invalid_argument("the engine of a path is closed");
    return machine_.backend;
}

void Engine::close() {
    std::vector<std::weak_ptr<Job>> jobs;
    Machine machine;
    {
        const std::lock_guard lock(mutex_);
        jobs.swap(jobs_);
        std::swap(machine, machine_);
    }
    for (const std::weak_ptr<Job>& running : jobs)
        if (const std::shared_ptr<Job> job = running.lock()) job->wait(forever_s);
    // Finished jobs have released the workers, so their threads end here.
    machine.workers.reset();
    machine.backend.reset();
    const std::lock_guard lock(mutex_);
    caller_.reset();
    paths_.reset();
    written_pages_.reset();
}

}  // namespace flowstone
