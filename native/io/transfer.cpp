#include "io/transfer.h"

#include <limits.h>

#include <algorithm>
#include <cassert>
#include <cerrno>

#include "bounds.h"

namespace flowstone {

Transfer::Transfer(std::unique_ptr<Op> op, const FaultInjector* injector) : op_(std::move(op)), injector_(injector) {
    list_.reserve(std::min<std::size_t>(op_->parts.size(), IOV_MAX));
}

std::span<const iovec> Transfer::attempt() {
    const std::uint64_t length = op_->length();
    assert(moved_ < length);
    injected_ = {};
    if (injector_ != nullptr && *injector_) injected_ = (*injector_)(op_->direction, offset(), length - moved_);
    list_.clear();
    std::uint64_t skip = moved_;
    std::uint64_t room = injected_.bytes_max;
    for (const iovec& part : op_->parts) {
        if (skip >= part.iov_len) {
            skip -= part.iov_len;
            continue;
        }
        if (list_.size() == IOV_MAX || room == 0) break;
        const std::uint64_t bytes = std::min<std::uint64_t>(part.iov_len - skip, room);
        list_.push_back({static_cast<std::byte*>(part.iov_base) + skip, bytes});
        room -= bytes;
        skip = 0;
    }
    return list_;
}

Transfer::Next Transfer::settle(ssize_t result) {
    if (result == -EINTR) return Next::again;
    if (result == -EAGAIN || result == -EBUSY) return stall(static_cast<int>(-result));
    if (result < 0) return fail(static_cast<int>(-result));
    const bool is_read = op_->direction == Direction::read;
    if (result == 0) return is_read ? end_of_file() : fail(EIO);
    const auto count = static_cast<std::uint64_t>(result);
    if (is_read && moved_ + count >= op_->needed_bytes) return Next::finished;
    if (moved_ + count >= op_->length()) return Next::finished;
    // O_DIRECT needs aligned offsets: bytes past the last boundary are moved again.
    const std::uint64_t kept = round_down(count, std::max<std::uint32_t>(op_->file->alignment, 1));
    if (kept == 0) return stall(is_read ? 0 : EIO);
    moved_ += kept;
    stalls_ = 0;
    return Next::again;
}

unsigned Transfer::pause_us() const { return stalls_ == 0 ? 0 : std::min(10U << std::min(stalls_, 10), 5000U); }

Transfer::Next Transfer::stall(int error) {
    if (++stalls_ <= stalls_max) return Next::again;
    // If the count is repeatedly below the alignment, the file ends inside this block.
    return error == 0 ? end_of_file() : fail(error);
}

Transfer::Next Transfer::fail(int error) {
    const bool is_read = op_->direction == Direction::read;
    fault_ = Fault{is_read ? "read" : "write", error, op_->file->path, offset(), op_->length() - moved_};
    return Next::finished;
}

Transfer::Next Transfer::end_of_file() {
    if (moved_ >= op_->needed_bytes) return Next::finished;
    fault_ = Fault{"end of file", 0, op_->file->path, offset(), op_->needed_bytes - moved_};
    return Next::finished;
}

}  // namespace flowstone
