// From rows to reads: which file ranges to read, and which chunks are in them. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "io_extents.h"

namespace flowstone {

/// One requested chunk: chunk number `number` of row number `row`, stored in file range [begin, begin + length); or what one
/// half of it follows from, if `half` is 1 or 2.
struct WantedChunk {
    std::uint64_t begin;
    std::uint32_t length;
    std::uint32_t row;
    std::uint32_t file;
    std::uint32_t number;
    std::uint8_t half = 0;
    std::uint64_t base_at = 0;  // where its base is in the window's memory, if it has one

    std::uint64_t end() const { return begin + length; }
    /// The position of its first byte in the row.
    std::uint64_t logical_begin() const { return number * chunk_bytes; }
};

/// One request: file range [begin, end), 4096-aligned, with the whole chunks [first, last) of the
/// plan in it. Adjacent requests may both read the 4 KiB block they share, so that no chunk straddles two.
struct ReadWindow {
    std::uint32_t file;
    std::uint64_t begin;
    std::uint64_t end;
    std::uint64_t needed_end;  // the last chunk's end: the file may end there
    std::size_t first;
    std::size_t last;
    bool direct;  // consecutive chunks of one row, read straight into its target
    std::size_t first_range = 0;  // ranges of bases, [first_range, last_range) of the plan
    std::size_t last_range = 0;
    std::uint64_t bytes = 0;  // of all that is read into its memory: [begin, end), then the ranges one behind the other

    std::uint64_t own_bytes() const { return end - begin; }
};

/// File range [begin, end), 4096-aligned, that is read with a window, because bases of its chunks are there.
struct BaseRange {
    std::uint32_t file;
    std::uint64_t begin;
    std::uint64_t end;
    std::uint64_t needed_end;
    std::uint64_t at = 0;  // in the window's memory

    std::uint64_t bytes() const { return end - begin; }
};

struct ReadPlan {
    std::vector<WantedChunk> chunks;  // sorted by (file, begin)
    std::vector<ReadWindow> windows;
    std::vector<BaseRange> ranges;
};

/// Windows are at most max(request_bytes, one chunk at any alignment) long, with the bases of their chunks; one chunk
/// with its base may be longer. in_place: long runs whose target has the
/// file's alignment are read straight into it; everything else goes through the arena.
ReadPlan plan_reads(const ReadExtents& rows, std::uint64_t request_bytes, bool in_place = true);

}  // namespace flowstone
