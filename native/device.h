// Memory that the CPU cannot access: an accelerator's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "bounds.h"

namespace flowstone {

class Layout;

/// One copy, in either direction: `rows` times `bytes`, each row at the strides from the one before it, which are `bytes` and
/// more. `device` is the device's own address. Or, with a `layout` that begins there, its packed bytes from `begin` on, to the host.
struct DeviceCopy {
    std::byte* host;
    std::uint64_t device;
    std::uint64_t bytes;
    bool to_host;
    std::uint64_t rows = 1;
    std::uint64_t host_stride = 0;    // without meaning for one row
    std::uint64_t device_stride = 0;
    const Layout* layout = nullptr;  // of a whole array
    std::uint64_t begin = 0;

    /// Whether `next` goes on where this one ends, on both sides.
    bool goes_on_with(const DeviceCopy& next) const {
        if (layout != next.layout || rows != 1 || next.rows != 1 || to_host != next.to_host || host + bytes != next.host) return false;
        return layout == nullptr ? device + bytes == next.device : device == next.device && begin + bytes == next.begin;
    }
};

/// A run of the device's memory; or, with a `layout` that begins at the address, packed bytes of it from `begin` on.
struct DeviceRun {
    std::uint64_t address;
    std::uint32_t bytes;
    const Layout* layout = nullptr;  // of a whole array
    std::uint64_t begin = 0;
};

/// Gathered runs begin at multiples of this, with zeros between them: so a sample of a shorter row is one of the host's (Line).
inline constexpr std::uint64_t gathered_alignment_bytes = 64;
inline std::uint64_t gathered_bytes(std::span<const DeviceRun> runs) {
    std::uint64_t bytes = 0;
    for (const DeviceRun& run : runs) bytes += round_up(run.bytes, gathered_alignment_bytes);
    return bytes;
}

/// Host memory that runs are gathered into; the device takes it back with the last reference.
class Gathered {
public:
    virtual ~Gathered() = default;
    virtual std::span<const std::byte> bytes() const = 0;
};

/// Runs and bytes of a gather, and runs of a digest: of those, so many that the kernel leaves to the host. No gather: no runs. Of a
/// gather's runs, so many are of strided memory (then there are windows of it, too), and of a digest's.
struct LaunchNeeds {
    std::uint64_t gathered_runs = 0;
    std::uint64_t gathered_bytes = 0;
    std::uint64_t digested_runs = 0;
    std::uint64_t short_runs = 0;
    std::uint64_t strided_runs = 0;
    std::uint64_t strided_digested_runs = 0;
};

/// What a device has digested, in host memory that it takes back with the last reference.
class Digested {
public:
    virtual ~Digested() = default;
    virtual std::uint64_t runs() const = 0;
    /// XXH3-64 of a run. Any thread.
    virtual std::uint64_t digest(std::uint64_t run) const = 0;
};

/// The longest stride of a copy of several rows: CUDA's limit on every GPU that it knows (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
inline constexpr std::uint64_t device_stride_max = INT32_MAX;

/// Which copies work of the caller's has to wait for: early ones are of rows that are not lazy.
enum class Copies { all, early };

/// Copies that complete together: those of one window. Everything that has to be allocated is, before it is submitted.
struct CopyBatch {
    using Queued = std::function<void()>;
    /// The result: 0, or an error number of the device's own.
    using Done = std::function<void(int error)>;

    CopyBatch(Queued when_queued, Done when_done) : queued(std::move(when_queued)), done(std::move(when_done)) {}

    /// Joined with the last one if it goes on there. May throw std::bad_alloc; then nothing has changed.
    void add(const DeviceCopy& copy) {
        if (!copies.empty() && copies.back().goes_on_with(copy))
            copies.back().bytes += copy.bytes;
        else
            copies.push_back(copy);
    }

    std::vector<DeviceCopy> copies;
    Queued queued;
    Done done;
    bool early = false;
    bool waits = false;  // for what it follows, also without copies
    std::unique_ptr<CopyBatch> next;  // while a device holds it
};

/// One queue of copies between a device and the host, made in the order of submission. Any thread.
///
/// A stream of the caller's is told by its handle: a CUstream for CUDA.
class Device {
public:
    virtual ~Device() = default;

    /// Take a batch. Never blocks. On threads of the device's own, each exactly once in any case: `queued`, when later
    /// work of the device can be ordered behind the copies; then `done`, when all of them are over. Neither may block. All
    /// memory must stay valid until `done` is called.
    virtual void submit(std::unique_ptr<CopyBatch> batch) noexcept = 0;

    /// What is submitted from now on waits for the work that is in `stream` now. Returns 0 or the device's error, also if
    /// the stream is recording a graph: that work is not executed.
    virtual int follow(std::uintptr_t stream) = 0;
    /// Work put into `stream` from now on waits for those copies that are queued now. Returns as `follow`; 0 if there are none.
    virtual int lead(std::uintptr_t stream, Copies copies = Copies::all) = 0;
    /// Whether what is put into `stream` becomes part of a graph instead of being executed.
    virtual bool is_recording(std::uintptr_t stream) = 0;

    /// Gather runs as the work in `stream` leaves them, on the device, behind that work: they are there once a batch is over
    /// that was submitted after a later `follow(stream)`. Takes no memory of the device's. Returns as `follow`; error 1 (invalid
    /// value) for 4 GiB and more. Throws std::bad_alloc.
    virtual int gather(std::uintptr_t stream, std::span<const DeviceRun> runs, std::shared_ptr<const Gathered>& gathered) = 0;

    /// Whether it copies strided memory with a kernel. Else it does so run by run, which takes a call for each.
    virtual bool packs() const = 0;

    /// Digest runs as the work in `stream` leaves them, on the device, behind that work: as `gather`, but for how many bytes
    /// there may be, and with shallow layouts alone. `digested` stays null where the device cannot: the driver has refused the kernels, or pinned memory.
    virtual int digest(std::uintptr_t stream, std::span<const DeviceRun> runs, std::shared_ptr<const Digested>& digested) = 0;
    /// Have host memory ready for one of each, `times` over, all at the same time. Throws std::bad_alloc.
    virtual void reserve_launches(const LaunchNeeds& needs, std::size_t times) = 0;

    /// Let the device access host memory directly, until `unpin`, which must come before unmapping. No byte may be pinned
    /// twice. Returns 0, or the device's error: then the driver copies through memory of its own.
    virtual int pin(std::byte* memory, std::uint64_t bytes) = 0;
    virtual void unpin(std::byte* memory) = 0;

    /// "cuda:0"
    virtual std::string name() const = 0;
    /// As below /sys/bus/pci/devices: "0000:3b:00.0"; "" if the driver does not say it.
    virtual std::string pci_address() const = 0;
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

}  // namespace flowstone
