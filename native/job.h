// The common part of writes and reads: windows under way, the first failure, the waits.
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

#include "arena.h"
#include "backend.h"
#include "fault.h"
#include "registered.h"
#include "spans.h"
#include "workers.h"

namespace flowstone {

/// Shared resources of jobs. A job releases them when it finishes (workers first: they use the backend).
struct Machine {
    std::shared_ptr<Backend> backend;
    std::shared_ptr<Workers> workers;
    std::uint64_t request_bytes = 0;
    std::uint32_t queue_depth = 0;
    bool splits_windows = true;  // into requests; else each run of a window is one, however long
    Priority priority = Priority::normal;
};

/// A window of a job, passed from stage to stage: workers call the job's members one after the other. If a stage has no
/// memory, the window ends (`abandon`), and with it the job.
template <class Owner, class Window> struct Staged : Task {
    using Stage = void (Owner::*)(const std::shared_ptr<Window>& window, LiveAccess& live);

    /// Prepare a stage for posting; `window` must be this window.
    Task& at(Owner& job, Stage stage, std::shared_ptr<Window> window) noexcept {
        job_ = &job;
        stage_ = stage;
        self_ = std::move(window);
        return *this;
    }

    void run(LiveAccess& live) noexcept override {
        Owner& job = *job_;
        const Stage stage = stage_;
        const std::shared_ptr<Window> window = std::exchange(self_, nullptr);
        try {
            (job.*stage)(window, live);
        } catch (const std::bad_alloc&) {
            job.abandon(window);
        }
    }

private:
    Owner* job_ = nullptr;
    Stage stage_ = nullptr;
    std::shared_ptr<Window> self_;  // while it is queued
};

/// A coordinator thread (in the derived class) begins windows; workers and the backend end them.
///
/// Invariant: a window that has begun ends exactly once, in any case; after the coordinator has stopped feeding and the
/// last window has ended, no thread and no device touches the job's memory.
class Job {
public:
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    /// Whether the job has finished, after at most `timeout_s` (any number; infinity is no limit).
    bool wait(double timeout_s);
    /// Begin no new windows. Does not block; any thread.
    void cancel();

    std::uint64_t done_bytes() const { return done_bytes_.load(); }
    std::uint64_t copied_bytes() const { return copied_bytes_.load(); }
    std::uint64_t requests() const { return requests_.load(); }
    /// The durations of its phases; complete once it has finished.
    std::vector<PhaseSpan> spans() const { return spans_.all(); }
    std::optional<Fault> fault() const;
    bool cancelled() const { return cancelled_.load(); }

protected:
    Job(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files);
    ~Job() = default;

    bool stopping() const { return stopping_.load(); }
    /// Stop feeding; the caller has recorded the cause.
    void stop();
    /// The first failure stops the job. Later ones are its consequences, and are dropped; but of the ranges of one file
    /// that fail together the lowest is kept, so that a file that ends early is reported at its end.
    void take_outcome(Outcome outcome);
    void take_outcome(Fault fault) { take_outcome(Outcome{std::move(fault), false}); }
    /// The fault: no memory to continue.
    Fault no_memory() const { return flowstone::no_memory(files_.empty() ? nullptr : files_.front()->path); }

    /// Blocks until fewer than `windows_max` windows are under way and not set aside, or the job is stopping.
    void wait_for_room(std::uint32_t windows_max);
    /// Blocks until none is under way, or the job is stopping.
    void wait_for_windows();
    /// A window takes no room from now on; say so at its end.
    void set_aside();
    /// `reads_source`: the window counts as not queued until `queue_sources`, then as not captured until
    /// `release_sources`.
    void begin_window(bool reads_source);
    void queue_sources();
    void release_sources();
    /// How many windows must be captured before the caller may go on; each calls `release_early` once, before
    /// `release_sources`.
    void expect_early(std::size_t windows);
    void release_early();
    void end_window(bool aside = false);
    /// The coordinator begins no more windows.
    void end_feeding();
    /// The coordinator's last call: blocks until every window has ended, then lets `wait` return.
    void finish();

    /// The body of the coordinator thread: set its priority, call `begin_all`, which begins windows and may throw
    /// std::bad_alloc between them, then call `finish`.
    template <class Begin> void coordinate(Begin begin_all) {
        assume(machine_.priority);
        try {
            if (settle_in())
                begin_all();
            else
                take_outcome(no_memory());
        } catch (const std::bad_alloc&) {
            take_outcome(no_memory());
        }
        finish();
    }

    /// The coordinator's first call. `now`: the files will not change any more.
    void register_files(bool now = true) { registered_ = std::make_unique<Registered>(machine_.backend, files_, now); }
    /// Files may be registered from any thread, blocks from the coordinator's only.
    Registered& registered() { return *registered_; }

    bool wait_until_captured(double timeout_s) { return wait_until(timeout_s, captured_); }
    bool wait_until_queued(double timeout_s) { return wait_until(timeout_s, queued_); }
    bool wait_until_early(double timeout_s) { return wait_until(timeout_s, early_captured_); }

    Machine machine_;
    const std::shared_ptr<Arena> arena_;
    const std::vector<std::shared_ptr<const File>> files_;
    std::optional<Stay> stay_;  // until it has finished, or failed to begin
    std::atomic<bool> stopping_{false};
    std::atomic<std::uint64_t> done_bytes_{0};
    std::atomic<std::uint64_t> copied_bytes_{0};
    std::atomic<std::uint64_t> requests_{0};
    Spans spans_;

private:
    bool wait_until(double timeout_s, const bool& state);

    bool queued_ = false;  // under mutex_
    bool captured_ = false;  // under mutex_
    bool early_captured_ = false;  // under mutex_
    bool finished_ = false;  // under mutex_
    std::atomic<bool> cancelled_{false};
    std::unique_ptr<Registered> registered_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::uint32_t under_way_ = 0;
    std::uint32_t aside_ = 0;  // of those
    std::uint32_t queueing_sources_ = 0;
    std::uint32_t reading_sources_ = 0;
    std::size_t early_left_ = 0;
    bool fed_ = false;  // the coordinator begins no more windows
    std::optional<Fault> fault_;
};

}  // namespace flowstone
