// Kernels that digest many runs of a device's memory, and parts of strided memory, where they lie, as work of a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device.h"
#include "gather_kernel.h"
#include "table_kernel.h"

namespace flowstone {

/// A row of the kernel's table, as it reads it: the digest of so many bytes from `address` is number `number` of the output.
struct DigestPart {
    std::uint64_t address;
    std::uint32_t bytes;
    std::uint32_t number;
};
static_assert(sizeof(DigestPart) == 16);

/// A warp digests one part at a time; the GPU begins a block when another one has ended, so all have work until the end.
extern const KernelText digest_text;

/// Of strided memory: a row of its table is a PackPart, of which `target` is where the digest goes.
extern const KernelText strided_digest_text;

/// XXH3 has another rule for so many bytes and less, which the kernel does not know: they are gathered, and digested here.
inline constexpr std::uint32_t digested_by_host_max = 240;

/// Launches the kernel for one GPU. Any thread.
class DigestKernel : public std::enable_shared_from_this<DigestKernel> {
public:
    DigestKernel(std::shared_ptr<const PrimaryContext> context, std::shared_ptr<LaunchMemory> memory, std::shared_ptr<GatherKernel> gather,
                 CudaDriver::Stream stream);
    ~DigestKernel();
    DigestKernel(const DigestKernel&) = delete;
    DigestKernel& operator=(const DigestKernel&) = delete;

    /// See Device::digest.
    int digest(CudaDriver::Stream stream, std::span<const DeviceRun> runs, std::shared_ptr<const Digested>& digested);
    /// Of host memory, for so many runs, of which some are of strided memory.
    static std::uint64_t needed_bytes(std::uint64_t runs, std::uint64_t strided_runs);

private:
    class Lease;

    const std::shared_ptr<const PrimaryContext> context_;
    const CudaDriver& driver_;
    const std::shared_ptr<LaunchMemory> memory_;
    const std::shared_ptr<GatherKernel> gather_;
    std::unique_ptr<TableKernel> kernel_, strided_;  // loaded and unloaded in the context
};

}  // namespace flowstone
