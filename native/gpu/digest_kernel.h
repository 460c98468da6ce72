// Kernels that digest many runs, and parts of strided memory, of a device in place, as work of a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gpu/device.h"
#include "gpu/gather_kernel.h"
#include "gpu/table_kernel.h"

namespace flowstone {

/// A row of the kernel's table: the digest of `bytes` from `address` goes to position `number` of the output.
struct DigestPart {
    std::uint64_t address;
    std::uint32_t bytes;
    std::uint32_t number;
};
static_assert(sizeof(DigestPart) == 16);

/// A warp digests one part at a time. The GPU begins a block when another one has ended, so all multiprocessors have
/// work until the end.
extern const KernelText digest_text;

/// The kernel for strided memory: a row of its table is a PackPart, and the digest goes to its `target`.
extern const KernelText strided_digest_text;

/// XXH3 has another rule for up to so many bytes, which the kernel does not implement: these are gathered, and the host
/// digests them.
inline constexpr std::uint32_t digested_by_host_max = 240;

/// Launches the kernel for one GPU. Any thread.
class DigestKernel : public std::enable_shared_from_this<DigestKernel> {
public:
    DigestKernel(std::shared_ptr<const PrimaryContext> context, std::shared_ptr<LaunchMemory> memory,
                 std::shared_ptr<GatherKernel> gather, CudaDriver::Stream stream);
    ~DigestKernel();
    DigestKernel(const DigestKernel&) = delete;
    DigestKernel& operator=(const DigestKernel&) = delete;

    /// See Device::digest.
    int digest(CudaDriver::Stream stream, std::span<const DeviceRun> runs,
               std::shared_ptr<const DeviceDigests>& digested);
    /// Host memory for this many runs, some of them of strided memory.
    static std::uint64_t needed_bytes(std::uint64_t runs, std::uint64_t strided_runs);

private:
    class Lease;

    const std::shared_ptr<const PrimaryContext> context_;
    const CudaDriver& driver_;
    const std::shared_ptr<LaunchMemory> memory_;
    const std::shared_ptr<GatherKernel> gather_;
    std::unique_ptr<TableKernel> kernel_, strided_;  // loaded and unloaded with the context current
};

}  // namespace flowstone
