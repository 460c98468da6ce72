// A kernel that gathers many short runs of a device's memory into host memory, as one launch in a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gpu/device.h"
#include "gpu/pack_kernel.h"
#include "gpu/table_kernel.h"

namespace flowstone {

/// A row of the kernel's table: copy `bytes` from `address` to offset `offset` of the output.
struct GatherPart {
    std::uint64_t address;
    std::uint32_t bytes;
    std::uint32_t offset;
};
static_assert(sizeof(GatherPart) == 16);

/// A block copies one part at a time. There are several blocks for each multiprocessor of today's GPUs.
extern const KernelText gather_text;

/// Launches this kernel, and the kernel for strided memory, on one GPU. Any thread. If the driver has refused a kernel,
/// its runs are copied one by one.
class GatherKernel : public std::enable_shared_from_this<GatherKernel> {
public:
    GatherKernel(std::shared_ptr<const PrimaryContext> context, std::shared_ptr<LaunchMemory> memory,
                 std::shared_ptr<PackKernel> pack, CudaDriver::Stream stream);
    ~GatherKernel();
    GatherKernel(const GatherKernel&) = delete;
    GatherKernel& operator=(const GatherKernel&) = delete;

    /// See Device::gather.
    int gather(CudaDriver::Stream stream, std::span<const DeviceRun> runs,
               std::shared_ptr<const GatheredRuns>& gathered);
    /// Host memory for this many runs, some of them of strided memory, and gathered bytes.
    static std::uint64_t needed_bytes(std::uint64_t runs, std::uint64_t strided_runs, std::uint64_t bytes);

private:
    class Lease;

    int copy_each(CudaDriver::Stream stream, std::span<const DeviceRun> runs, std::byte* out);
    int launch(CudaDriver::Stream stream, std::span<const GatherPart> parts, std::span<const PackPart> strided,
               const std::byte* out);

    const std::shared_ptr<const PrimaryContext> context_;
    const CudaDriver& driver_;
    const std::shared_ptr<LaunchMemory> memory_;
    const std::shared_ptr<PackKernel> pack_;
    std::unique_ptr<TableKernel> kernel_;  // loaded and unloaded with the context current
};

}  // namespace flowstone
