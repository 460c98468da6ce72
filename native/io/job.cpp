#include "io/job.h"

#include <cassert>
#include <chrono>
#include <utility>

namespace flowstone {

JobCore::JobCore(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files)
    : machine_(std::move(machine)), arena_(std::move(arena)), files_(std::move(files)) {
    lease_.emplace(*arena_);
}

bool JobCore::wait(double timeout_s) { return wait_until(timeout_s, finished_); }

bool JobCore::wait_until(double timeout_s, const bool& state) {
    constexpr double unlimited_s = 1e9;  // 30 years; longer ones overflow the clock
    std::unique_lock lock(mutex_);
    const auto reached = [&] { return state; };
    if (timeout_s >= unlimited_s) {
        changed_.wait(lock, reached);
        return true;
    }
    // NaN and negative numbers check without waiting.
    const std::chrono::duration<double> timeout(timeout_s > 0 ? timeout_s : 0);
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(timeout);
    return changed_.wait_until(lock, deadline, reached);
}

void JobCore::cancel() {
    {
        const std::lock_guard lock(mutex_);
        if (finished_) return;
        cancelled_ = true;
    }
    stop();
}

void JobCore::stop() {
    stopping_ = true;
    {
        const std::lock_guard lock(mutex_);
        changed_.notify_all();
        if (machine_.backend) machine_.backend->wake();  // it takes no lock of a job while it holds its own
    }
    arena_->wake();
}

std::optional<Fault> JobCore::fault() const {
    const std::lock_guard lock(mutex_);
    return fault_;
}

namespace {

/// Whether both faults are in one file, and the range of `later` is before the range of `earlier`.
bool lies_before(const Fault& later, const Fault& earlier) {
    return later.path != nullptr && later.path == earlier.path && later.length != 0 && later.offset < earlier.offset;
}

}  // namespace

void JobCore::record_outcome(Outcome outcome) {
    if (!outcome.fault) return;
    {
        const std::lock_guard lock(mutex_);
        if (!fault_ || lies_before(*outcome.fault, *fault_)) fault_ = std::move(outcome.fault);
    }
    stop();
}

void JobCore::wait_for_room(std::uint32_t windows_max) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return under_way_ - aside_ < windows_max || stopping(); });
}

void JobCore::wait_for_windows() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return under_way_ == 0 || stopping(); });
}

void JobCore::set_aside() {
    const std::lock_guard lock(mutex_);
    ++aside_;
    changed_.notify_all();
}

void JobCore::begin_window(bool reads_source) {
    const std::lock_guard lock(mutex_);
    assert(!all_begun_);
    ++under_way_;
    if (reads_source) ++queueing_sources_, ++reading_sources_;
}

void JobCore::queue_sources() {
    const std::lock_guard lock(mutex_);
    assert(queueing_sources_ > 0);
    if (--queueing_sources_ == 0 && all_begun_) {
        queued_ = true;
        changed_.notify_all();
    }
}

void JobCore::release_sources() {
    const std::lock_guard lock(mutex_);
    assert(reading_sources_ > 0);
    if (--reading_sources_ == 0 && all_begun_) {
        captured_ = true;
        changed_.notify_all();
    }
}

void JobCore::expect_early(std::size_t windows) {
    const std::lock_guard lock(mutex_);
    early_left_ = windows;
    early_captured_ = windows == 0;
    changed_.notify_all();
}

void JobCore::release_early() {
    const std::lock_guard lock(mutex_);
    assert(early_left_ > 0);
    early_captured_ = --early_left_ == 0;
    if (early_captured_) changed_.notify_all();
}

void JobCore::end_window(bool aside) {
    const std::lock_guard lock(mutex_);
    assert(under_way_ > 0);
    --under_way_;
    if (aside) --aside_;
    changed_.notify_all();
}

void JobCore::mark_all_begun() {
    const std::lock_guard lock(mutex_);
    all_begun_ = true;
    queued_ = queueing_sources_ == 0;
    captured_ = reading_sources_ == 0;
    changed_.notify_all();
}

void JobCore::finish() {
    mark_all_begun();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return under_way_ == 0; });
    assert(reading_sources_ == 0);
    registrations_.reset();
    lease_.reset();
    machine_.workers.reset();
    early_captured_ = queued_ = captured_ = finished_ = true;
    machine_.backend->wake();
    machine_.backend.reset();
    changed_.notify_all();
}

}  // namespace flowstone
