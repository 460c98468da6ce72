// PTX that both digest kernels include (digest_kernel.cpp, strided_digest.cpp): XXH3's keys, how the threads of a warp
// divide a part of the data, and how their sums are combined. Registers have the same names in both kernels.
#pragma once

// 24 words from the beginning of XXH3's secret; 8 from its byte 121, for the last stripe; 8 from byte 11, for the end;
// the initial sums.
#define FLOWSTONE_XXH3_KEYS \
    ".const .align 8 .u64 digest_keys[48] = {\n" \
    "    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,\n" \
    "    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,\n" \
    "    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,\n" \
    "    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,\n" \
    "    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,\n" \
    "    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,\n" \
    "    0xea647378d9c97e9f, 0xc5c3ebd33483acc5, 0x17eb6313faffa081, 0xd349daf0b751dd0d,\n" \
    "    0x2b9e68d429265516, 0x8ffca1477d58be16, 0x45ce31d07ad1b8f8, 0xaf280416958f3acb,\n" \
    "    0x6dd4de1cad21f72c, 0xa44072db979083e9, 0xe679cb1f67b3b7a4, 0xd05a8278e5c0cc4e,\n" \
    "    0x4608b82172ffcc7d, 0x9035e08e2443f774, 0x52283c4c263a81e6, 0x65d088cb00c391bb,\n" \
    "    0x00000000c2b2ae3d, 0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9,\n" \
    "    0x85ebca77c2b2ae63, 0x0000000085ebca77, 0x27d4eb2f165667c5, 0x000000009e3779b1\n" \
    "};\n"

// The first part of a warp, and the work of its threads: a thread takes the pair of lanes at 16 * pair of a stripe of
// 64 bytes, for two stripes of each block of 16.
#define FLOWSTONE_XXH3_THREAD \
    "    ld.param.u64 table, [digest_table];\n" \
    "    ld.param.u64 out, [digest_out];\n" \
    "    ld.param.u32 parts, [digest_parts];\n" \
    "    mov.u32 thread, %tid.x;\n" \
    "    mov.u32 warps, %ntid.x;\n" \
    "    shr.u32 warps, warps, 5;\n" \
    "    shr.u32 at, thread, 5;\n" \
    "    mov.u32 part, %ctaid.x;\n" \
    "    mad.lo.u32 part, part, warps, at;\n" \
    "    mov.u32 step, %nctaid.x;\n" \
    "    mul.lo.u32 step, step, warps;\n" \
    "    and.b32 lane, thread, 31;\n" \
    "    and.b32 pair, lane, 3;\n" \
    "    shr.u32 stripe, lane, 2;\n" \
    "    mad.wide.u32 along, lane, 16, 0;\n" \
    "    mov.u64 keys, digest_keys;\n" \
    "    mad.wide.u32 own, pair, 16, keys;\n" \
    "    mad.wide.u32 entry, stripe, 8, own;\n" \
    "    ld.const.u64 key_a, [entry];\n" \
    "    ld.const.u64 key_b, [entry+8];\n" \
    "    ld.const.u64 key_c, [entry+64];\n" \
    "    ld.const.u64 key_d, [entry+72];\n" \
    "    ld.const.u64 turn_a, [own+128];\n" \
    "    ld.const.u64 turn_b, [own+136];\n"

// Eight threads have the same lanes; add up their sums, so that all eight have the total. Unrolled, as the counter of a
// loop would cost time for each block.
#define FLOWSTONE_XXH3_SUM_UP \
    "sum_up:\n" \
    "    mov.b64 {low, high}, add_a;\n" \
    "    shfl.sync.bfly.b32 low, low, 16, 31, 0xffffffff;\n" \
    "    shfl.sync.bfly.b32 high, high, 16, 31, 0xffffffff;\n" \
    "    mov.b64 value, {low, high};\n" \
    "    add.u64 add_a, add_a, value;\n" \
    "    mov.b64 {low, high}, add_b;\n" \
    "    shfl.sync.bfly.b32 low, low, 16, 31, 0xffffffff;\n" \
    "    shfl.sync.bfly.b32 high, high, 16, 31, 0xffffffff;\n" \
    "    mov.b64 value, {low, high};\n" \
    "    add.u64 add_b, add_b, value;\n" \
    "    mov.b64 {low, high}, add_a;\n" \
    "    shfl.sync.bfly.b32 low, low, 8, 31, 0xffffffff;\n" \
    "    shfl.sync.bfly.b32 high, high, 8, 31, 0xffffffff;\n" \
    "    mov.b64 value, {low, high};\n" \
    "    add.u64 add_a, add_a, value;\n" \
    "    mov.b64 {low, high}, add_b;\n" \
    "    shfl.sync.bfly.b32 low, low, 8, 31, 0xffffffff;\n" \
    "    shfl.sync.bfly.b32 high, high, 8, 31, 0xffffffff;\n" \
    "    mov.b64 value, {low, high};\n" \
    "    add.u64 add_b, add_b, value;\n" \
    "    mov.b64 {low, high}, add_a;\n" \
    "    shfl.sync.bfly.b32 low, low, 4, 31, 0xffffffff;\n" \
    "    shfl.sync.bfly.b32 high, high, 4, 31, 0xffffffff;\n" \
    "    mov.b64 value, {low, high};\n" \
    "    add.u64 add_a, add_a, value;\n" \
    "    mov.b64 {low, high}, add_b;\n" \
    "    shfl.sync.bfly.b32 low, low, 4, 31, 0xffffffff;\n" \
    "    shfl.sync.bfly.b32 high, high, 4, 31, 0xffffffff;\n" \
    "    mov.b64 value, {low, high};\n" \
    "    add.u64 add_b, add_b, value;\n" \
    "    add.u64 sum_a, sum_a, add_a;\n" \
    "    add.u64 sum_b, sum_b, add_b;\n"

// Behind a block of 16 stripes.
#define FLOWSTONE_XXH3_TURN \
    "    shr.u64 value, sum_a, 47;\n" \
    "    xor.b64 sum_a, sum_a, value;\n" \
    "    xor.b64 sum_a, sum_a, turn_a;\n" \
    "    mul.lo.u64 sum_a, sum_a, 0x9e3779b1;\n" \
    "    shr.u64 value, sum_b, 47;\n" \
    "    xor.b64 sum_b, sum_b, value;\n" \
    "    xor.b64 sum_b, sum_b, turn_b;\n" \
    "    mul.lo.u64 sum_b, sum_b, 0x9e3779b1;\n"

// Merge four pairs into one number, in add_a of each thread.
#define FLOWSTONE_XXH3_MERGE \
    "merge:\n" \
    "    ld.const.u64 use_a, [own+256];\n" \
    "    ld.const.u64 use_b, [own+264];\n" \
    "    xor.b64 sum_a, sum_a, use_a;\n" \
    "    xor.b64 sum_b, sum_b, use_b;\n" \
    "    mul.lo.u64 add_a, sum_a, sum_b;\n" \
    "    mul.hi.u64 add_b, sum_a, sum_b;\n" \
    "    xor.b64 add_a, add_a, add_b;\n" \
    "    mov.b64 {low, high}, add_a;\n" \
    "    shfl.sync.bfly.b32 low, low, 1, 31, 0xffffffff;\n" \
    "    shfl.sync.bfly.b32 high, high, 1, 31, 0xffffffff;\n" \
    "    mov.b64 value, {low, high};\n" \
    "    add.u64 add_a, add_a, value;\n" \
    "    mov.b64 {low, high}, add_a;\n" \
    "    shfl.sync.bfly.b32 low, low, 2, 31, 0xffffffff;\n" \
    "    shfl.sync.bfly.b32 high, high, 2, 31, 0xffffffff;\n" \
    "    mov.b64 value, {low, high};\n" \
    "    add.u64 add_a, add_a, value;\n" \
    "    cvt.u64.u32 length, bytes;\n" \
    "    mad.lo.u64 add_a, length, 0x9e3779b185ebca87, add_a;\n" \
    "    shr.u64 value, add_a, 37;\n" \
    "    xor.b64 add_a, add_a, value;\n" \
    "    mul.lo.u64 add_a, add_a, 0x165667919e3779f9;\n" \
    "    shr.u64 value, add_a, 32;\n" \
    "    xor.b64 add_a, add_a, value;\n"
