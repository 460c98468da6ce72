// A kernel that reads strided memory of a device, and writes it in row-major order into host memory, as one launch in a
// stream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gpu/device.h"
#include "capture/copy_kernels.h"
#include "gpu/table_kernel.h"

namespace flowstone {

/// A row of the kernel's table: copy `units` elements from number `first` on, in row-major order, to offset `target` of
/// the output. An element has 2^unit_log bytes, up to 16: the largest that divides both addresses and every stride.
struct PackPart {
    static constexpr std::size_t levels_max = Layout::part_loops_max + 1;  // a run is a level, too

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

/// Add the parts that write packed bytes [begin, begin + bytes) of `layout`, which begins at `address`, to offset
/// `target` of the output, which is aligned to 16. Throws std::bad_alloc.
void add_parts(const Layout& layout, std::uint64_t address, std::uint64_t begin, std::uint64_t bytes,
               std::uint64_t target, std::vector<PackPart>& parts);

/// The part for packed bytes [begin, begin + bytes) of a shallow `layout`; its target is not set.
PackPart part_of(const Layout& layout, std::uint64_t address, std::uint64_t begin, std::uint64_t bytes);

/// Whether a few copies of rows move memory of this layout at the rate of the bus. Such copies do not slow other
/// kernels down.
bool has_long_rows(const Layout& layout);

/// Launches the kernel for one GPU. Any thread.
class PackKernel : public std::enable_shared_from_this<PackKernel> {
public:
    PackKernel(std::shared_ptr<const PrimaryContext> context, std::shared_ptr<LaunchMemory> memory,
               CudaDriver::Stream stream);
    ~PackKernel();
    PackKernel(const PackKernel&) = delete;
    PackKernel& operator=(const PackKernel&) = delete;

    bool is_loaded() const { return kernel_->is_loaded(); }
    /// Copy many short parts, for which other work of the stream waits. The context is current. `table` and `out` are
    /// pinned.
    int gather(CudaDriver::Stream stream, const std::byte* table, const std::byte* out, std::uint32_t parts) const;

    /// The memory of a launch, until it has ended.
    struct Launch {
        int error = 0;
        std::shared_ptr<const LaunchLease> table;
    };
    /// Copy strided memory into pinned host memory, by one launch. If its table would be longer than an eighth of the
    /// copies and longer than `table_bytes`, as for deep layouts with short sides, several launches are made, each
    /// waiting for the previous one. The context is current. Returns nullopt if that is impossible: the driver has
    /// refused the kernel, or the host memory is not pinned as one range. Throws std::bad_alloc.
    std::optional<Launch> copy(CudaDriver::Stream stream, std::span<const DeviceCopy> copies) const;
    /// Host memory for the table of a window of the longest block that saves use, with few rows.
    static constexpr std::uint64_t table_bytes = std::uint64_t{64} << 10;

private:
    bool is_there(const DeviceCopy& copy) const;
    std::optional<std::uint64_t> device_pointer(const std::byte* begin, std::uint64_t bytes) const;

    const std::shared_ptr<const PrimaryContext> context_;
    const CudaDriver& driver_;
    const std::shared_ptr<LaunchMemory> memory_;
    std::unique_ptr<TableKernel> kernel_;  // loaded and unloaded with the context current
};

}  // namespace flowstone
