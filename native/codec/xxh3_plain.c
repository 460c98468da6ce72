#include "codec/xxh3.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

_Static_assert(sizeof(FlowstoneXxh3) >= sizeof(XXH3_state_t), "a digest under way is as large as xxHash's");
_Static_assert(_Alignof(FlowstoneXxh3) >= _Alignof(XXH3_state_t), "and as aligned");

static uint64_t whole(const void* bytes, size_t length) { return XXH3_64bits(bytes, length); }
static void reset(FlowstoneXxh3* digest) { XXH3_64bits_reset((XXH3_state_t*)digest); }
static void update(FlowstoneXxh3* digest, const void* bytes, size_t length) {
    XXH3_64bits_update((XXH3_state_t*)digest, bytes, length);
}
static uint64_t value(const FlowstoneXxh3* digest) { return XXH3_64bits_digest((const XXH3_state_t*)digest); }

#ifndef FLOWSTONE_XXH3
#define FLOWSTONE_XXH3 flowstone_xxh3_plain
#endif
const FlowstoneXxh3Calls FLOWSTONE_XXH3 = {whole, reset, update, value};
