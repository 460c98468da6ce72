#include "gpu/table_kernel.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>
#include <utility>

namespace flowstone {
namespace {

constexpr std::uint64_t buffer_bytes_min = std::uint64_t{64} << 10;

}  // namespace

TableKernel::TableKernel(const CudaDriver& driver, const KernelText& text, CudaDriver::Stream stream)
    : driver_(driver), text_(text) {
    refusal_ = driver_.module_load(&module_, text_.ptx);
    if (refusal_ == 0) refusal_ = driver_.module_function(&function_, module_, text_.entry);
    if (refusal_ == 0) refusal_ = launch(stream, nullptr, nullptr, 0);
    if (refusal_ == 0) refusal_ = driver_.stream_synchronize(stream);
    if (refusal_ != 0) unload();
}

void TableKernel::unload() {
    if (module_ != nullptr) (void)driver_.module_unload(std::exchange(module_, nullptr));
    function_ = nullptr;
}

int TableKernel::launch(CudaDriver::Stream stream, const std::byte* table, const std::byte* out, std::uint32_t rows,
                        const LaunchShape& shape) {
    std::uint64_t table_address = reinterpret_cast<std::uintptr_t>(table);
    std::uint64_t out_address = reinterpret_cast<std::uintptr_t>(out);
    void* parameters[] = {&table_address, &out_address, &rows};
    const auto blocks = static_cast<unsigned>((std::uint64_t{rows} + text_.rows_per_block - 1) / text_.rows_per_block);
    return driver_.launch(function_, std::clamp(blocks, 1U, shape.blocks_max), 1, 1, shape.threads, 1, 1, 0, stream,
                          parameters, nullptr);
}

LaunchMemory::~LaunchMemory() {
    const ContextScope visit(driver_, context_->get());
    settle();
    for (const std::unique_ptr<Buffer>& buffer : free_) {
        (void)driver_.event_destroy(buffer->last);  // these fail only if the driver has ended, or the GPU has failed
        (void)driver_.host_free(buffer->memory);
    }
}

void LaunchMemory::settle() {
    const std::lock_guard lock(mutex_);
    for (const std::unique_ptr<Buffer>& buffer : free_)
        while (driver_.event_query(buffer->last) == cuda_not_ready)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::unique_ptr<LaunchMemory::Buffer> LaunchMemory::take(std::uint64_t bytes) {
    {
        const std::lock_guard lock(mutex_);
        const auto is_ready = [&](const auto& one) {
            return one->bytes >= bytes && driver_.event_query(one->last) == 0;
        };
        auto found = free_.end();  // the smallest that is enough, so that larger ones stay for those who reserved them
        for (auto one = free_.begin(); one != free_.end(); ++one)
            if (is_ready(*one) && (found == free_.end() || (*one)->bytes < (*found)->bytes)) found = one;
        if (found != free_.end()) {
            std::unique_ptr<Buffer> buffer = std::move(*found);
            free_.erase(found);
            return buffer;
        }
        free_.reserve(++buffers_);  // so that returning a buffer allocates nothing
    }
    auto buffer = std::make_unique<Buffer>();
    buffer->bytes = std::bit_ceil(std::max(bytes, buffer_bytes_min));
    void* memory = nullptr;
    if (driver_.host_alloc(&memory, buffer->bytes, cuda_host_for_all | cuda_host_mapped) == 0) {
        buffer->memory = static_cast<std::byte*>(memory);
        if (driver_.event_create(&buffer->last, cuda_event_without_timing) == 0) return buffer;
        (void)driver_.host_free(memory);
        buffer->last = nullptr;
    }
    buffer->pageable = allocate_aligned(buffer->bytes);
    buffer->memory = buffer->pageable.get();
    return buffer;
}

void LaunchMemory::reserve(std::span<const std::uint64_t> bytes) {
    struct BufferReturn {
        ~BufferReturn() {
            // Also after an error: a buffer that is only dropped would keep its pinned memory for ever.
            for (std::unique_ptr<Buffer>& buffer : buffers) from.give_back(std::move(buffer));
        }
        LaunchMemory& from;
        std::vector<std::unique_ptr<Buffer>> buffers;
    } taken{*this, {}};
    taken.buffers.reserve(bytes.size());
    for (const std::uint64_t one : bytes)
        if (one != 0) taken.buffers.push_back(take(one));
}

int LaunchMemory::note_use(const Buffer& buffer, CudaDriver::Stream stream) {
    if (!buffer.is_pinned()) return 0;
    const int recorded = driver_.event_record(buffer.last, stream);
    // Without the event, the end of the launch would be unknown, and the memory reused too early.
    if (recorded != 0) (void)driver_.stream_synchronize(stream);
    return recorded;
}

void LaunchMemory::give_back(std::unique_ptr<Buffer> buffer) noexcept {
    const std::lock_guard lock(mutex_);
    if (buffer->is_pinned())
        free_.push_back(std::move(buffer));
    else
        --buffers_;
}

}  // namespace flowstone
