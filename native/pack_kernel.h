// A kernel that reads strided memory of a device, and writes it in row-major order into host memory, as one piece of work of a stream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device.h"
#include "kernels.h"
#include "table_kernel.h"

namespace flowstone {

/// A row of the kernel's table, as it reads it: `units` elements from number `first` on, in row-major order, to `target` bytes behind
/// the output's begin. An element is what both sides, and every stride, are multiples of: 2^unit_log bytes, up to 16.
struct PackPart {
    static constexpr std::size_t levels_max = Layout::part_loops_max + 1;  // a run is a level itself

    struct Level {
        std::uint64_t count;
        std::int64_t stride;  // bytes
    };

    std::uint64_t source;  // of element 0
    std::uint64_t target;
    std::uint64_t first;
    std::uint32_t units;
    std::uint8_t unit_log;
    std::uint8_t level_count;  // at least one
    std::uint16_t unused;
    std::array<Level, levels_max> levels;  // the innermost first
};
static_assert(sizeof(PackPart) == 128);

extern const KernelText pack_text;

/// Add the parts that make packed bytes [begin, begin + bytes) of `layout`, which begins at `address`; to `target` bytes behind the
/// output's begin, which lies at a multiple of 16. Throws std::bad_alloc.
void add_parts(const Layout& layout, std::uint64_t address, std::uint64_t begin, std::uint64_t bytes, std::uint64_t target, std::vector<PackPart>& parts);

/// The part that makes packed bytes [begin, begin + bytes) of a shallow `layout`, however many; its target is none yet.
PackPart part_of(const Layout& layout, std::uint64_t address, std::uint64_t begin, std::uint64_t bytes);

/// Whether copies of rows bring memory of this layout as fast as the bus does, in few calls; they take nothing from other kernels.
bool has_long_rows(const Layout& layout);

/// Launches the kernel for one GPU. Any thread.
class PackKernel : public std::enable_shared_from_this<PackKernel> {
public:
    PackKernel(std::shared_ptr<const PrimaryContext> context, std::shared_ptr<LaunchMemory> memory, CudaDriver::Stream stream);
    ~PackKernel();
    PackKernel(const PackKernel&) = delete;
    PackKernel& operator=(const PackKernel&) = delete;

    bool is_loaded() const { return kernel_->is_loaded(); }
    /// Make many short parts, which other work of the stream waits for. The context is current. `table` and `out` are pinned.
    int gather(CudaDriver::Stream stream, const std::byte* table, const std::byte* out, std::uint32_t parts) const;

    /// What a launch uses until it is over.
    struct Launched {
        int error = 0;
        std::shared_ptr<const LaunchLease> table;
    };
    /// Make copies of strided memory into pinned host memory, all by one launch. Where its table would be longer than an eighth of them and
    /// than `table_bytes`, as it is for deep layouts with short sides: by several, of which each waits for the one before. The context is
    /// current. Nothing where it cannot: the driver has refused the kernel, or the host memory is not pinned as one range. Throws
    /// std::bad_alloc.
    std::optional<Launched> copy(CudaDriver::Stream stream, std::span<const DeviceCopy> copies) const;
    /// Of host memory, for the table of a window as long as the longest block that saves use, of a few rows.
    static constexpr std::uint64_t table_bytes = std::uint64_t{64} << 10;

private:
    bool is_there(const DeviceCopy& copy) const;
    std::optional<std::uint64_t> device_pointer(const std::byte* begin, std::uint64_t bytes) const;

    const std::shared_ptr<const PrimaryContext> context_;
    const CudaDriver& driver_;
    const std::shared_ptr<LaunchMemory> memory_;
    std::unique_ptr<TableKernel> kernel_;  // loaded and unloaded in the context
};

}  // namespace flowstone
