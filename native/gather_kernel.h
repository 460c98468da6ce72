// A kernel that gathers many short runs of a device's memory into host memory, as one piece of work of a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device.h"
#include "pack_kernel.h"
#include "table_kernel.h"

namespace flowstone {

/// A row of the kernel's table, as it reads it: so many bytes from `address` to `offset` bytes behind the output's begin.
struct GatherPart {
    std::uint64_t address;
    std::uint32_t bytes;
    std::uint32_t offset;
};
static_assert(sizeof(GatherPart) == 16);

/// A block copies one part at a time; several blocks for each processor of today's GPUs.
extern const KernelText gather_text;

/// Launches the kernel for one GPU, and that for strided memory beside it. Any thread. Where the driver has refused one of them, its
/// runs are copied one by one.
class GatherKernel : public std::enable_shared_from_this<GatherKernel> {
public:
    GatherKernel(std::shared_ptr<const PrimaryContext> context, std::shared_ptr<LaunchMemory> memory, std::shared_ptr<PackKernel> pack,
                 CudaDriver::Stream stream);
    ~GatherKernel();
    GatherKernel(const GatherKernel&) = delete;
    GatherKernel& operator=(const GatherKernel&) = delete;

    /// See Device::gather.
    int gather(CudaDriver::Stream stream, std::span<const DeviceRun> runs, std::shared_ptr<const Gathered>& gathered);
    /// Of host memory, for so many runs, of which some are of strided memory, and gathered bytes.
    static std::uint64_t needed_bytes(std::uint64_t runs, std::uint64_t strided_runs, std::uint64_t bytes);

private:
    class Lease;

    int copy_each(CudaDriver::Stream stream, std::span<const DeviceRun> runs, std::byte* out);
    int launch(CudaDriver::Stream stream, std::span<const GatherPart> parts, std::span<const PackPart> strided, const std::byte* out);

    const std::shared_ptr<const PrimaryContext> context_;
    const CudaDriver& driver_;
    const std::shared_ptr<LaunchMemory> memory_;
    const std::shared_ptr<PackKernel> pack_;
    std::unique_ptr<TableKernel> kernel_;  // loaded and unloaded in the context
};

}  // namespace flowstone
