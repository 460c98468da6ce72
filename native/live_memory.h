// Memory that is the caller's while a job is about it. It may be unmapped, cut short or protected at any instant, by a
// thread that nobody stops. So the kernel copies: where the processor would end the process, it says EFAULT.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "bounds.h"
#include "digest.h"

namespace flowstone {

/// What one thread copies live memory with. What it needs it has from its construction on; nothing it does throws.
///
/// Measured, copy and digest: where our side lies in huge pages, as fast as memcpy with a digest after each MiB; in small
/// ones, two thirds of it.
class LiveAccess {
public:
    static constexpr std::uint64_t bounce_bytes = std::uint64_t{512} << 10;
    static constexpr std::size_t runs_max = 256;  // as fast as 1024 for lines that are far apart: they fit into the L1 cache

    enum class Way { process_vm, memory_file };
    /// By process_vm_writev, until that is refused (a seccomp profile, a kernel without it): then through a memory
    /// file, at twice the cost. Throws std::bad_alloc.
    explicit LiveAccess(Way way = Way::process_vm);
    ~LiveAccess();
    LiveAccess(const LiveAccess&) = delete;
    LiveAccess& operator=(const LiveAccess&) = delete;

    /// Copy live memory to `out`, which is ours. 0; EFAULT where some of it is not there (any more), and `out` then holds
    /// anything; or what the system refuses that copy for (ENOMEM).
    int read(std::byte* out, const std::byte* source, std::uint64_t bytes) noexcept;
    /// Runs, end to end in `out`: at most 1024 of them.
    int read(std::byte* out, std::span<const iovec> runs) noexcept;
    /// The same with a digest on the way, while the bytes are in the cache; and as far as `ahead_bytes` beyond the source
    /// what will be read next is brought there.
    int read(std::byte* out, const std::byte* source, std::uint64_t bytes, std::uint64_t ahead_bytes, Digester& digester) noexcept;

    Way way() const { return way_; }
    /// Whether it was made by this process; a forked child has none of its parent's rooms.
    bool is_own() const noexcept;

    /// Room for one chunk, for whoever uses this.
    std::byte* chunk_room() const { return room_; }
    /// Room for `bounce_bytes`, for copies that go on from there.
    std::byte* bounce() const { return room_ + chunk_bytes; }
    /// A list for whoever makes one.
    std::array<iovec, runs_max>& runs() { return runs_; }

private:
    int read_by_file(std::byte* out, std::span<const iovec> runs) noexcept;
    int open_file() noexcept;

    const pid_t self_;
    Way way_;
    void* mapping_ = nullptr;
    std::byte* room_ = nullptr;
    int file_ = -1;  // memory of `file_bytes` behind a descriptor; once it is needed
    std::byte* file_room_ = nullptr;
    std::array<iovec, runs_max> runs_{};
};

/// One for a moment, for a thread that has none of its own. One is kept between calls: the kernel zeroes a fresh huge page
/// at its first touch, inside of `save`.
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

/// Short reads, made by few calls: what is added lies end to end in `out`. Each is of an Item, which is told of when its
/// bytes are there, or are not.
template <class Item> class LiveBatch {
public:
    explicit LiveBatch(LiveAccess& live) : live_(live) {}

    bool empty() const { return count_ == 0; }
    bool has_room() const { return count_ < LiveAccess::runs_max; }
    std::uint64_t bytes() const { return bytes_; }
    /// Where the next one's bytes will be; anywhere, while it is empty.
    std::byte* end() const { return out_ + bytes_; }

    void add(std::byte* out, const std::byte* source, std::uint64_t bytes, const Item& item) {
        if (count_ == 0) out_ = out;
        live_.runs()[count_] = {const_cast<std::byte*>(source), bytes};
        items_[count_++] = item;
        bytes_ += bytes;
    }

    /// each(item, error) for all that were added, in order.
    template <class Each> void flush(Each each) {
        const std::span<const iovec> runs(live_.runs().data(), count_);
        const bool failed = count_ != 0 && live_.read(out_, runs) != 0;
        std::byte* out = out_;
        // One that is not there spoils the call for those after it.
        for (std::size_t i = 0; i < count_; out += runs[i++].iov_len)
            each(items_[i], failed ? live_.read(out, static_cast<const std::byte*>(runs[i].iov_base), runs[i].iov_len) : 0);
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
