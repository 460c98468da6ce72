// Live memory: the caller's memory while a job reads it. Another thread may unmap, truncate or protect it at any time.
// So the kernel copies it: if a plain load would kill the process, the kernel returns EFAULT.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "bounds.h"
#include "codec/digest.h"

namespace flowstone {

/// Copies live memory, for one thread. All resources are allocated at construction; no other member throws.
///
/// Measured, copy and digest: if the target is in huge pages, as fast as memcpy with a digest after each MiB; in small
/// pages, two thirds of that.
class LiveAccess {
public:
    static constexpr std::uint64_t bounce_bytes = std::uint64_t{512} << 10;
    static constexpr std::uint64_t coding_room_bytes = 4 * chunk_bytes;
    static constexpr std::size_t runs_max =
        256;  // as fast as 1024 for lines that are far apart: they fit into the L1 cache

    enum class Way { process_vm, memory_file };
    /// Uses process_vm_writev, or, if that is refused (a seccomp profile, a kernel without it), a memory file, at twice
    /// the cost. Throws std::bad_alloc.
    explicit LiveAccess(Way way = Way::process_vm);
    ~LiveAccess();
    LiveAccess(const LiveAccess&) = delete;
    LiveAccess& operator=(const LiveAccess&) = delete;

    /// Copy live memory to `out`, which this process owns. Returns 0; EFAULT if some of the source is not mapped (any
    /// more), and `out` is then undefined; or the errno with which the system refuses the copy (ENOMEM).
    int read(std::byte* out, const std::byte* source, std::uint64_t bytes) noexcept;
    /// Copy runs to consecutive places in `out`: at most 1024 runs.
    int read(std::byte* out, std::span<const iovec> runs) noexcept;
    /// Copy and digest, while the bytes are in the cache; also prefetch up to `ahead_bytes` beyond the source, which
    /// will be read next.
    int read(std::byte* out, const std::byte* source, std::uint64_t bytes, std::uint64_t ahead_bytes,
             Digester& digester) noexcept;

    Way way() const { return way_; }
    /// Whether this process made it; a forked child does not have its parent's buffers.
    bool is_own() const noexcept;

    /// A buffer for one chunk, for the caller's use.
    std::byte* chunk_room() const { return room_; }
    /// A buffer of coding_room_bytes for encoding. chunk_room and bounce are parts of it, so do not use both at the
    /// same time. Pages that are never used take no memory.
    std::byte* coding_room() const { return room_; }
    /// A buffer of `bounce_bytes`, for copies in two steps.
    std::byte* bounce() const { return room_ + chunk_bytes; }
    /// A list of runs, for the caller's use.
    std::array<iovec, runs_max>& runs() { return runs_; }

private:
    int read_by_file(std::byte* out, std::span<const iovec> runs) noexcept;
    int open_file() noexcept;

    const pid_t self_;
    Way way_;
    void* mapping_ = nullptr;
    std::byte* room_ = nullptr;
    int file_ = -1;  // memory of `file_bytes` behind a descriptor; made when first needed
    std::byte* file_room_ = nullptr;
    std::array<iovec, runs_max> runs_{};
};

/// A temporary LiveAccess, for a thread that has none. One is kept between calls: the kernel zeroes a new huge page at
/// its first touch, and that would take time inside of `save`.
class LentAccess {
public:
    /// Throws std::bad_alloc.
    LentAccess();
    ~LentAccess();
    LentAccess(const LentAccess&) = delete;
    LentAccess& operator=(const LentAccess&) = delete;

    LiveAccess& operator*() const { return *live_; }

private:
    std::unique_ptr<LiveAccess> live_;
};

/// Combines short reads into few calls. Added reads are consecutive in `out`. Each has an Item, which `flush` reports
/// with the read's result.
template <class Item> class LiveBatch {
public:
    explicit LiveBatch(LiveAccess& live) : live_(live) {}

    bool empty() const { return count_ == 0; }
    bool has_room() const { return count_ < LiveAccess::runs_max; }
    std::uint64_t bytes() const { return bytes_; }
    /// The target of the next read; it may be changed while the batch is empty.
    std::byte* end() const { return out_ + bytes_; }

    void add(std::byte* out, const std::byte* source, std::uint64_t bytes, const Item& item) {
        if (count_ == 0) out_ = out;
        live_.runs()[count_] = {const_cast<std::byte*>(source), bytes};
        items_[count_++] = item;
        bytes_ += bytes;
    }

    /// Make the reads, and call each(item, error) for all of them, in order.
    template <class Each> void flush(Each each) {
        const std::span<const iovec> runs(live_.runs().data(), count_);
        const bool failed = count_ != 0 && live_.read(out_, runs) != 0;
        std::byte* out = out_;
        // A failed read also ends the call for later reads: repeat them one by one.
        for (std::size_t i = 0; i < count_; out += runs[i++].iov_len)
            each(items_[i],
                 failed ? live_.read(out, static_cast<const std::byte*>(runs[i].iov_base), runs[i].iov_len) : 0);
        count_ = 0;
        bytes_ = 0;
    }

private:
    LiveAccess& live_;
    std::byte* out_ = nullptr;
    std::size_t count_ = 0;
    std::uint64_t bytes_ = 0;
    std::array<Item, LiveAccess::runs_max> items_;
};

}  // namespace flowstone
