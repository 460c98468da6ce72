#include "gpu/gather_kernel.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "bounds.h"

namespace flowstone {
namespace {

std::uint64_t table_bytes(std::uint64_t parts) {
    return round_up(parts * sizeof(GatherPart), gathered_alignment_bytes);
}

}  // namespace

// PTX 6.0 runs with every driver since CUDA 9, and sm_50 on every GPU since Maxwell: the driver compiles it for its
// GPU. The kernel uses no local and no shared memory.
const KernelText gather_text{R"ptx(
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

    // The first `wide` bytes are copied by sixteen; none, unless both sides are aligned to that.
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
)ptx",
                             "flowstone_gather", 128, 1, 1024};

/// Gathered runs, in a buffer of the device.
class GatherKernel::Lease final : public GatheredRuns {
public:
    Lease(std::shared_ptr<const GatherKernel> kernel, std::shared_ptr<LaunchMemory> from, std::uint64_t bytes)
        : buffer(std::move(kernel), std::move(from), bytes) {}

    std::span<const std::byte> bytes() const override { return bytes_; }
    void hold(std::span<const std::byte> bytes) { bytes_ = bytes; }

    const LaunchLease buffer;

private:
    std::span<const std::byte> bytes_;
};

GatherKernel::GatherKernel(std::shared_ptr<const PrimaryContext> context, std::shared_ptr<LaunchMemory> memory,
                           std::shared_ptr<PackKernel> pack, CudaDriver::Stream stream)
    : context_(std::move(context)), driver_(context_->driver()), memory_(std::move(memory)), pack_(std::move(pack)) {
    const ContextScope visit(driver_, context_->get());
    kernel_ = std::make_unique<TableKernel>(driver_, gather_text, stream);
}

GatherKernel::~GatherKernel() {
    const ContextScope visit(driver_, context_->get());
    memory_->settle();  // wait for launches; those with leases keep this object alive
    kernel_.reset();
}

int GatherKernel::copy_each(CudaDriver::Stream stream, std::span<const DeviceRun> runs, std::byte* out) {
    int error = 0;
    const auto copy = [&](std::byte* target, std::uint64_t source, std::uint64_t bytes) {
        if (error == 0) error = driver_.to_host(target, source, bytes, stream);
    };
    for (const DeviceRun& run : runs) {
        if (run.layout == nullptr)
            copy(out, run.address, run.bytes);
        else
            run.layout->for_runs(run.begin, run.begin + run.bytes, [&](const StridedRuns& strided) {
                for (std::uint64_t i = 0; i < strided.count; ++i)
                    copy(out + strided.packed + i * strided.packed_stride,
                         run.address +
                             static_cast<std::uint64_t>(strided.memory +
                                                        static_cast<std::int64_t>(i) * strided.memory_stride),
                         strided.bytes);
            });
        out += round_up(run.bytes, gathered_alignment_bytes);
    }
    return error;
}

/// `parts` are in the buffer, and after them there is room for parts of strided memory.
int GatherKernel::launch(CudaDriver::Stream stream, std::span<const GatherPart> parts,
                         std::span<const PackPart> strided, const std::byte* out) {
    const std::span<const std::byte> table = std::as_bytes(parts);
    const auto count = [](const auto& rows) { return static_cast<std::uint32_t>(rows.size()); };
    if (const int error = parts.empty() ? 0 : kernel_->launch(stream, table.data(), out, count(parts))) return error;
    return strided.empty() ? 0 : pack_->gather(stream, table.data() + table_bytes(parts.size()), out, count(strided));
}

int GatherKernel::gather(CudaDriver::Stream stream, std::span<const DeviceRun> runs,
                         std::shared_ptr<const GatheredRuns>& gathered) {
    if (runs.size() > launch_rows_max) return cuda_invalid_value;
    const std::uint64_t bytes = gathered_bytes(runs);
    // The kernel counts in 32 bits, and adds beyond a run's end before it compares.
    const bool is_long =
        std::any_of(runs.begin(), runs.end(), [](const DeviceRun& run) { return run.bytes > INT32_MAX; });
    if (bytes > UINT32_MAX || is_long) return cuda_invalid_value;
    const ContextScope visit(driver_, context_->get());
    std::vector<PackPart> strided;
    std::uint64_t offset = 0;
    for (const DeviceRun& run : runs) {
        if (run.layout != nullptr) add_parts(*run.layout, run.address, run.begin, run.bytes, offset, strided);
        offset += round_up(run.bytes, gathered_alignment_bytes);
    }
    const auto is_plain = [](const DeviceRun& run) { return run.layout == nullptr; };
    const auto plain = static_cast<std::uint64_t>(std::count_if(runs.begin(), runs.end(), is_plain));
    const std::uint64_t tables =
        table_bytes(plain) + round_up(strided.size() * sizeof(PackPart), gathered_alignment_bytes);
    const auto lease = std::make_shared<Lease>(shared_from_this(), memory_, tables + bytes);
    const LaunchMemory::Buffer& buffer = *lease->buffer;
    std::byte* const out = buffer.memory + tables;
    auto* const parts = reinterpret_cast<GatherPart*>(buffer.memory);
    std::size_t next = 0;
    offset = 0;
    for (const DeviceRun& run : runs) {
        if (run.layout == nullptr)
            new (parts + next++) GatherPart{run.address, run.bytes, static_cast<std::uint32_t>(offset)};
        const std::uint64_t room = round_up(run.bytes, gathered_alignment_bytes);
        std::memset(out + offset + run.bytes, 0, room - run.bytes);
        offset += room;
    }
    if (!strided.empty())
        std::memcpy(buffer.memory + table_bytes(plain), strided.data(), strided.size() * sizeof(PackPart));
    lease->hold({out, bytes});
    const bool has_kernels = (plain == 0 || kernel_->is_loaded()) && (strided.empty() || pack_->is_loaded());
    int error =
        has_kernels && buffer.is_pinned() ? launch(stream, {parts, plain}, strided, out) : copy_each(stream, runs, out);
    const int noted = memory_->note_use(buffer, stream);
    error = error != 0 ? error : noted;
    if (error == 0) gathered = lease;
    return error;
}

std::uint64_t GatherKernel::needed_bytes(std::uint64_t runs, std::uint64_t strided_runs, std::uint64_t bytes) {
    return table_bytes(runs - strided_runs) + round_up(strided_runs * sizeof(PackPart), gathered_alignment_bytes) +
        bytes;
}

}  // namespace flowstone
