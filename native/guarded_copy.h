// A copy of memory that may be written from the moment on at which the copy is asked for: its pages are protected
// first, and a write to one waits until its bytes are copied. userfaultfd's write protection, in the mode in which this
// process decides when a write goes on. Linux 6.4 on, for processes that may handle faults of the kernel.
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

#include "live_memory.h"
#include "written_pages.h"

namespace flowstone {

/// `bytes` bytes, from one address to another; they do not overlap.
struct CopyRow {
    std::uint64_t source;
    std::uint64_t bytes;
    std::uint64_t target;
};

/// What the constructor has not copied when it returns, a thread copies, while any other thread may read and write the
/// sources. They stay allocated until it is done; what is unmapped, or taken away otherwise, is `gone`.
class GuardedCopy {
public:
    /// The reason why nothing can be guarded here; empty if it can.
    static std::string refusal();

    /// Copies at once what cannot be guarded: rows of which another process or a file has the memory too, rows that
    /// overlap others, short ones, the bytes beside whole pages; everything if `guard` is false, or the system refuses.
    /// Throws std::bad_alloc, std::system_error (no thread): then nothing is protected.
    GuardedCopy(std::vector<CopyRow> rows, bool guard);
    /// Waits until all is copied.
    ~GuardedCopy();
    GuardedCopy(const GuardedCopy&) = delete;
    GuardedCopy& operator=(const GuardedCopy&) = delete;

    /// Whether all is copied, within the time.
    bool wait(std::chrono::duration<double> timeout) const;
    /// After `wait`: the first row whose memory was gone.
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
    std::vector<Reach> guarded_;  // of each row: whole pages; empty where it is not guarded
    std::vector<Chunk> chunks_;   // of the guarded rows, ascending
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
