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

#include "io/backend.h"
#include "bounds.h"

namespace flowstone {

class Layout;

/// One copy, in either direction: `rows` rows of `bytes`; each row is one stride after the previous one, and strides
/// are at least `bytes`. `device` is the address in the device's memory. With a `layout` that begins there: a copy of
/// its packed bytes, from `begin` on, to the host.
struct DeviceCopy {
    std::byte* host;
    std::uint64_t device;
    std::uint64_t bytes;
    bool to_host;
    std::uint64_t rows = 1;
    std::uint64_t host_stride = 0;    // ignored for one row
    std::uint64_t device_stride = 0;
    const Layout* layout = nullptr;  // of a whole array
    std::uint64_t begin = 0;

    /// Whether `next` continues where this one ends, on both sides.
    bool goes_on_with(const DeviceCopy& next) const {
        if (layout != next.layout || rows != 1 || next.rows != 1 || to_host != next.to_host ||
            host + bytes != next.host)
            return false;
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

/// Gathered runs begin at multiples of this, with zeros between them, so that a sample of a short row equals the host's
/// (Line).
inline constexpr std::uint64_t gathered_alignment_bytes = 64;
inline std::uint64_t gathered_bytes(std::span<const DeviceRun> runs) {
    std::uint64_t bytes = 0;
    for (const DeviceRun& run : runs) bytes += round_up(run.bytes, gathered_alignment_bytes);
    return bytes;
}

/// Host memory with gathered runs; it returns to the device's pool with the last reference.
class GatheredRuns {
public:
    virtual ~GatheredRuns() = default;
    virtual std::span<const std::byte> bytes() const = 0;
};

/// The size of a gather, in runs and bytes, and of a digest, in runs; how many runs are of strided memory, and how many
/// digests the kernel leaves to the host. No runs: no gather. With strided runs there are also windows of strided
/// memory.
struct LaunchNeeds {
    std::uint64_t gathered_runs = 0;
    std::uint64_t gathered_bytes = 0;
    std::uint64_t digested_runs = 0;
    std::uint64_t short_runs = 0;
    std::uint64_t strided_runs = 0;
    std::uint64_t strided_digested_runs = 0;
};

/// Digests computed by a device, in host memory that returns to its pool with the last reference.
class DeviceDigests {
public:
    virtual ~DeviceDigests() = default;
    virtual std::uint64_t runs() const = 0;
    /// XXH3-64 of a run. Any thread.
    virtual std::uint64_t digest(std::uint64_t run) const = 0;
};

/// The longest stride of a copy of several rows: CUDA's limit on every GPU (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
inline constexpr std::uint64_t device_stride_max = INT32_MAX;

/// The copies for which the caller's work has to wait: early copies are those of rows that are not lazy.
enum class Copies { all, early };

/// Copies that complete together: those of one window. All memory is allocated before it is submitted.
struct CopyBatch {
    using Queued = std::function<void()>;
    /// Called with the result: 0, or an error number of the device.
    using Done = std::function<void(int error)>;

    CopyBatch(Queued when_queued, Done when_done) : queued(std::move(when_queued)), done(std::move(when_done)) {}

    /// Add a copy, or extend the last copy if this one continues it. May throw std::bad_alloc; then nothing has
    /// changed.
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
    bool waits = false;  // for the work that it follows, even without copies
    std::unique_ptr<CopyBatch> next;  // while a device holds it
};

/// A queue of copies between a device and the host, which are made in order. Any thread.
///
/// Streams of the caller are passed as handles: a CUstream for CUDA.
class Device {
public:
    virtual ~Device() = default;

    /// Submit a batch. Never blocks. Threads of the device call, each exactly once in any case: `queued`, when later
    /// work of the device can be ordered behind the copies; then `done`, when all copies have ended. These callbacks
    /// must not block. All memory must stay valid until `done` is called.
    virtual void submit(std::unique_ptr<CopyBatch> batch) noexcept = 0;

    /// Let batches that are submitted from now on wait for the work that is in `stream` now. Returns 0 or the device's
    /// error; it is an error if the stream is recording a graph, as that work is not executed.
    virtual int follow(std::uintptr_t stream) = 0;
    /// Let work put into `stream` from now on wait for `copies` that are queued now. Returns like `follow`; 0 if there
    /// are none.
    virtual int lead(std::uintptr_t stream, Copies copies = Copies::all) = 0;
    /// Whether `stream` records a graph: work put into it becomes part of the graph instead of being executed.
    virtual bool is_recording(std::uintptr_t stream) = 0;

    /// Queue a gather of runs in `stream`, after the work that is in it. The bytes are there once a batch is done that
    /// was submitted after a later `follow(stream)`. Takes no device memory. Returns like `follow`; error 1 (invalid
    /// value) for 4 GiB and more. Throws std::bad_alloc.
    virtual int gather(std::uintptr_t stream, std::span<const DeviceRun> runs,
                       std::shared_ptr<const GatheredRuns>& gathered) = 0;

    /// Whether a kernel copies strided memory. Otherwise each run is copied by a separate call.
    virtual bool packs() const = 0;

    /// Queue digests of runs in `stream`, after the work that is in it: like `gather`, but of any number of bytes, and
    /// only with shallow layouts. `digested` stays null if the device cannot digest: the driver has refused the
    /// kernels, or pinned memory.
    virtual int digest(std::uintptr_t stream, std::span<const DeviceRun> runs,
                       std::shared_ptr<const DeviceDigests>& digested) = 0;
    /// Allocate host memory for `times` concurrent gathers and digests of this size. Throws std::bad_alloc.
    virtual void reserve_launches(const LaunchNeeds& needs, std::size_t times) = 0;

    /// Pin host memory, so that the device accesses it directly, until `unpin`, which must be called before unmapping.
    /// No byte may be pinned twice. Returns 0, or the device's error: then the driver copies through its own memory.
    virtual int pin(std::byte* memory, std::uint64_t bytes) = 0;
    virtual void unpin(std::byte* memory) = 0;

    /// "cuda:0"
    virtual std::string name() const = 0;
    /// Its name in /sys/bus/pci/devices: "0000:3b:00.0"; "" if the driver does not report it.
    virtual std::string pci_address() const = 0;
    /// The device's text for an error number.
    virtual std::string describe(int error) const = 0;
};

/// The fault of a failed copy between `device` and the memory for [offset, offset + length) of a file.
inline Fault device_fault(const Device& device, int error, const File& file, std::uint64_t offset,
                          std::uint64_t length) noexcept {
    try {
        return {"copy from or to " + device.name() + " (" + device.describe(error) + ")", EIO, file.path, offset,
                length};
    } catch (const std::bad_alloc&) { return no_memory(file.path); }
}

}  // namespace flowstone
