#include "gpu/digest_kernel.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "bounds.h"
#include "codec/digest.h"
#include "gpu/digest_ptx.h"

namespace flowstone {
namespace {

/// Rounded up, as the table after the output is read by sixteen bytes.
std::uint64_t output_bytes(std::uint64_t runs) { return round_up(runs * sizeof(std::uint64_t), sizeof(DigestPart)); }

}  // namespace

// XXH3-64 with seed 0 (https://github.com/Cyan4973/xxHash), for more than 240 bytes: eight sums of 64 bits. Each thread
// keeps two of them. Stripes of 64 bytes are added to the sums in any order; after each block of 16 stripes the sums
// are scrambled. A warp digests one part. Its threads never diverge, except in loads of the last stripes, so that all
// of them reach each shuffle.
const KernelText digest_text{R"ptx(
.version 6.0
.target sm_50
.address_size 64

)ptx" FLOWSTONE_XXH3_KEYS R"ptx(
.visible .entry flowstone_digest(
    .param .u64 digest_table,
    .param .u64 digest_out,
    .param .u32 digest_parts
)
{
    .reg .pred over, wide, apart, more, last, takes;
    .reg .u32 part, parts, step, thread, warps, lane, pair, stripe, bytes, number, stripes, block, blocks;
    .reg .u32 round, skew, rest, at, low, high;
    .reg .u64 table, out, entry, source, along, keys, own, from, place, value, length;
    .reg .u64 key_a, key_b, key_c, key_d, turn_a, turn_b, use_a, use_b, sum_a, sum_b, add_a, add_b;
    .reg .u64 n0, n1, n2, n3, n4, n5, x0, x1, y0, y1;

)ptx" FLOWSTONE_XXH3_THREAD R"ptx(

next_part:
    setp.ge.u32 over, part, parts;
    @over bra end;
    mad.wide.u32 entry, part, 16, table;
    ld.global.u64 source, [entry];
    ld.global.u32 bytes, [entry+8];
    ld.global.u32 number, [entry+12];
    sub.u32 stripes, bytes, 1;
    shr.u32 stripes, stripes, 6;
    shr.u32 blocks, stripes, 4;
    and.b32 stripes, stripes, 15;
    ld.const.u64 sum_a, [own+320];
    ld.const.u64 sum_b, [own+328];

    // Memory is read by aligned words that contain a byte of the part. `from`: the thread's words of the next block.
    cvt.u32.u64 skew, source;
    and.b32 at, skew, 15;
    setp.eq.u32 wide, at, 0;
    and.b32 skew, skew, 7;
    setp.ne.u32 apart, skew, 0;
    shl.b32 skew, skew, 3;
    sub.u32 rest, 64, skew;
    add.u64 from, source, along;
    and.b64 from, from, 0xfffffffffffffff8;
    mov.u32 block, 0;
    setp.lt.u32 more, block, blocks;
    @!more bra next_round;
    @wide ld.global.v2.u64 {n0, n1}, [from];
    @wide ld.global.v2.u64 {n3, n4}, [from+512];
    @wide bra next_round;
    ld.global.u64 n0, [from];
    ld.global.u64 n1, [from+8];
    ld.global.u64 n3, [from+512];
    ld.global.u64 n4, [from+520];
    @!apart bra next_round;
    ld.global.u64 n2, [from+16];
    ld.global.u64 n5, [from+528];

next_round:
    mov.u64 add_a, 0;
    mov.u64 add_b, 0;
    setp.ge.u32 last, block, blocks;
    @last bra tail;
    mov.u64 x0, n0;
    mov.u64 x1, n1;
    mov.u64 y0, n3;
    mov.u64 y1, n4;
    @!apart bra straight;
    shr.u64 x0, n0, skew;
    shl.b64 value, n1, rest;
    or.b64 x0, x0, value;
    shr.u64 x1, n1, skew;
    shl.b64 value, n2, rest;
    or.b64 x1, x1, value;
    shr.u64 y0, n3, skew;
    shl.b64 value, n4, rest;
    or.b64 y0, y0, value;
    shr.u64 y1, n4, skew;
    shl.b64 value, n5, rest;
    or.b64 y1, y1, value;
straight:
    // The next block is loaded while this one is processed.
    add.u32 block, block, 1;
    add.u64 from, from, 1024;
    setp.lt.u32 more, block, blocks;
    @!more bra there;
    @wide ld.global.v2.u64 {n0, n1}, [from];
    @wide ld.global.v2.u64 {n3, n4}, [from+512];
    @wide bra there;
    ld.global.u64 n0, [from];
    ld.global.u64 n1, [from+8];
    ld.global.u64 n3, [from+512];
    ld.global.u64 n4, [from+520];
    @!apart bra there;
    ld.global.u64 n2, [from+16];
    ld.global.u64 n5, [from+528];
there:
    xor.b64 value, x0, key_a;
    mov.b64 {low, high}, value;
    mad.wide.u32 add_a, low, high, x1;
    xor.b64 value, x1, key_b;
    mov.b64 {low, high}, value;
    mad.wide.u32 add_b, low, high, x0;
    xor.b64 value, y0, key_c;
    mov.b64 {low, high}, value;
    mad.wide.u32 add_a, low, high, add_a;
    add.u64 add_a, add_a, y1;
    xor.b64 value, y1, key_d;
    mov.b64 {low, high}, value;
    mad.wide.u32 add_b, low, high, add_b;
    add.u64 add_b, add_b, y0;
    bra sum_up;

    // After the blocks: complete stripes in two rounds, and in a third round the last 64 bytes, with other keys.
tail:
    mov.u32 round, 0;
    mad.wide.u32 place, blocks, 1024, source;
    add.u64 place, place, along;
    mov.u64 use_a, key_a;
    mov.u64 use_b, key_b;
    setp.lt.u32 takes, stripe, stripes;
next_pair:
    @!takes bra pair_over;
    cvt.u32.u64 low, place;
    and.b32 low, low, 7;
    setp.ne.u32 over, low, 0;
    shl.b32 low, low, 3;
    sub.u32 high, 64, low;
    and.b64 entry, place, 0xfffffffffffffff8;
    ld.global.u64 n0, [entry];
    ld.global.u64 n1, [entry+8];
    mov.u64 n2, 0;
    @over ld.global.u64 n2, [entry+16];
    shr.u64 x0, n0, low;
    shl.b64 value, n1, high;
    or.b64 x0, x0, value;
    shr.u64 x1, n1, low;
    shl.b64 value, n2, high;
    or.b64 x1, x1, value;
    xor.b64 value, x0, use_a;
    mov.b64 {low, high}, value;
    mad.wide.u32 add_a, low, high, add_a;
    add.u64 add_a, add_a, x1;
    xor.b64 value, x1, use_b;
    mov.b64 {low, high}, value;
    mad.wide.u32 add_b, low, high, add_b;
    add.u64 add_b, add_b, x0;
pair_over:
    setp.eq.u32 over, round, 2;
    @over bra sum_up;
    setp.eq.u32 over, round, 1;
    add.u32 round, round, 1;
    @over bra last_stripe;
    add.u64 place, place, 512;
    add.u32 at, stripe, 8;
    setp.lt.u32 takes, at, stripes;
    mov.u64 use_a, key_c;
    mov.u64 use_b, key_d;
    bra next_pair;
last_stripe:
    cvt.u64.u32 length, bytes;
    add.u64 place, source, length;
    add.u64 place, place, along;
    sub.u64 place, place, 64;
    setp.lt.u32 takes, lane, 4;
    ld.const.u64 use_a, [own+192];
    ld.const.u64 use_b, [own+200];
    bra next_pair;

)ptx" FLOWSTONE_XXH3_SUM_UP R"ptx(
    @last bra merge;
)ptx" FLOWSTONE_XXH3_TURN R"ptx(
    bra next_round;

)ptx" FLOWSTONE_XXH3_MERGE R"ptx(
    setp.ne.u32 over, lane, 0;
    @over bra part_over;
    mad.wide.u32 entry, number, 8, out;
    st.global.u64 [entry], add_a;
part_over:
    add.u32 part, part, step;
    bra next_part;

end:
    ret;
}
)ptx",
                             "flowstone_digest", 128, 4, INT32_MAX};

/// The kernel's table and output, in a buffer of the device; and the runs that the host digests.
class DigestKernel::Lease final : public DeviceDigests {
public:
    Lease(std::shared_ptr<const DigestKernel> kernel, std::shared_ptr<LaunchMemory> from, std::uint64_t runs,
          std::uint64_t strided_runs)
        : buffer(std::move(kernel), std::move(from), needed_bytes(runs, strided_runs)), runs_(runs) {}

    /// A run that is too short for the kernel: its bytes are gathered.
    struct ShortRun {
        std::uint64_t number;
        std::uint32_t bytes;
        std::uint64_t offset;
    };

    std::uint64_t runs() const override { return runs_; }
    std::uint64_t digest(std::uint64_t run) const override {
        const auto found =
            std::partition_point(shorts.begin(), shorts.end(), [run](const ShortRun& one) { return one.number < run; });
        if (found != shorts.end() && found->number == run)
            return xxh3_64(gathered->bytes().data() + found->offset, found->bytes);
        std::uint64_t value = 0;
        std::memcpy(&value, buffer->memory + run * sizeof value, sizeof value);
        return value;
    }

    const LaunchLease buffer;
    std::vector<ShortRun> shorts;
    std::shared_ptr<const GatheredRuns> gathered;

private:
    const std::uint64_t runs_;
};

DigestKernel::DigestKernel(std::shared_ptr<const PrimaryContext> context, std::shared_ptr<LaunchMemory> memory,
                           std::shared_ptr<GatherKernel> gather, CudaDriver::Stream stream)
    : context_(std::move(context)),
      driver_(context_->driver()),
      memory_(std::move(memory)),
      gather_(std::move(gather)) {
    const ContextScope visit(driver_, context_->get());
    kernel_ = std::make_unique<TableKernel>(driver_, digest_text, stream);
    strided_ = std::make_unique<TableKernel>(driver_, strided_digest_text, stream);
}

DigestKernel::~DigestKernel() {
    const ContextScope visit(driver_, context_->get());
    memory_->settle();
    kernel_.reset();
    strided_.reset();
}

int DigestKernel::digest(CudaDriver::Stream stream, std::span<const DeviceRun> runs,
                         std::shared_ptr<const DeviceDigests>& digested) {
    if (runs.size() > launch_rows_max) return cuda_invalid_value;
    // The kernels count in 32 bits, and add beyond a part's end before they compare.
    const auto is_refused = [](const DeviceRun& run) {
        return run.bytes > INT32_MAX || (run.layout != nullptr && !run.layout->is_shallow());
    };
    if (std::any_of(runs.begin(), runs.end(), is_refused)) return cuda_invalid_value;
    if (!kernel_->is_loaded() || !strided_->is_loaded()) return 0;
    const ContextScope visit(driver_, context_->get());
    const auto is_strided = [](const DeviceRun& run) { return run.layout != nullptr; };
    const auto strided_runs = static_cast<std::uint64_t>(std::count_if(runs.begin(), runs.end(), is_strided));
    const auto lease = std::make_shared<Lease>(shared_from_this(), memory_, runs.size(), strided_runs);
    const LaunchMemory::Buffer& buffer = *lease->buffer;
    if (!buffer.is_pinned()) return 0;
    auto* const parts = reinterpret_cast<DigestPart*>(buffer.memory + output_bytes(runs.size()));
    auto* const strided = reinterpret_cast<PackPart*>(parts + (runs.size() - strided_runs));
    std::uint32_t count = 0, strided_count = 0;
    std::vector<DeviceRun> gathered;
    std::uint64_t offset = 0;
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const DeviceRun& run = runs[i];
        if (run.bytes > digested_by_host_max) {
            if (run.layout == nullptr) {
                new (parts + count++) DigestPart{run.address, run.bytes, static_cast<std::uint32_t>(i)};
            } else {
                PackPart* const part =
                    new (strided + strided_count++) PackPart(part_of(*run.layout, run.address, run.begin, run.bytes));
                part->target = i * sizeof(std::uint64_t);
            }
            continue;
        }
        lease->shorts.push_back({i, run.bytes, offset});
        gathered.push_back(run);
        offset += round_up(run.bytes, gathered_alignment_bytes);
    }
    if (!gathered.empty())
        if (const int error = gather_->gather(stream, gathered, lease->gathered)) return error;
    const auto launch = [&](TableKernel& kernel, const void* table, std::uint32_t rows) {
        return rows == 0 ? 0 : kernel.launch(stream, static_cast<const std::byte*>(table), buffer.memory, rows);
    };
    int error = launch(*kernel_, parts, count);
    if (error == 0) error = launch(*strided_, strided, strided_count);
    const int noted = memory_->note_use(buffer, stream);
    error = error != 0 ? error : noted;
    if (error == 0) digested = lease;
    return error;
}

std::uint64_t DigestKernel::needed_bytes(std::uint64_t runs, std::uint64_t strided_runs) {
    return output_bytes(runs) + (runs - strided_runs) * sizeof(DigestPart) + strided_runs * sizeof(PackPart);
}

}  // namespace flowstone
