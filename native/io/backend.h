// The interface between the engine and the operating system: vectored requests, completed asynchronously.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/fault.h"
#include "io/priority.h"
#include "io/fault_injector.h"
#include "io/mapping.h"

namespace flowstone {

/// An open file for the engine. The caller owns the descriptor.
struct File {
    int fd = -1;
    std::shared_ptr<const std::string> path;
    std::uint32_t alignment = 1;  // > 1: opened with O_DIRECT, which requires it; 1: buffered
    std::uintptr_t mapped = 0;  // address of its first byte, if all bytes read or written are mapped; otherwise 0
    std::shared_ptr<const Mapping> mapping = nullptr;  // keeps it mapped; null: the caller does
    std::uint32_t of_path = 0;  // number of the backend that moves its bytes, if there are several (paths_backend.h)
    bool may_move = false;  // failed writes into it may go into another file
};

/// How an op ended: all bytes moved (neither field set), a fault, or dropped before it began, as its job was stopping.
struct Outcome {
    std::optional<Fault> fault;
    bool dropped = false;
    const std::byte* lent = nullptr;  // for an op without memory: its bytes, valid until `done` returns
};

/// One vectored request on one file range. The backend owns it from submit to `done`.
///
/// Invariant: on an O_DIRECT file offset, part addresses and part lengths are multiples of 4096.
/// `file`, the parts' memory and `*stopping` stay valid until `done` returns. A read that the engine's caller carries
/// out may have no memory (its only part is at null): then the caller passes its own.
struct Op {
    Direction direction = Direction::read;
    const File* file = nullptr;
    std::uint64_t offset = 0;
    std::vector<iovec> parts;
    std::uint64_t needed_bytes = 0;  // reads: the op succeeds once these first bytes have arrived
    int memory_slot = -1;  // slot of the registered memory with its only part; negative: none
    int file_slot = -1;  // slot of the registered file; negative: none
    const std::atomic<bool>* stopping = nullptr;  // true: drop the op if it has not begun
    std::function<void(Outcome)> done;  // once; a backend thread, or inside submit; must not block

    std::uint64_t length() const {
        std::uint64_t bytes = 0;
        for (const iovec& part : parts) bytes += part.iov_len;
        return bytes;
    }
};

/// Moves ops. Both implementations pass one contract suite:
///   - at most `queue_depth` ops are submitted to the system; further ones wait in order of submission
///   - short counts, EINTR, EAGAIN and EBUSY are continued from where the system stopped
///   - a write of zero bytes is EIO; a read that reaches the end of the file before `needed_bytes` is the fault
///     "end of file"
///   - `done` is called exactly once for every op
/// All ops must be done before it is destroyed.
class Backend {
public:
    virtual ~Backend() = default;
    /// Does not block; any thread. The thread must live until the op is done (io_uring cancels
    /// what a dying thread has submitted). Throws std::bad_alloc, and then `done` is not called.
    virtual void submit(std::unique_ptr<Op> op) = 0;
    virtual const char* name() const = 0;
    /// Called when a job that submits here has stopped or finished: wakes a thread that waits for its ops. Any thread.
    virtual void wake() {}

    /// Register memory or a file that many ops will use, so that the system looks it up, and pins it, once. Returns a
    /// slot for Op, or -errno: not supported, no free slot, or a low limit on locked memory. The caller also
    /// unregisters it, after the last of those ops is done and before the memory is unmapped. Any thread; does not
    /// block.
    virtual int register_memory(iovec) { return -ENOSYS; }
    virtual int register_file(int) { return -ENOSYS; }
    virtual void unregister_memory(int) {}
    virtual void unregister_file(int) {}
};

/// Throws std::system_error if io_uring cannot start or is not in this build.
std::unique_ptr<Backend> make_uring_backend(std::uint32_t queue_depth, FaultInjector injector = nullptr,
                                            Priority priority = Priority::normal);
std::unique_ptr<Backend> make_posix_backend(std::uint32_t queue_depth, FaultInjector injector = nullptr,
                                            Priority priority = Priority::normal);
/// One call at a time, inside submit, like a plain loop over pwrite. For comparison.
std::unique_ptr<Backend> make_sync_backend();

}  // namespace flowstone
