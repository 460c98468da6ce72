// A copy of memory that other threads may write as soon as the copy has begun: its pages are protected first, and a
// write to a page waits until the page is copied. It uses userfaultfd's write protection in synchronous mode: this
// process decides when a write continues. It needs Linux 6.4, and a process that may handle faults of the kernel.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "capture/live_memory.h"
#include "watch/written_pages.h"

namespace flowstone {

/// A copy of `bytes` bytes from one address to another; both ranges do not overlap.
struct CopyRow {
    std::uint64_t source;
    std::uint64_t bytes;
    std::uint64_t target;
};

/// A thread copies the rows that the constructor has not copied; meanwhile any other thread may read and write the
/// sources. Sources must stay allocated until it is done; a row whose memory is unmapped or removed is `gone`.
class GuardedCopy {
public:
    /// The reason why no memory can be protected here; empty if it can.
    static std::string refusal();

    /// Copies rows at once that cannot be protected: memory shared with another process or a file, rows that overlap
    /// others, short rows, the bytes outside of complete pages; everything if `guard` is false, or the system refuses.
    /// Throws std::bad_alloc, std::system_error (no thread): then no page is protected.
    GuardedCopy(std::vector<CopyRow> rows, bool guard);
    /// Waits until all is copied.
    ~GuardedCopy();
    GuardedCopy(const GuardedCopy&) = delete;
    GuardedCopy& operator=(const GuardedCopy&) = delete;

    /// Wait until all is copied, at most `timeout`. Returns whether it is.
    bool wait(std::chrono::duration<double> timeout) const;
    /// After `wait`: the first row whose memory was unmapped meanwhile.
    std::optional<std::size_t> gone() const;
    std::uint64_t guarded_bytes() const { return guarded_bytes_; }

    /// The shortest row that is guarded: protecting one costs two calls of the system.
    static constexpr std::uint64_t guarded_bytes_min = std::uint64_t{256} << 10;

private:
    class Protection;
    struct Chunk {
        Reach reach;
        std::size_t row;
        bool done;
    };

    void guard_rows();
    void copy_rest();
    void copy_unguarded(const CopyRow& row) const;
    void run();
    void serve();
    void copy(Chunk& chunk);

    std::vector<CopyRow> rows_;
    std::vector<Reach> guarded_;  // of each row: complete pages; empty if it is not guarded
    std::vector<Chunk> chunks_;  // of the guarded rows, ascending
    std::uint64_t guarded_bytes_ = 0;
    std::unique_ptr<Protection> protection_;
    std::unique_ptr<LiveAccess> live_;

    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    bool is_protected_ = false;
    bool is_done_ = false;
    std::optional<std::size_t> gone_;
    std::vector<std::jthread> thread_;
};

}  // namespace flowstone
