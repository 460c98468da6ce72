// The loops over bytes: digest, gather, scatter. Pure; safe from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace flowstone {

/// XXH3-64, seed 0 (https://github.com/Cyan4973/xxHash).
std::uint64_t xxh3_64(const void* bytes, std::size_t length);
/// Of two runs of bytes as if they were one.
std::uint64_t xxh3_64(const void* first, std::size_t first_length, const void* second, std::size_t second_length);

/// A box of a packed (row-major) array matched with strided memory.
///
/// Stored as nested loops over *runs*: a run is contiguous on both sides, and dimensions that are
/// contiguous on both sides have been merged into it. Bytes, not elements, are the unit, so a range
/// may begin and end anywhere.
/// Invariant: runs in loop order lie at ascending, disjoint packed offsets.
class Layout {
public:
    /// All of an array of `shape`: packed is dense. Throws std::invalid_argument.
    static Layout whole(std::uint64_t item_bytes, std::span<const std::uint64_t> shape,
                        std::span<const std::int64_t> strides_bytes);

    /// The box (`offset`, `shape`) of a packed array of `extent_shape`; memory byte 0 is the box's
    /// first element. Throws std::invalid_argument.
    static Layout box(std::uint64_t item_bytes, std::span<const std::uint64_t> extent_shape,
                      std::span<const std::uint64_t> offset, std::span<const std::uint64_t> shape,
                      std::span<const std::int64_t> strides_bytes);

    /// Length of the packed array, the bytes outside the box included.
    std::uint64_t packed_bytes() const { return packed_bytes_; }

    /// packed[0 .. end - begin) = packed bytes [begin, end); only bytes inside the box are written.
    void gather(std::uint64_t begin, std::uint64_t end, const std::byte* memory, std::byte* packed) const;

    /// The reverse: the box's bytes that lie in packed bytes [begin, end) go to memory.
    void scatter(std::uint64_t begin, std::uint64_t end, const std::byte* packed, std::byte* memory) const;

private:
    struct Loop {
        std::uint64_t count;
        std::uint64_t packed_stride;  // bytes
        std::int64_t memory_stride;   // bytes
    };
    struct Range;  // one call's view: [begin, end) and both sides' pointers

    void add_loop(Loop loop);
    void merge_run();
    std::vector<std::uint64_t> locate(std::uint64_t begin) const;
    template <bool is_gather> void move(const Range& range) const;
    template <bool is_gather>
    void move_row(const Range& range, std::uint64_t packed_at, std::int64_t memory_at, std::uint64_t first) const;

    std::uint64_t packed_bytes_ = 0;
    std::uint64_t base_ = 0;       // packed offset of the box's first byte
    std::uint64_t run_bytes_ = 0;  // 0: the box is empty
    std::vector<Loop> loops_;      // outermost first, at least one unless empty
};

}  // namespace flowstone
