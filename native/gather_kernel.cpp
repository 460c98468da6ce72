#include "gather_kernel.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "aligned.h"
#include "bounds.h"

namespace flowstone {
namespace {

constexpr std::uint64_t buffer_bytes_min = std::uint64_t{64} << 10;

std::uint64_t table_bytes(std::uint64_t parts) { return round_up(parts * sizeof(GatherPart), gathered_alignment_bytes); }

}  // namespace

// PTX 6.0 is understood by every driver since CUDA 9, and sm_50 is every GPU since Maxwell; the driver makes the GPU's own code
// of it. No local memory, no shared memory.
const char* const gather_ptx = R"ptx(
.version 6.0
.target sm_50
.address_size 64

.visible .entry flowstone_gather(
    .param .u64 gather_table,
    .param .u64 gather_out,
    .param .u32 gather_parts
)
{
    .reg .pred over, apart;
    .reg .u32 part, parts, blocks, thread, threads, bytes, offset, wide, at, a, b, c, d;
    .reg .u64 table, out, entry, source, target, both, from, to, along;
    .reg .u16 byte;

    ld.param.u64 table, [gather_table];
    ld.param.u64 out, [gather_out];
    ld.param.u32 parts, [gather_parts];
    mov.u32 part, %ctaid.x;
    mov.u32 blocks, %nctaid.x;
    mov.u32 thread, %tid.x;
    mov.u32 threads, %ntid.x;

next_part:
    setp.ge.u32 over, part, parts;
    @over bra end;
    mad.wide.u32 entry, part, 16, table;
    ld.global.u64 source, [entry];
    ld.global.u32 bytes, [entry+8];
    ld.global.u32 offset, [entry+12];
    cvt.u64.u32 target, offset;
    add.u64 target, target, out;

    // The first `wide` bytes go by sixteen; none, unless both sides lie so.
    and.b32 wide, bytes, 0xfffffff0;
    or.b64 both, source, target;
    and.b64 both, both, 15;
    setp.ne.u64 apart, both, 0;
    selp.b32 wide, 0, wide, apart;
    shl.b32 at, thread, 4;
next_sixteen:
    setp.ge.u32 over, at, wide;
    @over bra rest;
    cvt.u64.u32 along, at;
    add.u64 from, source, along;
    add.u64 to, target, along;
    ld.global.v4.u32 {a, b, c, d}, [from];
    st.global.v4.u32 [to], {a, b, c, d};
    mad.lo.u32 at, threads, 16, at;
    bra next_sixteen;

rest:
    add.u32 at, wide, thread;
next_byte:
    setp.ge.u32 over, at, bytes;
    @over bra part_over;
    cvt.u64.u32 along, at;
    add.u64 from, source, along;
    add.u64 to, target, along;
    ld.global.u8 byte, [from];
    st.global.u8 [to], byte;
    add.u32 at, at, threads;
    bra next_byte;

part_over:
    add.u32 part, part, blocks;
    bra next_part;

end:
    ret;
}
)ptx";

/// Host memory for one gather at a time: its table, and behind it what it gathers.
struct GatherKernel::Buffer {
    std::byte* memory = nullptr;
    std::uint64_t bytes = 0;
    CudaDriver::Event last = nullptr;  // behind the last gather into it
    AlignedBytes pageable = nullptr;   // where the driver had no pinned memory: then there is no event, and no wait
};

/// A buffer in use; it comes back with the last reference.
class GatherKernel::Lease final : public Gathered {
public:
    explicit Lease(std::shared_ptr<GatherKernel> from) : from_(std::move(from)) {}
    ~Lease() override {
        if (buffer_) from_->give_back(std::move(buffer_));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    std::span<const std::byte> bytes() const override { return bytes_; }
    Buffer& take(std::unique_ptr<Buffer> buffer) {
        buffer_ = std::move(buffer);
        return *buffer_;
    }
    void hold(std::span<const std::byte> bytes) { bytes_ = bytes; }

private:
    const std::shared_ptr<GatherKernel> from_;
    std::unique_ptr<Buffer> buffer_;
    std::span<const std::byte> bytes_;
};

GatherKernel::GatherKernel(std::shared_ptr<const PrimaryContext> context, CudaDriver::Stream stream)
    : context_(std::move(context)), driver_(context_->driver()) {
    const Visit visit(driver_, context_->get());
    load(stream);
    if (refusal_ != 0) unload();
}

GatherKernel::~GatherKernel() {
    const Visit visit(driver_, context_->get());
    for (const std::unique_ptr<Buffer>& buffer : free_) {
        if (buffer->last == nullptr) continue;
        while (driver_.event_query(buffer->last) == cuda_not_ready) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        (void)driver_.event_destroy(buffer->last);  // these fail only if the driver has ended, or the GPU has failed
        (void)driver_.host_free(buffer->memory);
    }
    unload();
}

void GatherKernel::load(CudaDriver::Stream stream) {
    refusal_ = driver_.module_load(&module_, gather_ptx);
    if (refusal_ == 0) refusal_ = driver_.module_function(&function_, module_, gather_entry);
    if (refusal_ == 0) refusal_ = launch(stream, nullptr, nullptr, 0);
    if (refusal_ == 0) refusal_ = driver_.stream_synchronize(stream);
}

void GatherKernel::unload() {
    if (module_ != nullptr) (void)driver_.module_unload(std::exchange(module_, nullptr));
    function_ = nullptr;
}

int GatherKernel::launch(CudaDriver::Stream stream, std::byte* table, std::byte* out, std::uint32_t parts) {
    std::uint64_t table_address = reinterpret_cast<std::uintptr_t>(table);
    std::uint64_t out_address = reinterpret_cast<std::uintptr_t>(out);
    void* parameters[] = {&table_address, &out_address, &parts};
    return driver_.launch(function_, std::clamp(parts, 1U, gather_blocks_max), 1, 1, gather_threads, 1, 1, 0, stream, parameters, nullptr);
}

int GatherKernel::copy_each(CudaDriver::Stream stream, std::span<const GatherPart> parts, std::byte* out) {
    for (const GatherPart& part : parts)
        if (const int error = driver_.to_host(out + part.offset, part.address, part.bytes, stream)) return error;
    return 0;
}

int GatherKernel::gather(CudaDriver::Stream stream, std::span<const DeviceRun> runs, std::shared_ptr<const Gathered>& gathered) {
    const std::uint64_t bytes = gathered_bytes(runs);
    // The kernel counts in 32 bits, and steps beyond a run's end before it compares.
    const bool is_long = std::any_of(runs.begin(), runs.end(), [](const DeviceRun& run) { return run.bytes > INT32_MAX; });
    if (runs.size() > UINT32_MAX || bytes > UINT32_MAX || is_long) return cuda_invalid_value;
    const Visit visit(driver_, context_->get());
    const std::uint64_t table = table_bytes(runs.size());
    const auto lease = std::make_shared<Lease>(shared_from_this());
    Buffer& buffer = lease->take(buffer_of(table + bytes));
    auto* const parts = reinterpret_cast<GatherPart*>(buffer.memory);
    std::byte* const out = buffer.memory + table;
    std::uint32_t offset = 0;
    for (std::size_t i = 0; i < runs.size(); ++i) {
        new (parts + i) GatherPart{runs[i].address, runs[i].bytes, offset};
        const auto room = static_cast<std::uint32_t>(round_up(runs[i].bytes, gathered_alignment_bytes));
        std::memset(out + offset + runs[i].bytes, 0, room - runs[i].bytes);
        offset += room;
    }
    lease->hold({out, bytes});
    const bool is_pinned = buffer.last != nullptr;
    int error = function_ != nullptr && is_pinned ? launch(stream, buffer.memory, out, static_cast<std::uint32_t>(runs.size()))
                                                  : copy_each(stream, {parts, runs.size()}, out);
    if (is_pinned) {
        const int recorded = driver_.event_record(buffer.last, stream);
        // Without it nothing would say when the kernel is over: the memory would be used again under it.
        if (recorded != 0) (void)driver_.stream_synchronize(stream);
        error = error != 0 ? error : recorded;
    }
    if (error == 0) gathered = lease;
    return error;
}

void GatherKernel::reserve(std::uint64_t runs, std::uint64_t bytes) {
    const Visit visit(driver_, context_->get());
    give_back(buffer_of(table_bytes(runs) + bytes));
}

std::unique_ptr<GatherKernel::Buffer> GatherKernel::buffer_of(std::uint64_t bytes) {
    {
        const std::lock_guard lock(mutex_);
        const auto is_ready = [&](const auto& one) { return one->bytes >= bytes && driver_.event_query(one->last) == 0; };
        auto found = free_.end();  // the least that is enough: what `reserve` has made for a save is left to it
        for (auto one = free_.begin(); one != free_.end(); ++one)
            if (is_ready(*one) && (found == free_.end() || (*one)->bytes < (*found)->bytes)) found = one;
        if (found != free_.end()) {
            std::unique_ptr<Buffer> buffer = std::move(*found);
            free_.erase(found);
            return buffer;
        }
        free_.reserve(++buffers_);  // so that a buffer comes back without an allocation
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

void GatherKernel::give_back(std::unique_ptr<Buffer> buffer) noexcept {
    const std::lock_guard lock(mutex_);
    if (buffer->last != nullptr) free_.push_back(std::move(buffer));
    else --buffers_;
}

}  // namespace flowstone
