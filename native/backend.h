// The one contract between the engine and the system: vectored requests, completed elsewhere.
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

#include "fault.h"
#include "priority.h"
#include "fault_injector.h"

namespace flowstone {

/// An open file as the engine sees it; the descriptor stays the caller's.
struct File {
    int fd = -1;
    std::shared_ptr<const std::string> path;
    std::uint32_t alignment = 1;  // > 1: opened with O_DIRECT, which needs it; 1: buffered
    std::uintptr_t mapped = 0;    // where its first byte lies, if all that is read of it is in memory; 0: it is not
};

/// How an op ended: all bytes moved (neither field set), a fault, or dropped before it began
/// because its job was stopping.
struct Outcome {
    std::optional<Fault> fault;
    bool dropped = false;
};

/// One vectored request on one file range. Owned by the backend from submit to `done`.
///
/// Invariant: on an O_DIRECT file offset, part addresses and part lengths are multiples of 4096.
/// `file`, the parts' memory and `*stopping` stay valid until `done` returns.
struct Op {
    Direction direction = Direction::read;
    const File* file = nullptr;
    std::uint64_t offset = 0;
    std::vector<iovec> parts;
    std::uint64_t needed_bytes = 0;  // reads: the op succeeds once this prefix has arrived
    int memory_slot = -1;            // of registered memory that holds the only part; negative: none
    int file_slot = -1;              // of the registered file; negative: none
    const std::atomic<bool>* stopping = nullptr;  // true: drop the op if it has not begun
    std::function<void(Outcome)> done;            // once; a backend thread, or inside submit; must not block

    std::uint64_t length() const {
        std::uint64_t bytes = 0;
        for (const iovec& part : parts) bytes += part.iov_len;
        return bytes;
    }
};

/// Moves ops. Both implementations pass one contract suite:
///   - at most `queue_depth` ops are in the system's hands; more wait their turn in order of
///     submission
///   - short counts, EINTR, EAGAIN and EBUSY are carried on from where the system stopped
///   - a write of zero bytes is EIO; a read that meets the end of the file before `needed_bytes`
///     is the fault "end of file"
///   - `done` is called exactly once for every op
/// The destructor requires that every op is done.
class Backend {
public:
    virtual ~Backend() = default;
    /// Does not block; any thread. The thread must live until the op is done (io_uring cancels
    /// what a dying thread has submitted). Throws std::bad_alloc, and then `done` is not called.
    virtual void submit(std::unique_ptr<Op> op) = 0;
    virtual const char* name() const = 0;

    /// Tell the system of memory or of a file that many ops will use, so that it looks it up, and pins
    /// it, once. A slot for Op, or -errno where there is no such thing, no more slots, or too low a limit
    /// on locked memory. Whoever registers also unregisters, after the last of those ops is done and
    /// before the memory is unmapped. Any thread; does not block.
    virtual int register_memory(iovec) { return -ENOSYS; }
    virtual int register_file(int) { return -ENOSYS; }
    virtual void unregister_memory(int) {}
    virtual void unregister_file(int) {}
};

/// Throws std::system_error when io_uring cannot start or is not in this build.
std::unique_ptr<Backend> make_uring_backend(std::uint32_t queue_depth, FaultInjector injector = nullptr,
                                            Priority priority = Priority::normal);
std::unique_ptr<Backend> make_posix_backend(std::uint32_t queue_depth, FaultInjector injector = nullptr,
                                            Priority priority = Priority::normal);
/// One call after the other, inside submit: what a plain loop over pwrite does. For comparison.
std::unique_ptr<Backend> make_sync_backend();

}  // namespace flowstone
