// The one bounded pool of aligned memory.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/device.h"
#include "io/priority.h"

namespace flowstone {

class Arena;

/// A block in use by a job; its destructor returns it. The arena outlives it, as jobs keep the arena alive.
class Block {
public:
    Block() = default;
    Block(Arena* arena, std::uint32_t index) : arena_(arena), index_(index) {}
    Block(Block&& other) noexcept : arena_(std::exchange(other.arena_, nullptr)), index_(other.index_) {}
    Block& operator=(Block&& other) noexcept;
    ~Block() { release(); }

    std::byte* bytes() const;
    std::uint32_t index() const { return index_; }
    void release();

private:
    Arena* arena_ = nullptr;
    std::uint32_t index_ = 0;
};

/// A job's registration with the arena: while one exists, the arena cannot close.
class ArenaLease {
public:
    /// Throws std::invalid_argument once the arena is closed.
    explicit ArenaLease(Arena& arena);
    ~ArenaLease();
    ArenaLease(const ArenaLease&) = delete;
    ArenaLease& operator=(const ArenaLease&) = delete;

private:
    Arena& arena_;
};

/// Blocks of `block_bytes`, mapped at construction, touched once by background threads up to the size set by `grow`,
/// and reused (last used first) until the arena closes.
///
/// Once a device uses the arena, blocks are touched and pinned for it in slabs, and no block of a slab is used before:
/// pinning a range is a slow driver call, which delays other calls.
///
/// Invariant: touched blocks = free blocks + blocks in use by jobs; jobs only get touched blocks. All members may be
/// called from any thread.
class Arena {
public:
    /// `priority` of the touching thread. Throws std::invalid_argument (sizes), std::system_error (no address space).
    Arena(std::uint64_t budget_bytes, std::uint64_t block_bytes, Priority priority = Priority::normal);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    std::uint64_t budget_bytes() const { return block_count_ * block_bytes_; }
    std::uint64_t block_bytes() const { return block_bytes_; }
    std::uint64_t touched_bytes() const;
    std::uint64_t free_bytes() const;

    /// Ask for `total_bytes` of touched memory, at most the budget. Does not block. `when_idle`: touch only while no
    /// job runs, because touching new pages takes processor time and memory bandwidth from the job.
    void grow(std::uint64_t total_bytes, bool when_idle = false);
    /// Like `grow`, but as a caller waits, with up to `threads` threads, and in the longest slabs. Throws
    /// std::bad_alloc.
    void grow_at_once(std::uint64_t total_bytes, std::size_t threads);
    /// Wait, at most `timeout_s`, until all memory requested by `grow` is there. Returns whether it is.
    bool wait_grown(double timeout_s);

    /// A waiter's condition, called under the arena's lock at every `wake`. It may read atomics, but must take no lock.
    using Question = std::function<bool()>;

    /// Blocks until a block is free and `may_take()`, or until `is_cancelled()`. Returns a block if one could be taken.
    std::optional<Block> acquire(const Question& may_take, const Question& is_cancelled);
    std::optional<Block> acquire(const Question& is_cancelled) {
        return acquire([] { return true; }, is_cancelled);
    }
    /// Acquire `count` blocks at once, of at least as many touched ones; none once `is_cancelled()`. Two jobs that
    /// acquired blocks one after the other could wait for each other.
    std::vector<Block> acquire_all(std::size_t count, const Question& is_cancelled);

    /// Blocks until `enough()`, or until the deadline.
    void wait(std::chrono::steady_clock::time_point deadline, const Question& enough);

    /// Pin all blocks for devices, until the arena closes: touched blocks before this returns, other blocks before jobs
    /// get them. Memory pinned by the first device is pinned for all devices of its kind. Throws std::bad_alloc.
    void use(std::span<const std::shared_ptr<Device>> devices);
    /// Touched, and pinned.
    std::uint64_t pinned_bytes() const;
    /// Why some blocks are not pinned; "": no device uses the arena, or all are pinned.
    std::string refusal() const;
    /// Place pages that are touched from now on on NUMA node `node`, if it has room. Returns 0 or an errno.
    int place(int node);
    /// That node; -1 if there is none.
    int node() const { return node_.load(); }

    /// Make every waiter check its condition again.
    void wake();

    /// Stop the touching thread and unmap. Throws std::invalid_argument while a job runs.
    void close();
    bool closed() const;

private:
    friend class Block;
    friend class ArenaLease;
    void enter();
    void leave();
    struct Slab {
        std::uint32_t first;
        std::uint32_t count;
        std::uint32_t left;  // blocks not touched yet
    };

    void touch_loop(const std::stop_token& stop, Priority priority, bool is_helper);
    bool may_touch_locked() const;
    Slab* open_slab_locked();
    void touch(std::uint32_t index);
    void add_locked(std::uint32_t first, std::uint32_t count);
    void pin(std::uint32_t first, std::uint32_t count);
    void refuse(int error);
    std::uint64_t blocks_of(std::uint64_t bytes) const;
    void give_back(std::uint32_t index);
    std::optional<Block> take_free_locked();
    void free_locked(std::uint32_t index);
    std::byte* address(std::uint32_t index) const { return base_ + index * block_bytes_; }

    std::uint64_t block_bytes_;
    std::uint64_t block_count_;
    void* mapping_ = nullptr;
    std::uint64_t mapping_bytes_ = 0;
    std::byte* base_ = nullptr;

    mutable std::mutex mutex_;
    std::condition_variable_any grown_;     // the toucher waits here
    std::condition_variable available_;     // acquire waits here
    // Last in, first out. Each free block begins with the next one's number, so that returning a block allocates
    // nothing.
    std::uint32_t first_free_ = 0;
    std::uint64_t free_ = 0;
    std::uint64_t claimed_ = 0;             // blocks that some thread touches or has touched
    std::uint64_t touched_ = 0;             // blocks
    std::uint64_t wanted_ = 0;              // blocks
    std::uint64_t wanted_at_once_ = 0;      // of these, blocks for which a caller waits
    std::uint64_t wanted_idle_ = 0;         // blocks, while no job runs
    std::size_t jobs_ = 0;
    std::size_t helping_ = 0;               // threads
    bool closed_ = false;
    Priority priority_;
    std::atomic<int> node_{-1};
    std::shared_ptr<Device> device_;        // null: no device uses the arena. Set once
    std::vector<Slab> slabs_;               // slabs_ and pins_ have capacity for all entries
    std::vector<std::byte*> pins_;          // where pinned ranges begin
    std::uint64_t pinned_ = 0;              // blocks
    std::string refusal_;
    std::mutex use_mutex_;                  // held by the first `use`
    std::vector<std::jthread> helpers_;
    std::jthread toucher_;
};

}  // namespace flowstone
