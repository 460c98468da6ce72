#include "gpu/pack_kernel.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "bounds.h"

namespace flowstone {
namespace {

// A block copies one part at a time: each block of a launch gets one part of a window of 8 MiB.
constexpr std::uint64_t part_bytes = std::uint64_t{256} << 10;
// A table is pinned memory outside of the budget, kept for later windows. It is no longer than this part (1/8) of the
// bytes that it describes, or `table_bytes`.
constexpr std::uint64_t table_share = 8;
// At the beginning of a save parts are short, and other work waits for them: use many blocks of fewer threads.
constexpr LaunchShape gather_shape{128, 1024};
// A driver maps memory of a GPU in pages of this length, or of a multiple.
constexpr std::uint64_t device_page_bytes = std::uint64_t{2} << 20;

// With shorter rows, a copy engine does not reach the rate of the bus (an estimate); for shorter copies, the call takes
// most of the time.
constexpr std::uint64_t row_bytes_min = 512;
constexpr std::uint64_t copy_bytes_min = std::uint64_t{64} << 10;

std::uint64_t magnitude(std::int64_t stride) { return static_cast<std::uint64_t>(std::abs(stride)); }

/// The loops of a layout for which a part has levels, and the run inside.
struct PartLoops {
    std::span<const Layout::Loop> loops;
    std::uint64_t run_bytes;
    std::uint64_t address;
};

/// How many loops of a layout are outside of those of a part, and the packed bytes of one of their iterations.
std::pair<std::size_t, std::uint64_t> outer_loops(const Layout& layout) {
    const std::span<const Layout::Loop> loops = layout.loops();
    const std::size_t outer = loops.size() - std::min(loops.size(), Layout::part_loops_max);
    return {outer, outer == 0 ? layout.packed_bytes() : loops[outer - 1].packed_stride};
}

/// A number of packed bytes that, from any start, needs at most `parts` parts (at least four). Three parts are for the
/// cut ends; and an iteration longer than a part may be two parts that are hardly longer than half of one.
std::uint64_t bytes_of_parts(const Layout& layout, std::uint64_t parts) {
    return (parts - 3) * std::min(outer_loops(layout).second, part_bytes / 2);
}

PackPart part_of(const PartLoops& nest, std::uint64_t begin, std::uint64_t bytes, std::uint64_t target) {
    std::uint64_t all = nest.run_bytes | nest.address | begin | bytes | target | 16;
    for (const Layout::Loop& loop : nest.loops) all |= magnitude(loop.memory_stride);
    const auto unit_log = static_cast<std::uint8_t>(std::countr_zero(all));
    PackPart part{
        nest.address, target, begin >> unit_log, static_cast<std::uint32_t>(bytes >> unit_log), unit_log, 0, 0, {}};
    part.levels[part.level_count++] = {nest.run_bytes >> unit_log, std::int64_t{1} << unit_log};
    for (std::size_t d = nest.loops.size(); d-- > 0;) {
        if (part.levels[0].count == 1) part.level_count = 0;  // a run is one element
        part.levels[part.level_count++] = {nest.loops[d].count, nest.loops[d].memory_stride};
    }
    return part;
}

void add_parts(const PartLoops& nest, std::uint64_t begin, std::uint64_t bytes, std::uint64_t target,
               std::vector<PackPart>& parts) {
    PackPart part = part_of(nest, begin, bytes, target);
    for (std::uint64_t at = 0; at < bytes; at += part_bytes) {
        part.target = target + at;
        part.first = (begin + at) >> part.unit_log;
        part.units = static_cast<std::uint32_t>(std::min(part_bytes, bytes - at) >> part.unit_log);
        parts.push_back(part);
    }
}

/// The range of memory, relative to the layout's beginning, that contains packed bytes [begin, end), by the outermost
/// loop only.
std::pair<std::int64_t, std::int64_t> reach_of(const Layout& layout, std::uint64_t begin, std::uint64_t end) {
    const Layout::Loop& outer = layout.loops().front();
    const auto first = static_cast<std::int64_t>(begin / outer.packed_stride),
               last = static_cast<std::int64_t>((end - 1) / outer.packed_stride);
    std::int64_t low = std::min(first * outer.memory_stride, last * outer.memory_stride);
    std::int64_t high = std::max(first * outer.memory_stride, last * outer.memory_stride);
    for (const Layout::Loop& loop : layout.loops().subspan(1))
        (loop.memory_stride < 0 ? low : high) += static_cast<std::int64_t>(loop.count - 1) * loop.memory_stride;
    return {low, high + static_cast<std::int64_t>(layout.run_bytes())};
}

// Code that is the same for each level. A thread's elements are as far apart as a block has threads. `step` is that
// distance as a number with a digit for each level, and `at` is the position of the element. So a part needs one
// division for each level, and an element none: digits are added, with carry.
#define FLOWSTONE_LEVEL(d) \
    "    mov.u64 at" #d \
    ", 0;\n" \
    "    mov.u64 step" #d \
    ", 0;\n" \
    "    mov.u64 count" #d \
    ", 0x8000000000000000;\n" \
    "    mov.u64 back" #d ", 0;\n"

#define FLOWSTONE_DIGITS(d) \
    "    ld.global.v2.u64 {count" #d \
    ", stride}, [entry];\n" \
    "    add.u64 entry, entry, 16;\n" \
    "    div.u64 whole, rest, count" #d \
    ";\n" \
    "    mul.lo.u64 at" #d ", whole, count" #d \
    ";\n" \
    "    sub.u64 at" #d ", rest, at" #d \
    ";\n" \
    "    mov.u64 rest, whole;\n" \
    "    div.u64 whole, leap, count" #d \
    ";\n" \
    "    mul.lo.u64 step" #d ", whole, count" #d \
    ";\n" \
    "    sub.u64 step" #d ", leap, step" #d \
    ";\n" \
    "    mov.u64 leap, whole;\n" \
    "    mad.lo.u64 from, at" #d \
    ", stride, from;\n" \
    "    mad.lo.u64 hop, step" #d \
    ", stride, hop;\n" \
    "    mul.lo.u64 back" #d ", count" #d ", stride;\n"

// A level at its end starts again, and the level outside of it advances.
#define FLOWSTONE_NEXT(outer, d) \
    "    setp.eq.u32 over, levels, " #outer \
    ";\n" \
    "    @over bra first_unit;\n" FLOWSTONE_DIGITS(outer) "    sub.u64 back" #d ", back" #d ", stride;\n"

#define FLOWSTONE_CARRY(d, outer) \
    "    add.u64 at" #d ", at" #d ", step" #d \
    ";\n" \
    "    setp.ge.u64 turn, at" #d ", count" #d \
    ";\n" \
    "    @turn sub.u64 at" #d ", at" #d ", count" #d \
    ";\n" \
    "    @turn sub.u64 from, from, back" #d \
    ";\n" \
    "    @turn add.u64 at" #outer ", at" #outer ", 1;\n"

// From the place of one of a thread's elements to that of the next.
#define FLOWSTONE_ADVANCE \
    "    add.u64 from, from, hop;\n" FLOWSTONE_CARRY(0, 1) FLOWSTONE_CARRY(1, 2) FLOWSTONE_CARRY(2, 3) \
        FLOWSTONE_CARRY(3, 4) FLOWSTONE_CARRY(4, 5)

// Copy four elements of a thread, as wide as `kind`; the last three may be beyond the end.
#define FLOWSTONE_FOUR(kind, r) \
    "    ld.global." kind " " r \
    "0, [from0];\n" \
    "    @has1 ld.global." kind " " r \
    "1, [from1];\n" \
    "    @has2 ld.global." kind " " r \
    "2, [from2];\n" \
    "    @has3 ld.global." kind " " r \
    "3, [from3];\n" \
    "    st.global." kind " [to], " r \
    "0;\n" \
    "    @has1 st.global." kind " [to1], " r \
    "1;\n" \
    "    @has2 st.global." kind " [to2], " r \
    "2;\n" \
    "    @has3 st.global." kind " [to3], " r \
    "3;\n" \
    "    bra next_units;\n"

}  // namespace

// Neighbouring threads write neighbouring elements, so a warp writes full lines over the bus. Its reads may be
// anywhere; the GPU's cache keeps the lines for other elements. A thread has four loads in flight: with 8,192 threads
// and elements of two bytes these are 64 KB, which a bus of 55 GB/s moves in a microsecond, about the latency of a
// load. More blocks would keep training's blocks from the GPU's other multiprocessors until the bus has moved a window.
// No local memory, no shared memory.
const KernelText pack_text{
    R"ptx(
.version 6.0
.target sm_50
.address_size 64

.visible .entry flowstone_pack(
    .param .u64 pack_table,
    .param .u64 pack_out,
    .param .u32 pack_parts
)
.maxntid 256, 1, 1
{
    .reg .pred over, turn, by1, by2, by4, by8, has1, has2, has3;
    .reg .u32 part, parts, blocks, thread, threads, unit, units, log, levels, other, word0, word1, word2, word3;
    .reg .u32 a, b, c, d;
    .reg .u64 table, out, entry, from, from0, from1, from2, from3, to, to1, to2, to3, rest;
    .reg .u64 leap, whole, stride, hop, along;
    .reg .u64 eight0, eight1, eight2, eight3;
    .reg .u64 at0, at1, at2, at3, at4, at5, step0, step1, step2, step3, step4, step5;
    .reg .u64 count0, count1, count2, count3, count4, count5, back0, back1, back2, back3, back4, back5;
    .reg .u16 byte0, byte1, byte2, byte3, half0, half1, half2, half3;

    ld.param.u64 table, [pack_table];
    ld.param.u64 out, [pack_out];
    ld.param.u32 parts, [pack_parts];
    mov.u32 part, %ctaid.x;
    mov.u32 blocks, %nctaid.x;
    mov.u32 thread, %tid.x;
    mov.u32 threads, %ntid.x;

next_part:
    setp.ge.u32 over, part, parts;
    @over bra end;
    mad.wide.u32 entry, part, 128, table;
    ld.global.u32 units, [entry+24];
    mov.u32 unit, thread;
    setp.ge.u32 over, unit, units;
    @over bra part_over;
    ld.global.u64 from, [entry];
    ld.global.u64 to, [entry+8];
    ld.global.u64 rest, [entry+16];
    ld.global.u32 log, [entry+28];
    shr.u32 levels, log, 8;
    and.b32 levels, levels, 255;
    and.b32 log, log, 255;
    setp.eq.u32 by1, log, 0;
    setp.eq.u32 by2, log, 1;
    setp.eq.u32 by4, log, 2;
    setp.eq.u32 by8, log, 3;
    cvt.u64.u32 along, thread;
    add.u64 rest, rest, along;
    shl.b64 along, along, log;
    add.u64 to, to, out;
    add.u64 to, to, along;
    cvt.u64.u32 leap, threads;
    shl.b64 along, leap, log;
    mov.u64 hop, 0;
    add.u64 entry, entry, 32;
)ptx" FLOWSTONE_LEVEL(0) FLOWSTONE_LEVEL(1) FLOWSTONE_LEVEL(2) FLOWSTONE_LEVEL(3) FLOWSTONE_LEVEL(4) FLOWSTONE_LEVEL(5)
        FLOWSTONE_DIGITS(0) FLOWSTONE_NEXT(1, 0) FLOWSTONE_NEXT(2, 1) FLOWSTONE_NEXT(3, 2) FLOWSTONE_NEXT(4, 3)
            FLOWSTONE_NEXT(5, 4)
                R"ptx(
first_unit:
)ptx"
                "    mov.u64 from0, from;\n" FLOWSTONE_ADVANCE "    mov.u64 from1, from;\n" FLOWSTONE_ADVANCE
                "    mov.u64 from2, from;\n" FLOWSTONE_ADVANCE "    mov.u64 from3, from;\n" FLOWSTONE_ADVANCE
                R"ptx(
    add.u32 other, unit, threads;
    setp.lt.u32 has1, other, units;
    add.u32 other, other, threads;
    setp.lt.u32 has2, other, units;
    add.u32 other, other, threads;
    setp.lt.u32 has3, other, units;
    add.u32 unit, other, threads;
    add.u64 to1, to, along;
    add.u64 to2, to1, along;
    add.u64 to3, to2, along;
    @by4 bra units_of_4;
    @by2 bra units_of_2;
    @by1 bra units_of_1;
    @by8 bra units_of_8;
    // For elements of 16 bytes, one load at a time is enough.
    ld.global.v4.u32 {a, b, c, d}, [from0];
    st.global.v4.u32 [to], {a, b, c, d};
    @has1 ld.global.v4.u32 {a, b, c, d}, [from1];
    @has1 st.global.v4.u32 [to1], {a, b, c, d};
    @has2 ld.global.v4.u32 {a, b, c, d}, [from2];
    @has2 st.global.v4.u32 [to2], {a, b, c, d};
    @has3 ld.global.v4.u32 {a, b, c, d}, [from3];
    @has3 st.global.v4.u32 [to3], {a, b, c, d};
    bra next_units;
units_of_1:
)ptx" FLOWSTONE_FOUR("u8", "byte") "units_of_2:\n" FLOWSTONE_FOUR("u16", "half") "units_of_4:\n" FLOWSTONE_FOUR(
                    "u32", "word") "units_of_8:\n" FLOWSTONE_FOUR("u64", "eight")
                    R"ptx(
next_units:
    setp.ge.u32 over, unit, units;
    @over bra part_over;
    add.u64 to, to3, along;
    bra first_unit;

part_over:
    add.u32 part, part, blocks;
    bra next_part;

end:
    ret;
}
)ptx",
    "flowstone_pack", 256, 1, 32};

#undef FLOWSTONE_LEVEL
#undef FLOWSTONE_DIGITS
#undef FLOWSTONE_NEXT
#undef FLOWSTONE_CARRY
#undef FLOWSTONE_ADVANCE
#undef FLOWSTONE_FOUR

void add_parts(const Layout& layout, std::uint64_t address, std::uint64_t begin, std::uint64_t bytes,
               std::uint64_t target, std::vector<PackPart>& parts) {
    if (bytes == 0) return;
    const std::span<const Layout::Loop> loops = layout.loops();
    // The host iterates over the loops outside of the levels of a part: one part per iteration.
    const auto [outer, nest_bytes] = outer_loops(layout);
    for (std::uint64_t at = begin; at < begin + bytes;) {
        const std::uint64_t inside = at % nest_bytes, length = std::min(nest_bytes - inside, begin + bytes - at);
        std::uint64_t nest_address = address, rest = at - inside;
        for (const Layout::Loop& loop : loops.first(outer)) {
            nest_address += rest / loop.packed_stride * static_cast<std::uint64_t>(loop.memory_stride);
            rest %= loop.packed_stride;
        }
        add_parts(PartLoops{loops.subspan(outer), layout.run_bytes(), nest_address}, inside, length,
                  target + (at - begin), parts);
        at += length;
    }
}

PackPart part_of(const Layout& layout, std::uint64_t address, std::uint64_t begin, std::uint64_t bytes) {
    return part_of(PartLoops{layout.loops(), layout.run_bytes(), address}, begin, bytes, 0);
}

bool has_long_rows(const Layout& layout) {
    if (layout.run_bytes() >= copy_bytes_min) return true;
    const Layout::Loop& inner = layout.loops().back();
    const bool is_copied = inner.memory_stride >= static_cast<std::int64_t>(layout.run_bytes()) &&
        magnitude(inner.memory_stride) <= device_stride_max;
    return layout.run_bytes() >= row_bytes_min && is_copied &&
        (layout.loops().size() == 1 || inner.count * layout.run_bytes() >= copy_bytes_min);
}

PackKernel::PackKernel(std::shared_ptr<const PrimaryContext> context, std::shared_ptr<LaunchMemory> memory,
                       CudaDriver::Stream stream)
    : context_(std::move(context)), driver_(context_->driver()), memory_(std::move(memory)) {
    const ContextScope visit(driver_, context_->get());
    kernel_ = std::make_unique<TableKernel>(driver_, pack_text, stream);
}

PackKernel::~PackKernel() {
    const ContextScope visit(driver_, context_->get());
    memory_->settle();
    kernel_.reset();
}

int PackKernel::gather(CudaDriver::Stream stream, const std::byte* table, const std::byte* out,
                       std::uint32_t parts) const {
    return kernel_->launch(stream, table, out, parts, gather_shape);
}

/// A kernel that reads unmapped memory ends the GPU's context, while a copy would only be refused. The caller may have
/// freed it meanwhile.
bool PackKernel::is_there(const DeviceCopy& copy) const {
    const auto [low, high] = reach_of(*copy.layout, copy.begin, copy.begin + copy.bytes);
    const auto is_mapped = [this](std::uint64_t address) {
        int is = 0;
        return driver_.pointer_attribute(&is, cuda_pointer_mapped, address) == 0 && is != 0;
    };
    const std::uint64_t first = copy.device + static_cast<std::uint64_t>(low),
                        last = copy.device + static_cast<std::uint64_t>(high) - 1;
    for (std::uint64_t at = first; at < last; at += device_page_bytes)
        if (!is_mapped(at)) return false;
    return is_mapped(last);
}

/// The address of pinned host memory for kernels, which differs from the host's address on some systems.
std::optional<std::uint64_t> PackKernel::device_pointer(const std::byte* begin, std::uint64_t bytes) const {
    CudaDriver::Address first = 0, last = 0;
    auto* const host = const_cast<std::byte*>(begin);
    if (driver_.host_pointer(&first, host, 0) != 0 || driver_.host_pointer(&last, host + (bytes - 1), 0) != 0)
        return std::nullopt;
    if (last - first != bytes - 1) return std::nullopt;
    return first;
}

std::optional<PackKernel::Launch> PackKernel::copy(CudaDriver::Stream stream,
                                                   std::span<const DeviceCopy> copies) const {
    if (!is_loaded()) return std::nullopt;
    const std::byte* begin = copies.front().host;
    const std::byte* end = begin;
    for (const DeviceCopy& copy : copies)
        begin = std::min<const std::byte*>(begin, copy.host),
        end = std::max<const std::byte*>(end, copy.host + copy.bytes);
    begin -= reinterpret_cast<std::uintptr_t>(begin) % 16;
    const std::optional<std::uint64_t> out = device_pointer(begin, static_cast<std::uint64_t>(end - begin));
    if (!out || *out % 16 != 0) return std::nullopt;
    std::uint64_t bytes = 0;
    for (const DeviceCopy& copy : copies) {
        if (!is_there(copy)) return Launch{cuda_invalid_value, nullptr};
        bytes += copy.bytes;
    }
    const std::uint64_t parts_max = std::max(table_bytes, std::bit_floor(bytes / table_share)) / sizeof(PackPart);
    std::vector<PackPart> parts;
    std::shared_ptr<const LaunchLease> table;
    const auto launch = [&]() -> int {
        if (table == nullptr) {
            table = std::make_shared<LaunchLease>(shared_from_this(), memory_, parts.size() * sizeof(PackPart));
            if (!(*table)->is_pinned()) return 0;
        } else if (const int error = driver_.stream_synchronize(stream)) {  // the previous launch reads the same table
            return error;
        }
        // Up to three rows more than in the first launch. They fit, as buffers are powers of two (LaunchMemory::take),
        // and so is the length of parts_max rows.
        assert(parts.size() * sizeof(PackPart) <= (*table)->bytes);
        std::memcpy((*table)->memory, parts.data(), parts.size() * sizeof(PackPart));
        const int error = kernel_->launch(stream, (*table)->memory, reinterpret_cast<const std::byte*>(*out),
                                          static_cast<std::uint32_t>(parts.size()));
        const int noted = memory_->note_use(**table, stream);
        parts.clear();
        return error != 0 ? error : noted;
    };
    for (const DeviceCopy& copy : copies) {
        for (std::uint64_t at = 0; at < copy.bytes;) {
            if (parts.size() + 4 > parts_max) {
                if (const int error = launch()) return Launch{error, table};
                if (!(*table)->is_pinned()) return std::nullopt;
            }
            const std::uint64_t length =
                std::min(copy.bytes - at, bytes_of_parts(*copy.layout, parts_max - parts.size()));
            add_parts(*copy.layout, copy.device, copy.begin + at, length,
                      static_cast<std::uint64_t>(copy.host - begin) + at, parts);
            at += length;
        }
    }
    if (const int error = launch()) return Launch{error, table};
    if (!(*table)->is_pinned()) return std::nullopt;
    return Launch{0, table};
}

}  // namespace flowstone
