// The second digest kernel: digests strided memory in place, in row-major order.
#include <climits>

#include "gpu/digest_kernel.h"
#include "gpu/digest_ptx.h"

namespace flowstone {

// Like digest_text, but a thread reads its sixteen bytes of each half of a block element by element, as wide as all
// strides allow (PackPart). The first element's place takes a division for each level; later elements are one step
// further along the innermost level, until its end. Neighbouring threads, or later warps, use the same cache lines of
// the GPU.
#define FLOWSTONE_PLACE(d) \
    "    div.u64 whole, rest, count" #d \
    ";\n" \
    "    mul.lo.u64 value, whole, count" #d \
    ";\n" \
    "    sub.u64 value, rest, value;\n" \
    "    mad.lo.u64 from, value, stride" #d \
    ", from;\n" \
    "    mov.u64 rest, whole;\n"

#define FLOWSTONE_NEXT_PLACE(outer, d) \
    "    setp.eq.u32 over, levels, " #outer \
    ";\n" \
    "    @over bra next_unit;\n" FLOWSTONE_PLACE(outer)

const KernelText strided_digest_text{R"ptx(
.version 6.0
.target sm_50
.address_size 64

)ptx" FLOWSTONE_XXH3_KEYS R"ptx(
.visible .entry flowstone_digest_strided(
    .param .u64 digest_table,
    .param .u64 digest_out,
    .param .u32 digest_parts
)
{
    .reg .pred over, odd, last, takes, lower, by1, by2, by4, by8, by16;
    .reg .u32 part, parts, step, thread, warps, lane, pair, stripe, bytes, units, stripes, blocks, half, at, low, high;
    .reg .u32 log, levels, shift, bits, width, word;
    .reg .u16 byte, short;
    .reg .u64 table, out, entry, target, first, element, along, keys, own, source, from, place;
    .reg .u64 value, length, rest, whole;
    .reg .u64 key_a, key_b, key_c, key_d, turn_a, turn_b, use_a, use_b, sum_a, sum_b, add_a, add_b, x0, x1, at0;
    .reg .u64 count0, count1, count2, count3, count4, count5, stride0, stride1, stride2, stride3, stride4, stride5;

)ptx" FLOWSTONE_XXH3_THREAD R"ptx(

next_part:
    setp.ge.u32 over, part, parts;
    @over bra end;
    mad.wide.u32 entry, part, 128, table;
    ld.global.u64 source, [entry];
    ld.global.u64 target, [entry+8];
    ld.global.u64 first, [entry+16];
    ld.global.u32 units, [entry+24];
    ld.global.u32 log, [entry+28];
    shr.u32 levels, log, 8;
    and.b32 levels, levels, 255;
    and.b32 log, log, 255;
    ld.global.v2.u64 {count0, stride0}, [entry+32];
    ld.global.v2.u64 {count1, stride1}, [entry+48];
    ld.global.v2.u64 {count2, stride2}, [entry+64];
    ld.global.v2.u64 {count3, stride3}, [entry+80];
    ld.global.v2.u64 {count4, stride4}, [entry+96];
    ld.global.v2.u64 {count5, stride5}, [entry+112];
    setp.eq.u32 by1, log, 0;
    setp.eq.u32 by2, log, 1;
    setp.eq.u32 by4, log, 2;
    setp.eq.u32 by8, log, 3;
    setp.eq.u32 by16, log, 4;
    shl.b32 bytes, units, log;
    mov.u32 width, 8;
    shl.b32 width, width, log;
    sub.u32 stripes, bytes, 1;
    shr.u32 stripes, stripes, 6;
    shr.u32 blocks, stripes, 4;
    ld.const.u64 sum_a, [own+320];
    ld.const.u64 sum_b, [own+328];
    mov.u64 add_a, 0;
    mov.u64 add_b, 0;
    setp.ne.u32 last, part, part;
    mov.u32 half, 0;

    // Eight stripes; the last ones may be missing.
next_half:
    mad.wide.u32 place, half, 512, along;
    shl.b32 at, half, 3;
    add.u32 at, at, stripe;
    setp.lt.u32 takes, at, stripes;
    and.b32 at, half, 1;
    setp.ne.u32 odd, at, 0;
    mov.u64 use_a, key_a;
    mov.u64 use_b, key_b;
    @odd mov.u64 use_a, key_c;
    @odd mov.u64 use_b, key_d;
fetch:
    @!takes bra fetched;
    shr.u64 element, place, log;
    add.u64 element, element, first;
    mov.u64 x0, 0;
    mov.u64 x1, 0;
    mov.u32 shift, 0;
locate:
    mov.u64 from, source;
    mov.u64 rest, element;
)ptx" FLOWSTONE_PLACE(0) "    mov.u64 at0, value;\n" FLOWSTONE_NEXT_PLACE(1, 0) FLOWSTONE_NEXT_PLACE(2, 1)
                                         FLOWSTONE_NEXT_PLACE(3, 2) FLOWSTONE_NEXT_PLACE(4, 3)
                                             FLOWSTONE_NEXT_PLACE(5, 4)
                                                 R"ptx(
next_unit:
    @by16 ld.global.v2.u64 {x0, x1}, [from];
    @by16 bra add_up;
    @by8 ld.global.u64 value, [from];
    @by4 ld.global.u32 word, [from];
    @by4 cvt.u64.u32 value, word;
    @by2 ld.global.u16 short, [from];
    @by2 cvt.u64.u16 value, short;
    @by1 ld.global.u8 byte, [from];
    @by1 cvt.u64.u16 value, byte;
    setp.lt.u32 lower, shift, 64;
    and.b32 bits, shift, 63;
    shl.b64 value, value, bits;
    @lower or.b64 x0, x0, value;
    @!lower or.b64 x1, x1, value;
    add.u32 shift, shift, width;
    setp.ge.u32 over, shift, 128;
    @over bra add_up;
    add.u64 element, element, 1;
    add.u64 from, from, stride0;
    add.u64 at0, at0, 1;
    setp.eq.u64 over, at0, count0;
    @over bra locate;
    bra next_unit;
add_up:
    xor.b64 value, x0, use_a;
    mov.b64 {low, high}, value;
    mad.wide.u32 add_a, low, high, add_a;
    add.u64 add_a, add_a, x1;
    xor.b64 value, x1, use_b;
    mov.b64 {low, high}, value;
    mad.wide.u32 add_b, low, high, add_b;
    add.u64 add_b, add_b, x0;
fetched:
    @last bra sum_up;
    shr.u32 at, half, 1;
    add.u32 half, half, 1;
    @!odd bra next_half;
    setp.lt.u32 over, at, blocks;
    @over bra sum_up;

    // After these, the last 64 bytes, with other keys.
    setp.eq.u32 last, part, part;
    cvt.u64.u32 length, bytes;
    add.u64 place, length, along;
    sub.u64 place, place, 64;
    setp.lt.u32 takes, lane, 4;
    ld.const.u64 use_a, [own+192];
    ld.const.u64 use_b, [own+200];
    bra fetch;

)ptx" FLOWSTONE_XXH3_SUM_UP R"ptx(
    @last bra merge;
)ptx" FLOWSTONE_XXH3_TURN R"ptx(
    mov.u64 add_a, 0;
    mov.u64 add_b, 0;
    bra next_half;

)ptx" FLOWSTONE_XXH3_MERGE R"ptx(
    setp.ne.u32 over, lane, 0;
    @over bra part_over;
    add.u64 entry, target, out;
    st.global.u64 [entry], add_a;
part_over:
    add.u32 part, part, step;
    bra next_part;

end:
    ret;
}
)ptx",
                                     "flowstone_digest_strided", 128, 4, INT32_MAX};

#undef FLOWSTONE_PLACE
#undef FLOWSTONE_NEXT_PLACE

}  // namespace flowstone
