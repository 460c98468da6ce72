#include "job.h"

#include <cassert>
#include <chrono>
#include <utility>

namespace flowstone {

Job::Job(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files)
    : machine_(std::move(machine)), arena_(std::move(arena)), files_(std::move(files)) {
    stay_.emplace(*arena_);
}

bool Job::wait(double timeout_s) { return wait_until(timeout_s, finished_); }

bool Job::wait_until(double timeout_s, const bool& state) {
    constexpr double unlimited_s = 1e9;  // 30 years; longer ones overflow the clock
    std::unique_lock lock(mutex_);
    const auto reached = [&] { return state; };
    if (timeout_s >= unlimited_s) {
        changed_.wait(lock, reached);
        return true;
    }
    // NaN and negative numbers check without waiting.
    const std::chrono::duration<double> timeout(timeout_s > 0 ? timeout_s : 0);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(timeout);
    return changed_.wait_until(lock, deadline, reached);
}

void Job::cancel() {
    {
        const std::lock_guard lock(mutex_);
        if (finished_) return;
        cancelled_ = true;
    }
    stop();
}

void Job::stop() {
    stopping_ = true;
    {
        const std::lock_guard lock(mutex_);
        changed_.notify_all();
        if (machine_.backend) machine_.backend->wake();  // it takes no lock of a job's while it holds its own
    }
    arena_->wake();
}

std::optional<Fault> Job::fault() const {
    const std::lock_guard lock(mutex_);
    return fault_;
}

namespace {

/// Whether both name ranges of one file, and that of `later` lies before that of `earlier`.
bool lies_before(const Fault& later, const Fault& earlier) {
    return later.path != nullptr && later.path == earlier.path && later.length != 0 && later.offset < earlier.offset;
}

}  // namespace

void Job::take_outcome(Outcome outcome) {
    if (!outcome.fault) return;
    {
        const std::lock_guard lock(mutex_);
        if (!fault_ || lies_before(*outcome.fault, *fault_)) fault_ = std::move(outcome.fault);
    }
    stop();
}

void Job::wait_for_room(std::uint32_t windows_max) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return under_way_ - aside_ < windows_max || stopping(); });
}

void Job::wait_for_windows() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return under_way_ == 0 || stopping(); });
}

void Job::set_aside() {
    const std::lock_guard lock(mutex_);
    ++aside_;
    changed_.notify_all();
}

void Job::begin_window(bool reads_source) {
    const std::lock_guard lock(mutex_);
    assert(!fed_);
    ++under_way_;
    if (reads_source) ++queueing_sources_, ++reading_sources_;
}

void Job::queue_sources() {
    const std::lock_guard lock(mutex_);
    assert(queueing_sources_ > 0);
    if (--queueing_sources_ == 0 && fed_) {
        queued_ = true;
        changed_.notify_all();
    }
}

void Job::release_sources() {
    const std::lock_guard lock(mutex_);
    assert(reading_sources_ > 0);
    if (--reading_sources_ == 0 && fed_) {
        captured_ = true;
        changed_.notify_all();
    }
}

void Job::expect_early(std::size_t windows) {
    const std::lock_guard lock(mutex_);
    early_left_ = windows;
    early_captured_ = windows == 0;
    changed_.notify_all();
}

void Job::release_early() {
    const std::lock_guard lock(mutex_);
    assert(early_left_ > 0);
    early_captured_ = --early_left_ == 0;
    if (early_captured_) changed_.notify_all();
}

void Job::end_window(bool aside) {
    const std::lock_guard lock(mutex_);
    assert(under_way_ > 0);
    --under_way_;
    if (aside) --aside_;
    changed_.notify_all();
}

void Job::end_feeding() {
    const std::lock_guard lock(mutex_);
    fed_ = true;
    queued_ = queueing_sources_ == 0;
    captured_ = reading_sources_ == 0;
    changed_.notify_all();
}

void Job::finish() {
    end_feeding();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return under_way_ == 0; });
    assert(reading_sources_ == 0);
    registered_.reset();
    stay_.reset();
    machine_.workers.reset();
    early_captured_ = queued_ = captured_ = finished_ = true;
    machine_.backend->wake();
    machine_.backend.reset();
    changed_.notify_all();
}

}  // namespace flowstone
