/* XXH3-64 (https://github.com/Cyan4973/xxHash), seed 0, for one kind of processor each. Plain C, so that no function
   that other files share is compiled for a processor that they may not run on. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define FLOWSTONE_ALIGNED(bytes) alignas(bytes)
extern "C" {
#else
#define FLOWSTONE_ALIGNED(bytes) _Alignas(bytes)
#endif

/* Of bytes that come bit by bit. */
typedef struct FlowstoneXxh3 {
    FLOWSTONE_ALIGNED(64) unsigned char state[576];
} FlowstoneXxh3;

/* What a kind of processor has. */
typedef struct FlowstoneXxh3Calls {
    uint64_t (*whole)(const void* bytes, size_t length);
    void (*reset)(FlowstoneXxh3* digest);
    void (*update)(FlowstoneXxh3* digest, const void* bytes, size_t length);
    uint64_t (*value)(const FlowstoneXxh3* digest);
} FlowstoneXxh3Calls;

extern const FlowstoneXxh3Calls flowstone_xxh3_plain; /* what the compiler takes for granted */
extern const FlowstoneXxh3Calls flowstone_xxh3_avx2;

#ifdef __cplusplus
}
#endif
