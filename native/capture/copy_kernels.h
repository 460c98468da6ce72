// The loops over bytes: gather, scatter. Safe from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "codec/digest.h"

namespace flowstone {

/// Copy `count` runs from `source` to `target`; each run is one stride after the previous one.
void copy_strided(std::byte* target, std::int64_t target_stride, const std::byte* source, std::int64_t source_stride,
                  std::uint64_t count, std::uint64_t run_bytes);

class LiveAccess;

/// `count` runs of `bytes` each. The first is at byte `packed` of a packed range, and at `memory`; each run is one
/// stride after the previous one, on both sides.
struct StridedRuns {
    std::uint64_t packed;
    std::int64_t memory;
    std::uint64_t count;
    std::uint64_t packed_stride;
    std::int64_t memory_stride;
    std::uint64_t bytes;
};

/// A box of a packed (row-major) array matched with strided memory.
///
/// Stored as nested loops over *runs*: a run is contiguous on both sides, and dimensions that are
/// contiguous on both sides have been merged into it. Bytes, not elements, are the unit, so a range
/// may begin and end anywhere.
/// Invariant: runs in loop order lie at ascending, disjoint packed offsets.
class Layout {
public:
    /// The layout of a whole array of `shape`: packed is dense. Throws std::invalid_argument.
    static Layout whole(std::uint64_t item_bytes, std::span<const std::uint64_t> shape,
                        std::span<const std::int64_t> strides_bytes);

    /// The box (`offset`, `shape`) of a packed array of `extent_shape`; memory byte 0 is the box's
    /// first element. Throws std::invalid_argument.
    static Layout box(std::uint64_t item_bytes, std::span<const std::uint64_t> extent_shape,
                      std::span<const std::uint64_t> offset, std::span<const std::uint64_t> shape,
                      std::span<const std::int64_t> strides_bytes);

    /// Length of the packed array, including the bytes outside the box.
    std::uint64_t packed_bytes() const { return packed_bytes_; }

    /// Copy packed bytes [begin, end) from live memory to packed[0 .. end - begin); only for `whole` layouts. Returns
    /// 0, or the error of LiveAccess::read; `packed` is then undefined. (gather.cpp)
    int gather(std::uint64_t begin, std::uint64_t end, const std::byte* memory, std::byte* packed,
               LiveAccess& live) const;

    /// The reverse: copy the box's bytes in packed bytes [begin, end) to memory.
    void scatter(std::uint64_t begin, std::uint64_t end, const std::byte* packed, std::byte* memory) const;

    /// The runs that `scatter` would copy, in order, for a device to copy. `packed` offsets count from `begin`.
    std::vector<StridedRuns> runs(std::uint64_t begin, std::uint64_t end) const;
    /// Call the function for each of these runs.
    void for_runs(std::uint64_t begin, std::uint64_t end, const std::function<void(const StridedRuns&)>& visit) const;

    struct Loop {
        std::uint64_t count;
        std::uint64_t packed_stride;  // bytes
        std::int64_t memory_stride;   // bytes
    };
    /// Outermost first, at least one; none for an empty box.
    std::span<const Loop> loops() const { return loops_; }
    /// Length of a run, which is contiguous on both sides.
    std::uint64_t run_bytes() const { return run_bytes_; }
    /// Whether it is the layout of a whole array.
    bool is_whole() const { return is_whole_; }
    /// Whether one row of a kernel's table (PackPart) can describe it, as for nearly all arrays.
    bool is_shallow() const { return loops_.size() <= part_loops_max; }
    static constexpr std::size_t part_loops_max = 5;

private:
    struct Range;  // one call's view: [begin, end) and both sides' pointers
    struct Cut;    // a packed range divided into nests, for gather

    void add_loop(Loop loop);
    void merge_run();
    std::vector<std::uint64_t> locate(std::uint64_t begin) const;
    std::uint64_t scatter_turned(const Range& range, std::uint64_t packed_at, std::int64_t memory_at,
                                 std::uint64_t rows) const;
    template <class Visit> void walk(std::uint64_t begin, std::uint64_t end, Visit visit) const;
    template <class Visit> void cut_row(std::uint64_t begin, std::uint64_t end, std::uint64_t packed_at,
                                        std::int64_t memory_at, std::uint64_t first, Visit visit) const;

    std::uint64_t packed_bytes_ = 0;
    std::uint64_t base_ = 0;       // packed offset of the box's first byte
    std::uint64_t run_bytes_ = 0;  // 0: the box is empty
    bool is_whole_ = false;
    bool is_turned_ = false;       // the last two loops are a transposed matrix: its columns are dense in memory
    std::vector<Loop> loops_;      // outermost first; at least one, unless the box is empty
};

}  // namespace flowstone
