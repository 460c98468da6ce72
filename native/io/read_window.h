// A window of a read in progress, and the data that the parts of a read share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "io/aligned.h"
#include "io/job.h"
#include "io/read_plan.h"

namespace flowstone {

/// stop_at_bad    after the first bad chunk, start no new reads, and change no more memory
/// in_place       read directly into targets with the file's alignment, instead of through the arena
/// request_bytes  the longest window; 0: the engine's
/// ahead          the rows' targets are not known yet: read until the arena is full, verify, and wait for `aim`. Needs
///                stop_at_bad
/// lent           the thread that carries out an op passes its own memory with the bytes: they are verified and stored
///                on that thread, and need no block. Ignored with `ahead`, and for rows that are encoded or on a device
struct ReadOptions {
    bool stop_at_bad = true;
    bool in_place = true;
    std::uint64_t request_bytes = 0;
    bool ahead = false;
    bool lent = false;
};

/// Verified bytes [begin, end) of the extent of row number `row`, at `bytes`; null: an empty run.
struct VerifiedRun {
    const std::byte* bytes = nullptr;
    std::uint32_t row = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;

    bool continues_with(const VerifiedRun& next) const {
        return bytes != nullptr && row == next.row && end == next.begin && bytes + (end - begin) == next.bytes;
    }
};

/// A window through the arena has one block or more; a window with lent bytes none. A direct window has bounce blocks
/// for an unaligned head and tail.
struct ReadInFlight final : WindowTask<ReadInFlight> {
    const ReadWindow* planned = nullptr;
    bool mapped = false;
    bool aside = false;                 // see JobCore::set_aside
    bool verified = false;              // verified before the targets were known
    const ReadExtents* rows = nullptr;  // with the targets, once it is being stored
    const std::byte* lent = nullptr;    // instead of blocks, while it is being stored
    std::vector<Block> blocks;          // one, unless a chunk, with its base or sources, needs more
    AlignedBytes head;
    AlignedBytes tail;
    std::atomic<std::size_t> ops_left{0};
    std::atomic<bool> failed{false};
    std::int64_t begun_ns = 0;
    VerifiedRun run;                    // verified chunks for a device, not in a batch yet
    std::vector<std::unique_ptr<CopyBatch>> batches;  // from the block, one for each device, until submitted
    std::atomic<std::size_t> storing{0};  // devices that still copy
};

using ReadWindowPtr = std::shared_ptr<ReadInFlight>;

/// The shared data of all parts of a read. The plan is complete before the first window begins.
struct ReadShared {
    ReadShared(JobCore& core, std::shared_ptr<const ReadExtents> rows, const ReadOptions& options)
        : core(core), rows(std::move(rows)), options(options), touched(this->rows->rows.size()) {}

    JobCore& core;
    const std::shared_ptr<const ReadExtents> rows;
    const ReadOptions options;
    ReadPlan plan;
    std::vector<std::atomic<bool>> touched;  // for each row
    std::atomic<std::uint64_t> requested_bytes{0};
    std::atomic<std::uint64_t> direct_bytes{0};

    /// Index of the digest of the chunk, and of its first stored chunk.
    std::uint64_t digest_of(const WantedChunk& chunk) const { return rows->rows[chunk.row].chunk + chunk.number; }
    std::uint64_t stored_of(const WantedChunk& chunk) const {
        return chunk.sources == 0 ? digest_of(chunk) : rows->stored[digest_of(chunk)].offset;
    }
    std::uint8_t codec_of(const WantedChunk& chunk) const {
        return rows->stored.empty() ? codec_raw : rows->stored[digest_of(chunk)].codec;
    }

    /// The window's memory, in its blocks or lent.
    std::byte* block_memory(const ReadInFlight& window, std::uint64_t offset) const {
        const std::uint64_t block_bytes = core.arena().block_bytes();
        return window.blocks[offset / block_bytes].bytes() + offset % block_bytes;
    }
    const std::byte* memory(const ReadInFlight& window, std::uint64_t offset) const {
        return window.lent != nullptr ? window.lent + offset : block_memory(window, offset);
    }
    /// Where the stored bytes of a chunk are, once the window was read.
    const std::byte* bytes_of(const ReadInFlight& window, const WantedChunk& chunk) const;
    /// Where the bytes stored at `place` are: at `offset` of the window's memory. Only for chunks that are not read in
    /// place.
    const std::byte* bytes_of(const ReadInFlight& window, const ChunkPlace& place, std::uint64_t offset) const {
        return window.mapped ? reinterpret_cast<const std::byte*>(core.file(place.file).mapped + place.offset)
                             : memory(window, offset);
    }
};

}  // namespace flowstone
