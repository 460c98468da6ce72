#include "codec/digest.h"

namespace flowstone {
namespace {

const FlowstoneXxh3Calls& best() {
#ifdef FLOWSTONE_AVX2
    if (__builtin_cpu_supports("avx2")) return flowstone_xxh3_avx2;
#endif
    return flowstone_xxh3_plain;
}

const FlowstoneXxh3Calls& calls = best();

}  // namespace

std::uint64_t xxh3_64(const void* bytes, std::size_t length) { return calls.whole(bytes, length); }

Digester::Digester() { calls.reset(&state_); }
void Digester::update(const void* bytes, std::size_t length) { calls.update(&state_, bytes, length); }
std::uint64_t Digester::value() const { return calls.value(&state_); }

}  // namespace flowstone
