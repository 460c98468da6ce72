#include "kernels.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <stdexcept>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "bounds.h"

namespace flowstone {

std::uint64_t xxh3_64(const void* bytes, std::size_t length) { return XXH3_64bits(bytes, length); }

std::uint64_t xxh3_64(const void* first, std::size_t first_length, const void* second, std::size_t second_length) {
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, first, first_length);
    XXH3_64bits_update(&state, second, second_length);
    return XXH3_64bits_digest(&state);
}

namespace {

std::uint64_t multiply(std::uint64_t a, std::uint64_t b) {
    std::uint64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || product > file_bytes_max)
        throw std::invalid_argument("layout: the array is beyond any file");
    return product;
}

/// Copy `count` runs that lie whole on both sides.
template <bool is_gather, std::size_t run_bytes>
void copy_runs(std::byte* packed, const std::byte* memory, std::uint64_t count, std::uint64_t packed_stride,
               std::int64_t memory_stride) {
    for (; count != 0; --count, packed += packed_stride, memory += memory_stride) {
        if constexpr (is_gather)
            std::memcpy(packed, memory, run_bytes);
        else
            std::memcpy(const_cast<std::byte*>(memory), packed, run_bytes);
    }
}

template <bool is_gather>
void copy_runs(std::byte* packed, const std::byte* memory, std::uint64_t count, std::uint64_t packed_stride,
               std::int64_t memory_stride, std::uint64_t run_bytes) {
    // A fixed length turns memcpy into one load and one store: 5 times faster for single elements.
    switch (run_bytes) {
        case 1: return copy_runs<is_gather, 1>(packed, memory, count, packed_stride, memory_stride);
        case 2: return copy_runs<is_gather, 2>(packed, memory, count, packed_stride, memory_stride);
        case 4: return copy_runs<is_gather, 4>(packed, memory, count, packed_stride, memory_stride);
        case 8: return copy_runs<is_gather, 8>(packed, memory, count, packed_stride, memory_stride);
        case 16: return copy_runs<is_gather, 16>(packed, memory, count, packed_stride, memory_stride);
        default: break;
    }
    for (; count != 0; --count, packed += packed_stride, memory += memory_stride) {
        if constexpr (is_gather)
            std::memcpy(packed, memory, run_bytes);
        else
            std::memcpy(const_cast<std::byte*>(memory), packed, run_bytes);
    }
}

}  // namespace

/// Pointers are to packed byte `begin` and memory byte 0. `memory` is written by scatter only and
/// `packed` by gather only; one type for both keeps the loops single.
struct Layout::Range {
    std::uint64_t begin;
    std::uint64_t end;
    std::byte* packed;
    const std::byte* memory;
};

Layout Layout::whole(std::uint64_t item_bytes, std::span<const std::uint64_t> shape,
                     std::span<const std::int64_t> strides_bytes) {
    const std::vector<std::uint64_t> origin(shape.size(), 0);
    return box(item_bytes, shape, origin, shape, strides_bytes);
}

Layout Layout::box(std::uint64_t item_bytes, std::span<const std::uint64_t> extent_shape,
                   std::span<const std::uint64_t> offset, std::span<const std::uint64_t> shape,
                   std::span<const std::int64_t> strides_bytes) {
    const std::size_t ndim = extent_shape.size();
    if (item_bytes == 0 || item_bytes > chunk_bytes) throw std::invalid_argument("layout: item_bytes must be 1 to 1 MiB");
    if (ndim > dimensions_max) throw std::invalid_argument("layout: more than 16 dimensions");
    if (offset.size() != ndim || shape.size() != ndim || strides_bytes.size() != ndim)
        throw std::invalid_argument("layout: shape, offset and strides differ in length");
    Layout layout;
    bool empty = false;
    std::vector<std::uint64_t> packed_strides(ndim);
    std::uint64_t stride = item_bytes;
    std::uint64_t volume = item_bytes;
    for (std::size_t d = ndim; d-- > 0;) {
        if (offset[d] > extent_shape[d] || shape[d] > extent_shape[d] - offset[d])
            throw std::invalid_argument("layout: the box leaves the extent");
        packed_strides[d] = stride;
        // A dimension of 0 would make outer strides 0; the box is empty then, and nothing is walked.
        stride = multiply(stride, std::max<std::uint64_t>(extent_shape[d], 1));
        volume = multiply(volume, extent_shape[d]);
        empty = empty || shape[d] == 0;
    }
    layout.packed_bytes_ = volume;
    if (empty) return layout;
    layout.run_bytes_ = item_bytes;
    for (std::size_t d = 0; d < ndim; ++d) {
        layout.base_ += offset[d] * packed_strides[d];
        layout.add_loop({shape[d], packed_strides[d], strides_bytes[d]});
    }
    layout.merge_run();
    return layout;
}

void Layout::add_loop(Loop loop) {
    if (loop.count == 1) return;
    if (!loops_.empty()) {
        Loop& outer = loops_.back();
        const bool packed_dense = outer.packed_stride == loop.count * loop.packed_stride;
        const bool memory_dense = outer.memory_stride == static_cast<std::int64_t>(loop.count) * loop.memory_stride;
        if (packed_dense && memory_dense) {
            outer = {outer.count * loop.count, loop.packed_stride, loop.memory_stride};
            return;
        }
    }
    loops_.push_back(loop);
}

void Layout::merge_run() {
    if (!loops_.empty()) {
        const Loop inner = loops_.back();
        const auto run = static_cast<std::int64_t>(run_bytes_);
        if (inner.packed_stride == run_bytes_ && inner.memory_stride == run) {
            run_bytes_ *= inner.count;
            loops_.pop_back();
        }
    }
    if (loops_.empty()) loops_.push_back({1, run_bytes_, 0});
}

/// Index of the last run that starts at or before packed byte `begin` (or of the first run).
std::vector<std::uint64_t> Layout::locate(std::uint64_t begin) const {
    std::vector<std::uint64_t> index(loops_.size(), 0);
    std::uint64_t rest = begin > base_ ? begin - base_ : 0;
    for (std::size_t d = 0; d < loops_.size(); ++d) {
        const std::uint64_t quotient = rest / loops_[d].packed_stride;
        if (quotient >= loops_[d].count) {
            // `begin` lies behind this whole part of the box: its last run is the nearest before.
            for (; d < loops_.size(); ++d) index[d] = loops_[d].count - 1;
            break;
        }
        index[d] = quotient;
        rest -= quotient * loops_[d].packed_stride;
    }
    return index;
}

template <bool is_gather>
void Layout::move_row(const Range& range, std::uint64_t packed_at, std::int64_t memory_at, std::uint64_t first) const {
    const Loop& inner = loops_.back();
    for (std::uint64_t i = first; i < inner.count;) {
        const std::uint64_t start = packed_at + i * inner.packed_stride;
        if (start >= range.end) return;
        const std::uint64_t low = std::max(start, range.begin);
        const std::uint64_t high = std::min(start + run_bytes_, range.end);
        if (high <= low) {
            ++i;
            continue;
        }
        std::byte* packed = range.packed + (low - range.begin);
        const std::byte* memory =
            range.memory + memory_at + static_cast<std::int64_t>(i) * inner.memory_stride + static_cast<std::int64_t>(low - start);
        if (high - low < run_bytes_) {
            copy_runs<is_gather>(packed, memory, 1, 0, 0, high - low);
            ++i;
            continue;
        }
        const std::uint64_t fitting = (range.end - run_bytes_ - start) / inner.packed_stride + 1;
        const std::uint64_t count = std::min(inner.count - i, fitting);
        copy_runs<is_gather>(packed, memory, count, inner.packed_stride, inner.memory_stride, run_bytes_);
        i += count;
    }
}

template <bool is_gather> void Layout::move(const Range& range) const {
    assert(range.begin <= range.end && range.end <= packed_bytes_);
    if (run_bytes_ == 0 || range.begin == range.end) return;
    std::vector<std::uint64_t> index = locate(range.begin);
    const std::size_t inner = loops_.size() - 1;
    for (;;) {
        std::uint64_t packed_at = base_;
        std::int64_t memory_at = 0;
        for (std::size_t d = 0; d < inner; ++d) {
            packed_at += index[d] * loops_[d].packed_stride;
            memory_at += static_cast<std::int64_t>(index[d]) * loops_[d].memory_stride;
        }
        if (packed_at >= range.end) return;
        move_row<is_gather>(range, packed_at, memory_at, index[inner]);
        index[inner] = 0;
        std::size_t d = inner;
        while (d > 0 && ++index[d - 1] == loops_[d - 1].count) index[--d] = 0;
        if (d == 0) return;
    }
}

void Layout::gather(std::uint64_t begin, std::uint64_t end, const std::byte* memory, std::byte* packed) const {
    move<true>({begin, end, packed, memory});
}

void Layout::scatter(std::uint64_t begin, std::uint64_t end, const std::byte* packed, std::byte* memory) const {
    move<false>({begin, end, const_cast<std::byte*>(packed), memory});
}

}  // namespace flowstone
