// The common part of kernels that read a table in host memory: their code, and that memory. For gather_kernel.h and
// digest_kernel.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "io/aligned.h"
#include "gpu/primary_context.h"

namespace flowstone {

struct LaunchShape {
    unsigned threads;     // of a block
    unsigned blocks_max;
};

/// A kernel in PTX. Its parameters: address of the table, address of the output, number of rows (64, 64 and 32 bits).
struct KernelText {
    const char* ptx;
    const char* entry;
    unsigned threads;         // of a block
    unsigned rows_per_block;  // at a time
    unsigned blocks_max;
};

/// The most rows of a table. Row numbers have 32 bits, and a kernel may add up to this number to the last one before it
/// compares.
inline constexpr std::uint64_t launch_rows_max = std::uint64_t{1} << 30;

/// A kernel that one GPU's driver has compiled. The context is current at each call.
class TableKernel {
public:
    /// Loads the kernel, and launches it once without rows in `stream`, as a driver may load it only then.
    TableKernel(const CudaDriver& driver, const KernelText& text, CudaDriver::Stream stream);
    ~TableKernel() { unload(); }
    TableKernel(const TableKernel&) = delete;
    TableKernel& operator=(const TableKernel&) = delete;

    int launch(CudaDriver::Stream stream, const std::byte* table, const std::byte* out, std::uint32_t rows) {
        return launch(stream, table, out, rows, {text_.threads, text_.blocks_max});
    }
    int launch(CudaDriver::Stream stream, const std::byte* table, const std::byte* out, std::uint32_t rows,
               const LaunchShape& shape);
    bool is_loaded() const { return function_ != nullptr; }
    /// The driver's error if it refused the kernel; 0: it is loaded.
    int refusal() const { return refusal_; }

private:
    void unload();

    const CudaDriver& driver_;
    const KernelText text_;
    CudaDriver::Module module_ = nullptr;
    CudaDriver::Function function_ = nullptr;
    int refusal_ = 0;
};

/// A pool of host memory for launches on one GPU, which reads tables from it and writes results to it, so that no GPU
/// memory is needed. The context is current at each call but `give_back`.
class LaunchMemory {
public:
    struct Buffer {
        std::byte* memory = nullptr;
        std::uint64_t bytes = 0;
        CudaDriver::Event last = nullptr;  // behind the last launch that uses it
        AlignedBytes pageable = nullptr;  // if the driver had no pinned memory: then there is no event, and no wait

        bool is_pinned() const { return last != nullptr; }
    };

    explicit LaunchMemory(std::shared_ptr<const PrimaryContext> context)
        : context_(std::move(context)), driver_(context_->driver()) {}
    ~LaunchMemory();
    LaunchMemory(const LaunchMemory&) = delete;
    LaunchMemory& operator=(const LaunchMemory&) = delete;

    /// Take the smallest free buffer of at least `bytes`, or a new one. Throws std::bad_alloc.
    std::unique_ptr<Buffer> take(std::uint64_t bytes);
    /// Allocate buffers of these lengths, which will be taken at the same time; none for 0. Throws std::bad_alloc.
    void reserve(std::span<const std::uint64_t> bytes);
    /// Record that the work in `stream` uses the buffer. Returns 0 or the driver's error; after an error no work uses
    /// it.
    int note_use(const Buffer& buffer, CudaDriver::Stream stream);
    /// Return a buffer to the pool. Any thread, with any context.
    void give_back(std::unique_ptr<Buffer> buffer) noexcept;
    /// Wait until no launch uses a buffer that was returned.
    void settle();

private:
    const std::shared_ptr<const PrimaryContext> context_;
    const CudaDriver& driver_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Buffer>> free_;
    std::size_t buffers_ = 0;  // free, and in use
};

/// A buffer in use, which returns to the pool at destruction. `kernel`: kept loaded until then.
class LaunchLease {
public:
    LaunchLease(std::shared_ptr<const void> kernel, std::shared_ptr<LaunchMemory> from, std::uint64_t bytes)
        : kernel_(std::move(kernel)), from_(std::move(from)), buffer_(from_->take(bytes)) {}
    ~LaunchLease() { from_->give_back(std::move(buffer_)); }
    LaunchLease(const LaunchLease&) = delete;
    LaunchLease& operator=(const LaunchLease&) = delete;

    const LaunchMemory::Buffer& operator*() const { return *buffer_; }
    const LaunchMemory::Buffer* operator->() const { return buffer_.get(); }

private:
    const std::shared_ptr<const void> kernel_;
    const std::shared_ptr<LaunchMemory> from_;
    std::unique_ptr<LaunchMemory::Buffer> buffer_;
};

}  // namespace flowstone
