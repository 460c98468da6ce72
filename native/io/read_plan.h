// The plan of a read: which file ranges to read, and which chunks are in them. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "io/io_extents.h"

namespace flowstone {

/// Where a stored chunk's bytes, and those of its base if it has one, are in a window's memory.
struct ChunkMemory {
    std::uint64_t at = 0;
    std::uint64_t base_at = 0;
};

/// One requested chunk: chunk number `number` of row number `row`, stored in file range [begin, begin + length). A cast
/// chunk (`sources` is 1 or 2) has the range of its first source chunk; the second one is read with it.
struct WantedChunk {
    std::uint64_t begin;
    std::uint32_t length;
    std::uint32_t row;
    std::uint32_t file;
    std::uint32_t number;
    std::uint8_t sources = 0;
    std::array<ChunkMemory, 2> memory = {};  // of the stored chunk, or of the sources

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
    bool direct;  // consecutive chunks of one row, read directly into its target
    std::size_t first_range = 0;  // other ranges, [first_range, last_range) of the plan
    std::size_t last_range = 0;
    std::uint64_t bytes = 0;   // length of all reads
    std::uint64_t memory = 0;  // length of its memory: [begin, end), then the ranges, none across a border of blocks

    std::uint64_t own_bytes() const { return end - begin; }
};

/// File range [begin, end), 4096-aligned, that is read with a window: it has the bases, or the sources, of some of its
/// chunks.
struct OtherRange {
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
    std::vector<OtherRange> ranges;
};

/// Windows are at most max(request_bytes, one chunk at any alignment) long, including bases and sources of their
/// chunks. Only a window of one chunk may be longer; its memory is then several blocks of `block_bytes`. in_place: long
/// runs whose target has the file's alignment are read directly into it; all other bytes pass through the arena.
ReadPlan plan_reads(const ReadExtents& rows, std::uint64_t request_bytes, std::uint64_t block_bytes,
                    bool in_place = true);

}  // namespace flowstone
