// The common part of writes and reads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "io/arena.h"
#include "io/backend.h"
#include "io/fault.h"
#include "io/registrations.h"
#include "io/spans.h"
#include "io/workers.h"

namespace flowstone {

/// Shared resources of jobs. A job releases them when it finishes (workers first: they use the backend).
struct Machine {
    std::shared_ptr<Backend> backend;
    std::shared_ptr<Workers> workers;
    std::uint64_t request_bytes = 0;
    std::uint32_t queue_depth = 0;
    bool splits_windows = true;  // into requests; false: each run of a window is one request
    Priority priority = Priority::normal;
};

/// A window of a job. Workers call its stages, one after the other; a stage is a member function of some part of the
/// job. If a stage runs out of memory, that part's `abandon` ends the window, and with it the job.
template <class Window> struct WindowTask : Task {
    /// Prepare a stage for posting; `window` must be this window.
    template <auto stage, class Part> Task& at(Part& part, std::shared_ptr<Window> window) noexcept {
        part_ = &part;
        run_stage_ = [](void* owner, const std::shared_ptr<Window>& self, LiveAccess& live) {
            Part& part = *static_cast<Part*>(owner);
            try {
                (part.*stage)(self, live);
            } catch (const std::bad_alloc&) { part.abandon(self); }
        };
        self_ = std::move(window);
        return *this;
    }

    void run(LiveAccess& live) noexcept override {
        // The stage may prepare this task for the next one.
        void* const part = part_;
        const auto run_stage = run_stage_;
        const std::shared_ptr<Window> window = std::exchange(self_, nullptr);
        run_stage(part, window, live);
    }

private:
    void* part_ = nullptr;
    void (*run_stage_)(void* part, const std::shared_ptr<Window>& window, LiveAccess& live) = nullptr;
    std::shared_ptr<Window> self_;  // while it is queued
};

/// The shared core of a job's parts: machine, arena and files; the windows in progress; the first failure; the waits.
///
/// A coordinator thread begins windows; workers and the backend end them.
///
/// Invariant: a window that has begun ends exactly once, in any case. After the coordinator has begun the last window,
/// and all have ended, no thread and no device accesses the job's memory.
class JobCore {
public:
    JobCore(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files);
    JobCore(const JobCore&) = delete;
    JobCore& operator=(const JobCore&) = delete;

    const Machine& machine() const { return machine_; }
    Arena& arena() const { return *arena_; }
    const std::vector<std::shared_ptr<const File>>& files() const { return files_; }
    const File& file(std::uint32_t number) const { return *files_[number]; }
    Workers& workers() const { return *machine_.workers; }

    /// Wait for the end of the job, at most `timeout_s` (any number; infinity: no limit). Returns whether it has
    /// finished.
    bool wait(double timeout_s);
    /// Begin no new windows. Does not block; any thread.
    void cancel();

    std::optional<Fault> fault() const;
    bool cancelled() const { return cancelled_.load(); }

    bool stopping() const { return stopping_.load(); }
    /// The flag for ops, which are dropped once it is true.
    const std::atomic<bool>& stop_flag() const { return stopping_; }
    /// Begin no more windows; the caller has recorded the cause.
    void stop();
    /// Record an outcome. The first failure stops the job; later failures are dropped as its consequences. But if
    /// several ranges of one file fail, the lowest is kept, so that a file that is too short is reported at its end.
    void record_outcome(Outcome outcome);
    void record_outcome(Fault fault) { record_outcome(Outcome{std::move(fault), false}); }
    /// The fault for lack of memory.
    Fault no_memory() const { return flowstone::no_memory(files_.empty() ? nullptr : files_.front()->path); }

    /// Blocks until fewer than `windows_max` windows are in progress and not set aside, or the job is stopping.
    void wait_for_room(std::uint32_t windows_max);
    /// Blocks until no window is in progress, or the job is stopping.
    void wait_for_windows();
    /// Set a window aside: it no longer counts in wait_for_room. Its end must pass that on (`end_window`).
    void set_aside();
    /// `reads_source`: the window counts as not queued until `queue_sources`, then as not captured until
    /// `release_sources`.
    void begin_window(bool reads_source);
    void queue_sources();
    void release_sources();
    /// Set how many windows must be captured before the caller may continue; each calls `release_early` once, before
    /// `release_sources`.
    void expect_early(std::size_t windows);
    void release_early();
    void end_window(bool aside = false);
    /// Record that the coordinator begins no more windows.
    void mark_all_begun();
    /// The coordinator's last call: blocks until every window has ended, then lets `wait` return.
    void finish();

    /// The body of the coordinator thread: set its priority, call `begin_all`, which begins windows and may throw
    /// std::bad_alloc between them, then call `finish`.
    template <class Begin> void coordinate(Begin begin_all) {
        assume(machine_.priority);
        try {
            if (reserve_throw_memory())
                begin_all();
            else
                record_outcome(no_memory());
        } catch (const std::bad_alloc&) { record_outcome(no_memory()); }
        finish();
    }

    /// The coordinator's first call. `now`: the files will not change any more.
    void register_files(bool now = true) {
        registrations_ = std::make_unique<Registrations>(machine_.backend, files_, now);
    }
    /// Files may be registered from any thread, blocks from the coordinator's only.
    Registrations& registrations() { return *registrations_; }

    bool wait_until_captured(double timeout_s) { return wait_until(timeout_s, captured_); }
    bool wait_until_queued(double timeout_s) { return wait_until(timeout_s, queued_); }
    bool wait_until_early(double timeout_s) { return wait_until(timeout_s, early_captured_); }

    // Any thread.
    std::atomic<std::uint64_t> done_bytes{0};
    std::atomic<std::uint64_t> copied_bytes{0};
    std::atomic<std::uint64_t> requests{0};
    Spans spans;

private:
    bool wait_until(double timeout_s, const bool& state);

    Machine machine_;
    const std::shared_ptr<Arena> arena_;
    const std::vector<std::shared_ptr<const File>> files_;
    std::optional<ArenaLease> lease_;  // until it has finished
    std::atomic<bool> stopping_{false};
    bool queued_ = false;  // under mutex_
    bool captured_ = false;  // under mutex_
    bool early_captured_ = false;  // under mutex_
    bool finished_ = false;  // under mutex_
    std::atomic<bool> cancelled_{false};
    std::unique_ptr<Registrations> registrations_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::uint32_t under_way_ = 0;
    std::uint32_t aside_ = 0;  // of these windows, how many are set aside
    std::uint32_t queueing_sources_ = 0;
    std::uint32_t reading_sources_ = 0;
    std::size_t early_left_ = 0;
    bool all_begun_ = false;  // the coordinator begins no more windows
    std::optional<Fault> fault_;
};

/// A write or a read, as its caller sees it.
class Job {
public:
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    bool wait(double timeout_s) { return core_.wait(timeout_s); }
    void cancel() { core_.cancel(); }
    std::uint64_t done_bytes() const { return core_.done_bytes.load(); }
    std::uint64_t copied_bytes() const { return core_.copied_bytes.load(); }
    std::uint64_t requests() const { return core_.requests.load(); }
    /// The durations of its phases; complete once it has finished.
    std::vector<PhaseSpan> spans() const { return core_.spans.all(); }
    std::optional<Fault> fault() const { return core_.fault(); }
    bool cancelled() const { return core_.cancelled(); }

protected:
    Job(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files)
        : core_(std::move(machine), std::move(arena), std::move(files)) {}
    ~Job() = default;

    JobCore core_;
};

}  // namespace flowstone
