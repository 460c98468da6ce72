// A kernel that gathers many short runs of a device's memory into host memory, as one piece of work of a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "device.h"
#include "primary_context.h"

namespace flowstone {

/// An entry of the kernel's table, as it reads it: so many bytes from `address` to `offset` bytes behind the output's begin.
struct GatherPart {
    std::uint64_t address;
    std::uint32_t bytes;
    std::uint32_t offset;
};
static_assert(sizeof(GatherPart) == 16);

// Parameters: the table's address, the output's, and the number of parts (64, 64 and 32 bits).
inline constexpr const char* gather_entry = "flowstone_gather";
extern const char* const gather_ptx;

inline constexpr unsigned gather_threads = 128;     // of a block, which copies one part at a time
inline constexpr unsigned gather_blocks_max = 1024;  // several for each processor of today's GPUs

/// Launches the kernel for one GPU. All memory that a launch needs is pinned host memory, which the GPU reads the table from
/// and writes the runs to: a GPU without free memory gathers as well. Any thread.
class GatherKernel : public std::enable_shared_from_this<GatherKernel> {
public:
    /// Loads the kernel, and executes it once for nothing in `stream`, because a driver may load it no sooner. If it is
    /// refused, runs are copied one by one.
    GatherKernel(std::shared_ptr<const PrimaryContext> context, CudaDriver::Stream stream);
    ~GatherKernel();
    GatherKernel(const GatherKernel&) = delete;
    GatherKernel& operator=(const GatherKernel&) = delete;

    /// See Device::gather.
    int gather(CudaDriver::Stream stream, std::span<const DeviceRun> runs, std::shared_ptr<const Gathered>& gathered);
    /// See Device::reserve_gather.
    void reserve(std::uint64_t runs, std::uint64_t bytes);
    /// Why runs are copied one by one; 0: they are not.
    int refusal() const { return refusal_; }

private:
    struct Buffer;
    class Lease;

    void load(CudaDriver::Stream stream);
    void unload();
    std::unique_ptr<Buffer> buffer_of(std::uint64_t bytes);
    void give_back(std::unique_ptr<Buffer> buffer) noexcept;
    int copy_each(CudaDriver::Stream stream, std::span<const GatherPart> parts, std::byte* out);
    int launch(CudaDriver::Stream stream, std::byte* table, std::byte* out, std::uint32_t parts);

    const std::shared_ptr<const PrimaryContext> context_;
    const CudaDriver& driver_;
    CudaDriver::Module module_ = nullptr;
    CudaDriver::Function function_ = nullptr;
    int refusal_ = 0;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Buffer>> free_;
    std::size_t buffers_ = 0;  // free, and in use
};

}  // namespace flowstone
