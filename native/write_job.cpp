#include "write_job.h"

#include <cassert>
#include <optional>
#include <utility>

#include "bounds.h"

namespace flowstone {

/// Either copied (it holds an arena block) or direct (it holds a plan and its bounce buffer).
struct WriteJob::Window {
    WriteWindow planned{};  // copied only
    Block block;
    int memory_slot = -1;  // of the block
    std::optional<DirectPlan> direct;
    AlignedBytes bounce;
    std::atomic<std::size_t> ops_left{0};
};

/// Whose turn it is. Copied windows go from the front, direct ones from the back; what the back
/// finds unfit to be written directly is set aside, and gets the next blocks, having no other way.
class WriteJob::Order {
public:
    Order(const WriteRows& rows, std::uint64_t request_bytes, const WriteOptions& options)
        : rows_(rows), options_(options), windows_(plan_windows(rows, request_bytes)), back_(windows_.size()) {}

    bool empty() const { return front_ == back_ && aside_.empty(); }

    /// Whether some window can be written directly; take_direct gives it.
    bool find_direct() {
        while (options_.in_place && !direct_ && front_ < back_) {
            direct_ = plan_direct(rows_, windows_[back_ - 1], options_.gap_bytes);
            if (!direct_) aside_.push_back(--back_);
        }
        return direct_.has_value();
    }

    DirectPlan take_direct() {
        assert(direct_ && front_ < back_);
        --back_;
        return *std::exchange(direct_, std::nullopt);
    }

    const WriteWindow& take_copied() {
        assert(!empty());
        if (!aside_.empty()) {
            const std::size_t window = aside_.back();
            aside_.pop_back();
            return windows_[window];
        }
        const std::size_t window = front_++;
        if (front_ == back_) direct_.reset();
        return windows_[window];
    }

private:
    const WriteRows& rows_;
    const WriteOptions options_;
    const std::vector<WriteWindow> windows_;
    std::size_t front_ = 0;
    std::size_t back_;
    std::optional<DirectPlan> direct_;  // of windows_[back_ - 1]
    std::vector<std::size_t> aside_;
};

WriteJob::WriteJob(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
                   std::shared_ptr<const WriteRows> rows, const WriteOptions& options)
    : Job(std::move(machine), std::move(arena), std::move(files)),
      rows_(std::move(rows)),
      options_(options),
      digests_(rows_->chunks, 0) {
    coordinator_ = std::jthread([this] { feed(); });
}

WriteJob::~WriteJob() {
    cancel();
    coordinator_.join();
}

/// The coordinator: which window next, and how.
void WriteJob::feed() {
    register_files();
    Order order(*rows_, machine_.request_bytes, options_);
    // How far the arena grows is the caller's policy; with nothing at all nothing would ever move.
    if (!order.empty() && arena_->touched_bytes() == 0) arena_->grow(2 * arena_->block_bytes());
    while (!order.empty() && !stopping()) {
        std::optional<Block> block = arena_->try_acquire();
        if (!block) {
            const bool has_direct = order.find_direct();
            block = arena_->acquire([&] { return stopping() || (has_direct && has_direct_room()); });
        }
        if (stopping()) break;
        if (block)
            begin_copied(order.take_copied(), std::move(*block));
        else
            begin_direct(order.take_direct());
    }
    finish();
}

void WriteJob::begin_copied(const WriteWindow& planned, Block block) {
    const auto window = std::make_shared<Window>();
    window->planned = planned;
    window->memory_slot = registered().block(block, arena_->block_bytes());
    window->block = std::move(block);
    begin_window(true);
    machine_.workers->post([this, window] { capture_copied(window); });
}

void WriteJob::begin_direct(DirectPlan plan) {
    const auto window = std::make_shared<Window>();
    window->bounce = allocate_aligned(plan.bounce_bytes);
    window->direct = std::move(plan);
    ++direct_under_way_;
    begin_window(true);
    machine_.workers->post([this, window] { capture_direct(window); });
}

void WriteJob::capture_copied(const std::shared_ptr<Window>& window) {
    if (stopping()) {
        release_sources();
        return end(window);
    }
    const std::vector<WriteRun> runs = split_runs(*rows_, window->planned, options_.gap_bytes);
    const auto image = [&](const WriteRun& run) { return window->block.bytes() + (run.begin - window->planned.begin); };
    for (const WriteRun& run : runs) {
        capture_run(*rows_, run, image(run), digests_);
        copied_bytes_ += row_bytes(*rows_, run);
    }
    release_sources();
    window->ops_left = runs.size();
    for (const WriteRun& run : runs) submit(window, run, {{image(run), run.end - run.begin}});
}

void WriteJob::capture_direct(const std::shared_ptr<Window>& window) {
    if (stopping()) return end(window);
    std::byte* bounce = window->bounce.get();
    std::vector<std::vector<iovec>> lists;
    for (const DirectRun& direct : window->direct->runs) {
        digest_run(*rows_, direct.run, digests_);
        std::vector<iovec>& list = lists.emplace_back();
        for (const DirectPart& part : direct.parts) {
            const std::uint64_t bytes = part.end - part.begin;
            if (part.source == nullptr) image_range(*rows_, direct.run, part.begin, part.end, bounce);
            list.push_back({part.source == nullptr ? bounce : const_cast<std::byte*>(part.source), bytes});
            if (part.source == nullptr) bounce += bytes;
        }
        copied_bytes_ += row_bytes(*rows_, direct.run);
    }
    copied_bytes_ -= window->direct->direct_bytes;
    direct_bytes_ += window->direct->direct_bytes;
    window->ops_left = lists.size();
    for (std::size_t i = 0; i < lists.size(); ++i) submit(window, window->direct->runs[i].run, std::move(lists[i]));
}

void WriteJob::submit(const std::shared_ptr<Window>& window, const WriteRun& run, std::vector<iovec> parts) {
    auto op = std::make_unique<Op>();
    op->direction = Direction::write;
    op->file = files_[run.file].get();
    op->offset = run.begin;
    op->parts = std::move(parts);
    // What is written from where it lies holds up the caller's memory; what is copied does not.
    op->urgent = window->direct.has_value();
    op->memory_slot = window->memory_slot;
    op->file_slot = registered().file(run.file);
    op->stopping = &stopping_;
    op->done = [this, window, bytes = run.end - run.begin](const Outcome& outcome) { end_op(window, bytes, outcome); };
    ++requests_;
    machine_.backend->submit(std::move(op));
}

void WriteJob::end_op(const std::shared_ptr<Window>& window, std::uint64_t bytes, const Outcome& outcome) {
    take_outcome(outcome);
    if (!outcome.fault && !outcome.dropped) done_bytes_ += bytes;
    if (--window->ops_left == 0) end(window);
}

void WriteJob::end(const std::shared_ptr<Window>& window) {
    window->block.release();
    if (window->direct) {
        --direct_under_way_;
        release_sources();
        arena_->wake();
    }
    end_window();  // last: the job may be gone after it
}

}  // namespace flowstone
