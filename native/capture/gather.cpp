// Layout::gather: copies strided memory that may be freed meanwhile, with as few system calls as its shape allows.
#include <algorithm>
#include <array>
#include <bitset>
#include <cassert>
#include <cstdlib>
#include <span>

#include "bounds.h"
#include "capture/copy_kernels.h"
#include "capture/live_memory.h"

namespace flowstone {
namespace {

// One more run costs the kernel about as much as copying this many unneeded bytes (50 ns).
constexpr std::uint64_t run_worth_bytes = 512;

struct Loop {
    std::uint64_t count;
    std::int64_t packed_stride;  // bytes
    std::int64_t memory_stride;  // bytes
};

/// Nested loops over runs, contiguous on both sides. Outermost first.
struct LoopNest {
    std::array<Loop, dimensions_max + 1> loops;
    std::size_t depth = 0;
    std::uint64_t run_bytes = 0;
    const std::byte* memory = nullptr;
    std::byte* packed = nullptr;

    LoopNest() = default;
    /// Copies only the loops in use, as the array has room for the maximum.
    LoopNest(const LoopNest& other)
        : depth(other.depth), run_bytes(other.run_bytes), memory(other.memory), packed(other.packed) {
        std::copy_n(other.loops.begin(), depth, loops.begin());
    }
    LoopNest& operator=(const LoopNest&) = delete;

    void add(const Loop& loop) { loops[depth++] = loop; }
};

/// Calls visit(packed offset, memory offset) for all iterations of `loops`.
template <class Visit> void turn(std::span<const Loop> loops, std::int64_t packed, std::int64_t memory, Visit visit) {
    if (loops.empty()) return visit(packed, memory);
    const Loop& loop = loops.front();
    for (std::uint64_t i = 0; i < loop.count; ++i, packed += loop.packed_stride, memory += loop.memory_stride)
        turn(loops.subspan(1), packed, memory, visit);
}

/// What one call copies to the bounce buffer: tiles, each a span of memory that contains runs with small gaps.
struct Tiles {
    std::bitset<dimensions_max + 1> inside;  // loops that are iterated inside of a tile
    std::uint64_t span_bytes = 0;
    std::uint64_t count = 1;
    std::int64_t below = 0;  // bytes of a tile before its first run
};

class Gather {
public:
    explicit Gather(LiveAccess& live) : live_(live) {}

    int copy(LoopNest nest);
    /// Copy runs that are worth a list entry each, and are consecutive in packed order.
    int copy_runs(const LoopNest& nest);

private:
    static Tiles tile(const LoopNest& nest, std::array<std::size_t, dimensions_max + 1>& order);
    int copy_tiles(const LoopNest& nest, const Tiles& tiles);

    LiveAccess& live_;
};

/// Loops with short strides first: they form a tile, while the gaps are shorter than a run is worth.
Tiles Gather::tile(const LoopNest& nest, std::array<std::size_t, dimensions_max + 1>& order) {
    for (std::size_t d = 0; d < nest.depth; ++d) order[d] = d;
    const auto stride = [&](std::size_t d) {
        return static_cast<std::uint64_t>(std::abs(nest.loops[d].memory_stride));
    };
    std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(nest.depth),
              [&](std::size_t a, std::size_t b) { return stride(a) < stride(b); });
    Tiles tiles;
    tiles.span_bytes = nest.run_bytes;
    bool growing = true;
    for (std::size_t at = 0; at < nest.depth; ++at) {
        const std::size_t d = order[at];
        const Loop& loop = nest.loops[d];
        growing = growing && stride(d) < tiles.span_bytes + run_worth_bytes;
        if (!growing) {
            tiles.count *= loop.count;
            continue;
        }
        tiles.inside[d] = true;
        tiles.span_bytes += (loop.count - 1) * stride(d);
        if (loop.memory_stride < 0) tiles.below += static_cast<std::int64_t>((loop.count - 1) * stride(d));
    }
    return tiles;
}

int Gather::copy(LoopNest nest) {
    for (;;) {
        std::array<std::size_t, dimensions_max + 1> order;  // as many as the nest has loops
        const Tiles tiles = tile(nest, order);
        if (tiles.count <= LiveAccess::runs_max && tiles.count * tiles.span_bytes <= LiveAccess::bounce_bytes)
            return copy_tiles(nest, tiles);
        // Too much for one call: divide the outermost loop in two.
        std::size_t at = nest.depth;
        while (at > 0 && nest.loops[order[at - 1]].count == 1) --at;
        assert(at > 0);
        Loop& loop = nest.loops[order[at - 1]];
        LoopNest first = nest;
        first.loops[order[at - 1]].count = loop.count / 2;
        if (const int error = copy(first)) return error;
        nest.memory += static_cast<std::int64_t>(loop.count / 2) * loop.memory_stride;
        nest.packed += static_cast<std::int64_t>(loop.count / 2) * loop.packed_stride;
        loop.count -= loop.count / 2;
    }
}

int Gather::copy_tiles(const LoopNest& nest, const Tiles& tiles) {
    std::array<Loop, dimensions_max + 1> outside;  // the first `outer` of them
    std::size_t outer = 0;
    LoopNest bounced = nest;  // the same runs, at their place in the bounce buffer
    std::uint64_t tile_stride = tiles.span_bytes;
    for (std::size_t d = nest.depth; d-- > 0;) {
        if (tiles.inside[d]) continue;
        bounced.loops[d].memory_stride = static_cast<std::int64_t>(tile_stride);
        outside[outer++] = {nest.loops[d].count, static_cast<std::int64_t>(tile_stride), nest.loops[d].memory_stride};
        tile_stride *= nest.loops[d].count;
    }
    std::reverse(outside.begin(),
                 outside.begin() + static_cast<std::ptrdiff_t>(outer));  // their order in the bounce buffer
    std::size_t count = 0;
    turn(std::span(outside.data(), outer), 0, 0, [&](std::int64_t, std::int64_t memory) {
        live_.runs()[count++] = {const_cast<std::byte*>(nest.memory + memory - tiles.below), tiles.span_bytes};
    });
    if (const int error = live_.read(live_.bounce(), std::span(live_.runs().data(), count))) return error;
    const std::byte* const from = live_.bounce() + tiles.below;
    const std::span<const Loop> loops(bounced.loops.data(), bounced.depth);
    const Loop inner = loops.empty() ? Loop{1, 0, 0} : loops.back();
    turn(loops.first(loops.empty() ? 0 : loops.size() - 1), 0, 0, [&](std::int64_t packed, std::int64_t memory) {
        copy_strided(nest.packed + packed, inner.packed_stride, from + memory, inner.memory_stride, inner.count,
                     nest.run_bytes);
    });
    return 0;
}

int Gather::copy_runs(const LoopNest& nest) {
    std::byte* out = nest.packed;
    std::uint64_t bytes = 0;
    std::size_t count = 0;
    int error = 0;
    const auto flush = [&] {
        if (count != 0 && error == 0) error = live_.read(out, std::span(live_.runs().data(), count));
        out += bytes;
        bytes = count = 0;
    };
    turn(std::span(nest.loops.data(), nest.depth), 0, 0, [&](std::int64_t, std::int64_t memory) {
        live_.runs()[count++] = {const_cast<std::byte*>(nest.memory + memory), nest.run_bytes};
        bytes += nest.run_bytes;
        if (count == LiveAccess::runs_max) flush();
    });
    flush();
    return error;
}

}  // namespace

/// Divides a packed range into nests: for each loop a part of its first iteration, complete iterations, a part of its
/// last.
struct Layout::Cut {
    const Layout& layout;
    Gather& gather;
    std::byte* packed;  // of the next nest

    int operator()(std::size_t level, std::uint64_t low, std::uint64_t high, const std::byte* memory) {
        if (low >= high) return 0;
        if (level == layout.loops_.size()) return take(level, 1, high - low, memory + low);
        const Layout::Loop& loop = layout.loops_[level];
        const auto at = [&](std::uint64_t turn) {
            return memory + static_cast<std::int64_t>(turn) * loop.memory_stride;
        };
        std::uint64_t first = low / loop.packed_stride;
        const std::uint64_t last = high / loop.packed_stride;
        const std::uint64_t skipped = low % loop.packed_stride;
        const std::uint64_t rest = high % loop.packed_stride;
        if (first == last) return (*this)(level + 1, skipped, rest, at(first));
        if (skipped != 0) {
            if (const int error = (*this)(level + 1, skipped, loop.packed_stride, at(first))) return error;
            ++first;
        }
        if (first < last)
            if (const int error = take(level, last - first, layout.run_bytes_, at(first))) return error;
        return (*this)(level + 1, 0, rest, at(last));
    }

    /// `turns` complete iterations of a loop, or (inside the innermost) one run.
    int take(std::size_t level, std::uint64_t turns, std::uint64_t run_bytes, const std::byte* memory) {
        LoopNest nest;
        nest.run_bytes = run_bytes;
        nest.memory = memory;
        nest.packed = packed;
        std::uint64_t bytes = run_bytes;
        for (std::size_t d = level; d < layout.loops_.size(); ++d) {
            const Layout::Loop& loop = layout.loops_[d];
            const std::uint64_t count = d == level ? turns : loop.count;
            nest.add({count, static_cast<std::int64_t>(loop.packed_stride), loop.memory_stride});
            bytes *= count;
        }
        packed += bytes;
        return run_bytes >= run_worth_bytes ? gather.copy_runs(nest) : gather.copy(nest);
    }
};

int Layout::gather(std::uint64_t begin, std::uint64_t end, const std::byte* memory, std::byte* packed,
                   LiveAccess& live) const {
    assert(begin <= end && end <= packed_bytes_ && is_whole_);
    if (run_bytes_ == 0) return 0;
    Gather gather(live);
    return Cut{*this, gather, packed}(0, begin, end, memory);
}

}  // namespace flowstone
