// Memory that the CPU cannot access: an accelerator's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "backend.h"

namespace flowstone {

/// One queue of copies between a device and the host, made in the order in which they were queued. Device addresses are
/// the device's own. Any thread.
class Device {
public:
    /// The result of the copies: 0, or an error number of the device's own.
    using Done = std::function<void(int error)>;

    virtual ~Device() = default;

    /// Queue one copy. Returns 0, or the device's error: then nothing is queued. Blocks only if the host memory is not
    /// pinned. Both memories must stay valid until a later `then` has called back.
    virtual int to_host(std::byte* target, std::uint64_t source, std::uint64_t bytes) = 0;
    virtual int from_host(std::uint64_t target, const std::byte* source, std::uint64_t bytes) = 0;

    /// Call `done` exactly once, in any case, when everything queued so far is over: on a thread of the device's, or
    /// inside `then`. It must not block, nor use the device.
    virtual void then(Done done) = 0;

    /// Let the device access host memory directly, until `unpin`, which must come before unmapping. False if refused:
    /// then the driver copies through memory of its own.
    virtual bool pin(std::byte*, std::uint64_t) { return false; }
    virtual void unpin(std::byte*) {}

    /// "cuda:0"
    virtual std::string name() const = 0;
    /// The device's text for an error number.
    virtual std::string describe(int error) const = 0;
};

/// The fault: a copy between `device` and memory for [offset, offset + length) of a file has failed.
inline Fault device_fault(const Device& device, int error, const File& file, std::uint64_t offset, std::uint64_t length) noexcept {
    try {
        return {"copy from or to " + device.name() + " (" + device.describe(error) + ")", EIO, file.path, offset, length};
    } catch (const std::bad_alloc&) {
        return no_memory(file.path);
    }
}

/// Copies on the CUDA stream `stream` (a CUstream). The driver is loaded at the first call: nothing links to it.
/// Throws std::system_error (ENOSYS) if there is no driver, or it does not know the stream.
std::shared_ptr<Device> make_cuda_device(std::uintptr_t stream, std::string name);

}  // namespace flowstone
