// What kernels have in common that are given a table in host memory: their code, and that memory. For gather_kernel.h and
// digest_kernel.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "aligned.h"
#include "primary_context.h"

namespace flowstone {

struct LaunchShape {
    unsigned threads;     // of a block
    unsigned blocks_max;
};

/// A kernel in PTX. Its parameters: the table's address, the output's, and the number of the table's rows (64, 64 and 32 bits).
struct KernelText {
    const char* ptx;
    const char* entry;
    unsigned threads;         // of a block
    unsigned rows_per_block;  // at a time
    unsigned blocks_max;
};

/// Rows of a table. A kernel numbers them in 32 bits, and steps beyond the last one, by up to as many, before it compares.
inline constexpr std::uint64_t launch_rows_max = std::uint64_t{1} << 30;

/// The kernel, as one GPU's driver has compiled it. The context is current at each call.
class TableKernel {
public:
    /// Loads the kernel, and executes it once for nothing in `stream`, because a driver may load it no sooner.
    TableKernel(const CudaDriver& driver, const KernelText& text, CudaDriver::Stream stream);
    ~TableKernel() { unload(); }
    TableKernel(const TableKernel&) = delete;
    TableKernel& operator=(const TableKernel&) = delete;

    int launch(CudaDriver::Stream stream, const std::byte* table, const std::byte* out, std::uint32_t rows) {
        return launch(stream, table, out, rows, {text_.threads, text_.blocks_max});
    }
    int launch(CudaDriver::Stream stream, const std::byte* table, const std::byte* out, std::uint32_t rows, const LaunchShape& shape);
    bool is_loaded() const { return function_ != nullptr; }
    /// Why it is not; 0: it is.
    int refusal() const { return refusal_; }

private:
    void unload();

    const CudaDriver& driver_;
    const KernelText text_;
    CudaDriver::Module module_ = nullptr;
    CudaDriver::Function function_ = nullptr;
    int refusal_ = 0;
};

/// Host memory for launches on one GPU, which reads tables from it and writes results to it: a GPU without free memory does so
/// as well. Kept for later launches. The context is current at each call but `give_back`.
class LaunchMemory {
public:
    struct Buffer {
        std::byte* memory = nullptr;
        std::uint64_t bytes = 0;
        CudaDriver::Event last = nullptr;  // behind the last launch that uses it
        AlignedBytes pageable = nullptr;   // where the driver had no pinned memory: then there is no event, and no wait

        bool is_pinned() const { return last != nullptr; }
    };

    explicit LaunchMemory(std::shared_ptr<const PrimaryContext> context) : context_(std::move(context)), driver_(context_->driver()) {}
    ~LaunchMemory();
    LaunchMemory(const LaunchMemory&) = delete;
    LaunchMemory& operator=(const LaunchMemory&) = delete;

    /// The smallest buffer of at least so many bytes that no launch uses any more, or a new one. Throws std::bad_alloc.
    std::unique_ptr<Buffer> take(std::uint64_t bytes);
    /// Make buffers of so many bytes, to be taken at the same time; none for 0. Throws std::bad_alloc.
    void reserve(std::span<const std::uint64_t> bytes);
    /// Note that what `stream` has been given uses the buffer. Returns 0 or the driver's error; then nothing uses it.
    int note_use(const Buffer& buffer, CudaDriver::Stream stream);
    /// Any thread, with any context.
    void give_back(std::unique_ptr<Buffer> buffer) noexcept;
    /// Wait until no launch uses a buffer that was given back.
    void settle();

private:
    const std::shared_ptr<const PrimaryContext> context_;
    const CudaDriver& driver_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Buffer>> free_;
    std::size_t buffers_ = 0;  // free, and in use
};

/// A buffer in use; it comes back with its owner. `kernel`: whose code must stay until then.
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
