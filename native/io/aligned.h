// A small buffer at a 4 KiB boundary, for the heads, tails and gaps of direct requests.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include "bounds.h"

namespace flowstone {

struct FreeDelete {
    void operator()(void* memory) const { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<std::byte[], FreeDelete>;

/// `bytes` rounded up to whole 4 KiB blocks, contents undefined; throws std::bad_alloc.
inline AlignedBytes allocate_aligned(std::uint64_t bytes) {
    void* memory = std::aligned_alloc(block_alignment_bytes, block_ceil(bytes));
    if (memory == nullptr && bytes != 0) throw std::bad_alloc();
    return AlignedBytes(static_cast<std::byte*>(memory));
}

}  // namespace flowstone
