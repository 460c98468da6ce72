// One op in progress: the bytes left to move, and the meaning of a system call's result.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "io/backend.h"

namespace flowstone {

/// Both backends use it, so that they treat unusual results alike. One thread at a time; a backend that passes it
/// between threads through the kernel uses `publish` and `observe`.
///
/// Order of calls: attempt -> (system call, unless injected) -> settle, until settle says finished,
/// then complete.
class Transfer {
public:
    /// Throws std::bad_alloc; no other member allocates.
    Transfer(std::unique_ptr<Op> op, const FaultInjector* injector);

    /// The list for the next system call, at most IOV_MAX parts; valid until the next attempt.
    std::span<const iovec> attempt();
    /// An error that a test injects, which replaces the call's result; or 0.
    int injected() const { return injected_.error; }

    enum class Next { again, finished };
    /// Process a result: bytes moved, or -errno. `again`: pause for `pause_us`, then attempt.
    Next settle(ssize_t result);
    /// Microseconds to wait before the next attempt; grows while nothing moves.
    unsigned pause_us() const;

    /// Calls the op's `done`. The transfer must not be used afterwards.
    void complete() { op_->done({std::move(fault_), false}); }
    /// Calls `done` for an op that never began, because its job has stopped.
    void drop() { op_->done({std::nullopt, true}); }

    const Op& op() const { return *op_; }
    std::uint64_t offset() const { return op_->offset + moved_; }

    Transfer* next = nullptr;  // the next one in its queue

    /// Make a happens-before edge, which the kernel provides, visible to tools.
    void publish() { handed_over_.store(true, std::memory_order_release); }
    void observe() const { (void)handed_over_.load(std::memory_order_acquire); }

private:
    Next fail(int error);
    Next end_of_file();
    Next stall(int error);

    std::unique_ptr<Op> op_;
    const FaultInjector* injector_;
    InjectedFault injected_;
    std::vector<iovec> list_;
    std::uint64_t moved_ = 0;  // a multiple of the file's alignment until finished
    int stalls_ = 0;
    std::optional<Fault> fault_;
    std::atomic<bool> handed_over_{false};
};

}  // namespace flowstone
