#include "io/write_submit.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

namespace flowstone {

std::unique_ptr<Op> WindowSubmitter::make_op(const WriteWindowPtr& window, std::uint64_t offset, iovec part) {
    auto op = std::make_unique<Op>();
    op->direction = Direction::write;
    op->file = &shared_.core.file(window->planned.file);
    op->offset = offset;
    op->parts = {part};
    op->memory_slot = window->memory_slot;
    op->file_slot = shared_.core.registrations().file(window->planned.file);
    op->stopping = &shared_.core.stop_flag();
    op->done = [this, window, bytes = op->length()](const Outcome& outcome) { end_op(window, bytes, outcome); };
    return op;
}

void WindowSubmitter::add_ops(std::vector<std::unique_ptr<Op>>& ops, const WriteWindowPtr& window, std::uint64_t offset,
                              iovec part) {
    const Machine& machine = shared_.core.machine();
    const std::uint64_t length_max = machine.splits_windows ? machine.request_bytes : part.iov_len;
    for (std::uint64_t begin = 0; begin < part.iov_len; begin += length_max) {
        const std::uint64_t length = std::min<std::uint64_t>(length_max, part.iov_len - begin);
        ops.push_back(make_op(window, offset + begin, {static_cast<std::byte*>(part.iov_base) + begin, length}));
    }
}

void WindowSubmitter::submit(const WriteWindowPtr& window, std::vector<std::unique_ptr<Op>> ops) {
    {
        const std::lock_guard lock(held_mutex_);
        if (!files_ready_ && !shared_.core.stopping()) {
            held_.push_back(window);
            window->ops = std::move(ops);
            return;
        }
    }
    window->ops = std::move(ops);
    submit_ops(window);
}

void WindowSubmitter::end_in_place(const WriteWindowPtr& window) {
    shared_.core.done_bytes += window->planned.end - window->planned.begin;
    tracker_.end(window);
}

void WindowSubmitter::mark_files_ready() {
    files_ready_ = true;
    submit_held();
    shared_.core.arena().wake();
}

void WindowSubmitter::wait_for_files() {
    using Clock = std::chrono::steady_clock;
    const auto is_over = [this] { return files_ready_ || shared_.core.stopping(); };
    while (!is_over()) shared_.core.arena().wait(Clock::now() + std::chrono::hours(1), is_over);
}

void WindowSubmitter::submit_held() {
    std::vector<WriteWindowPtr> windows;
    {
        const std::lock_guard lock(held_mutex_);
        windows.swap(held_);
    }
    // Submitted on the workers, as they live as long as the ops.
    for (const WriteWindowPtr& window : windows)
        shared_.core.workers().post(window->at<&WindowSubmitter::submit_now>(*this, window));
}

/// An op that cannot be submitted counts as ended, like any other.
void WindowSubmitter::submit_ops(const WriteWindowPtr& window) {
    std::vector<std::unique_ptr<Op>> ops = std::move(window->ops);
    window->ops_left = ops.size();
    window->submitted_ns = now_ns();
    for (const std::unique_ptr<Op>& op : ops) window->bytes += op->length();
    const bool is_stopping = shared_.core.stopping();
    if (!is_stopping) shared_.core.requests += ops.size();
    for (std::unique_ptr<Op>& op : ops) {
        if (is_stopping) {
            end_op(window, 0, {std::nullopt, true});
            continue;
        }
        try {
            shared_.core.machine().backend->submit(std::move(op));
        } catch (const std::bad_alloc&) { end_op(window, 0, {shared_.core.no_memory(), false}); }
    }
}

void WindowSubmitter::end_op(const WriteWindowPtr& window, std::uint64_t bytes, const Outcome& outcome) {
    shared_.core.record_outcome(outcome);
    if (!outcome.fault && !outcome.dropped) shared_.core.done_bytes += bytes;
    if (--window->ops_left != 0) return;
    shared_.core.spans.add(Phase::write, window->submitted_ns, window->bytes);
    tracker_.end(window);
}

}  // namespace flowstone
