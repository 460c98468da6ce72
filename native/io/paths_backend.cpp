#include "io/paths_backend.h"

#include <algorithm>
#include <cassert>
#include <new>
#include <utility>

namespace flowstone {

using Clock = std::chrono::steady_clock;

PathsBackend::PathsBackend(std::vector<std::shared_ptr<Backend>> paths)
    : paths_(std::move(paths)), traffic_(2 * paths_.size()) {}

PathsBackend::~PathsBackend() {
    for ([[maybe_unused]] const auto& [file, moved] : moved_) assert(moved.held.empty());
}

void PathsBackend::submit(std::unique_ptr<Op> op) {
    assert(op->file->of_path < paths_.size());
    const bool may_move = op->direction == Direction::write && op->file->may_move;
    if (may_move) {
        const std::lock_guard lock(mutex_);
        if (const auto found = moved_.find(op->file); found != moved_.end()) {
            MovableFile& moved = found->second;
            if (moved.target == nullptr && !moved.is_refused) {
                moved.held.push_back(std::move(op));
                return;
            }
            if (moved.target != nullptr) {
                moved.written.emplace_back(op->offset, op->offset + op->length());
                op->file = moved.target.get();
            }
        }
    }
    pass(std::move(op), may_move);
}

/// Pass the op to the backend of its file's path. Its traffic is counted before its own `done` is called.
void PathsBackend::pass(std::unique_ptr<Op> op, bool may_move) {
    const File* const file = op->file;
    const std::uint32_t path = file->of_path;
    const Direction direction = op->direction;
    const std::uint64_t bytes = op->length();
    const auto again = std::make_shared<std::unique_ptr<Op>>(std::make_unique<Op>(*op));
    op->done = [this, file, path, direction, bytes, may_move, again](Outcome outcome) {
        end(path, direction, outcome.fault || outcome.dropped ? 0 : bytes);
        std::unique_ptr<Op> own = std::move(*again);
        if (may_move && outcome.fault && hold(file, own, *outcome.fault)) return;
        own->done(std::move(outcome));
    };
    op->file_slot = -1;
    if (op->memory_slot >= 0) {
        const std::lock_guard lock(mutex_);
        op->memory_slot = slots_[static_cast<std::size_t>(op->memory_slot)][path];
    }
    begin(path, direction);
    try {
        paths_[path]->submit(std::move(op));
    } catch (...) {
        end(path, direction, 0);
        throw;
    }
}

/// Hold a failed write back, or pass it to another file. Returns false if neither is done; then the caller still owns
/// it.
bool PathsBackend::hold(const File* file, std::unique_ptr<Op>& op, const Fault& fault) noexcept {
    std::shared_ptr<const File> target;
    try {
        const std::lock_guard lock(mutex_);
        if (op->stopping != nullptr && op->stopping->load()) return false;
        MovableFile& moved = moved_[file];
        if (moved.is_refused) return false;
        if (moved.target == nullptr) {
            if (!moved.fault) moved.fault = fault;
            moved.held.push_back(nullptr);
            moved.held.back() = std::move(op);
            return true;
        }
        target = moved.target;
        moved.written.emplace_back(op->offset, op->offset + op->length());
    } catch (const std::bad_alloc&) { return false; }
    return resubmit(op, target);
}

bool PathsBackend::resubmit(std::unique_ptr<Op>& op, const std::shared_ptr<const File>& target) noexcept {
    op->file = target.get();
    try {
        auto copy = std::make_unique<Op>(*op);
        pass(std::move(copy), false);
        return true;
    } catch (const std::bad_alloc&) { return false; }
}

std::optional<Fault> PathsBackend::failed(const std::shared_ptr<const File>& file) const {
    const std::lock_guard lock(mutex_);
    const auto found = moved_.find(file.get());
    if (found == moved_.end() || found->second.target != nullptr || found->second.is_refused) return std::nullopt;
    return found->second.fault;
}

void PathsBackend::move(const std::shared_ptr<const File>& file, std::shared_ptr<const File> target) {
    std::vector<std::unique_ptr<Op>> held;
    {
        const std::lock_guard lock(mutex_);
        MovableFile& moved = moved_[file.get()];
        for (const std::unique_ptr<Op>& op : moved.held)
            moved.written.emplace_back(op->offset, op->offset + op->length());
        moved.target = target;
        held.swap(moved.held);
    }
    for (std::unique_ptr<Op>& op : held)
        if (!resubmit(op, target)) op->done({no_memory(target->path), false});
}

void PathsBackend::refuse(const std::shared_ptr<const File>& file) {
    std::vector<std::unique_ptr<Op>> held;
    std::optional<Fault> fault;
    {
        const std::lock_guard lock(mutex_);
        MovableFile& moved = moved_[file.get()];
        if (moved.target != nullptr) return;
        moved.is_refused = true;
        fault = moved.fault;
        held.swap(moved.held);
    }
    for (const std::unique_ptr<Op>& op : held) op->done({fault, false});
}

PathsBackend::Ranges PathsBackend::forget(const std::shared_ptr<const File>& file) {
    const std::lock_guard lock(mutex_);
    const auto found = moved_.find(file.get());
    if (found == moved_.end()) return {};
    assert(found->second.held.empty());
    Ranges written = std::move(found->second.written);
    moved_.erase(found);
    return written;
}

int PathsBackend::register_memory(iovec memory) {
    std::vector<int> slots;
    for (const std::shared_ptr<Backend>& path : paths_) slots.push_back(path->register_memory(memory));
    if (std::all_of(slots.begin(), slots.end(), [](int slot) { return slot < 0; })) return slots.front();
    const std::lock_guard lock(mutex_);
    const auto free =
        std::find_if(slots_.begin(), slots_.end(), [](const std::vector<int>& used) { return used.empty(); });
    const auto at = free - slots_.begin();
    if (free == slots_.end()) slots_.emplace_back();
    slots_[static_cast<std::size_t>(at)] = std::move(slots);
    return static_cast<int>(at);
}

void PathsBackend::unregister_memory(int slot) {
    std::vector<int> slots;
    {
        const std::lock_guard lock(mutex_);
        slots.swap(slots_[static_cast<std::size_t>(slot)]);
    }
    for (std::size_t path = 0; path < slots.size(); ++path)
        if (slots[path] >= 0) paths_[path]->unregister_memory(slots[path]);
}

PathTraffic PathsBackend::traffic(std::size_t path, Direction direction) const {
    const std::lock_guard lock(mutex_);
    const Traffic& traffic = traffic_[2 * path + (direction == Direction::write)];
    PathTraffic found = traffic.moved;
    if (traffic.under_way != 0) found.busy += Clock::now() - traffic.since;
    return found;
}

void PathsBackend::begin(std::uint32_t path, Direction direction) {
    const std::lock_guard lock(mutex_);
    Traffic& traffic = traffic_locked(path, direction);
    if (traffic.under_way++ == 0) traffic.since = Clock::now();
}

void PathsBackend::end(std::uint32_t path, Direction direction, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    Traffic& traffic = traffic_locked(path, direction);
    traffic.moved.bytes += bytes;
    if (--traffic.under_way == 0) traffic.moved.busy += Clock::now() - traffic.since;
}

}  // namespace flowstone
