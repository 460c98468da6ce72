#include "io/caller_backend.h"

#include <cassert>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "io/op_queue.h"

namespace flowstone {

CallerBackend::~CallerBackend() {
    assert(waiting_.empty());
    assert(taken_.empty());
}

void CallerBackend::submit(std::unique_ptr<Op> op) {
    assert(op->parts.size() == 1);
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(op));
    submitted_.notify_all();
}

void CallerBackend::wake() {
    const std::lock_guard lock(mutex_);
    ++wakes_;
    submitted_.notify_all();
}

std::uint64_t CallerBackend::wakes() const {
    const std::lock_guard lock(mutex_);
    return wakes_;
}

std::vector<CallerBackend::Request> CallerBackend::take(Direction direction, int first, int last, std::size_t count,
                                                        double timeout_s, std::optional<std::uint64_t> since) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
    std::vector<Request> taken;
    std::vector<std::unique_ptr<Op>> unwanted;
    {
        std::unique_lock lock(mutex_);
        for (;;) {
            for (auto at = waiting_.begin(); at != waiting_.end() && taken.size() < count;) {
                if ((*at)->direction != direction || (*at)->file->fd < first || (*at)->file->fd >= last) {
                    ++at;
                    continue;
                }
                if (is_unwanted(**at)) {
                    unwanted.push_back(std::move(*at));
                } else {
                    const Op& op = **at;
                    taken.push_back({next_number_, op.file->fd, op.offset, op.parts.front(), op.needed_bytes});
                    taken_.emplace(next_number_++, std::move(*at));
                }
                at = waiting_.erase(at);
            }
            if (!taken.empty() || !unwanted.empty() || (since && *since != wakes_)) break;
            if (submitted_.wait_until(lock, deadline) == std::cv_status::timeout) break;
        }
    }
    for (const std::unique_ptr<Op>& op : unwanted) op->done({std::nullopt, true});
    return taken;
}

void CallerBackend::complete(std::uint64_t number, std::uint64_t moved_bytes, int error, const std::byte* lent) {
    std::unique_ptr<Op> op;
    {
        const std::lock_guard lock(mutex_);
        const auto found = taken_.find(number);
        if (found == taken_.end()) throw std::invalid_argument("no request with that number was taken");
        op = std::move(found->second);
        taken_.erase(found);
    }
    const bool is_read = op->direction == Direction::read;
    if (op->parts.front().iov_base != nullptr)
        lent = nullptr;
    else if (lent == nullptr && error == 0)
        error = EFAULT;
    const std::uint64_t needed = is_read ? op->needed_bytes : op->length();
    std::optional<Fault> fault;
    if (error != 0)
        fault = Fault{is_read ? "read" : "write", error, op->file->path, op->offset, op->length()};
    else if (moved_bytes < needed && is_read)
        fault = Fault{"end of file", 0, op->file->path, op->offset + moved_bytes, needed - moved_bytes};
    else if (moved_bytes < needed)
        fault = Fault{"write", EIO, op->file->path, op->offset + moved_bytes, needed - moved_bytes};
    op->done({std::move(fault), false, lent});
}

}  // namespace flowstone
