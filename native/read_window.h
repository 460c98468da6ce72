// A window of a read on its way. For read_job.cpp and read_decode.cpp.
#pragma once

#include <atomic>
#include <vector>

#include "aligned.h"
#include "read_job.h"

namespace flowstone {

/// Bytes [begin, end) of the extent of row number `row`, verified, at `bytes`; without any, if that is null.
struct VerifiedRun {
    const std::byte* bytes = nullptr;
    std::uint32_t row = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;

    bool goes_on_with(const VerifiedRun& next) const { return bytes != nullptr && row == next.row && end == next.begin && bytes + (end - begin) == next.bytes; }
};

/// Arena windows hold a block or more; those that are lent their bytes, none. Direct ones hold the bounce blocks of an unaligned head and tail.
struct ReadJob::Window final : Staged<ReadJob, Window> {
    const ReadWindow* planned = nullptr;
    bool mapped = false;
    bool aside = false;                 // see Job::set_aside
    bool verified = false;              // while the targets were not known
    const ReadExtents* rows = nullptr;  // with the targets, once it is being stored
    const std::byte* lent = nullptr;    // instead of blocks, while it is being stored
    std::vector<Block> blocks;          // one, unless a chunk and what it is decoded with do not fit into it
    AlignedBytes head;
    AlignedBytes tail;
    std::atomic<std::size_t> ops_left{0};
    std::atomic<bool> failed{false};
    std::int64_t begun_ns = 0;
    VerifiedRun run;                    // verified chunks for a device, not in a batch yet
    std::vector<std::unique_ptr<CopyBatch>> batches;  // out of the block, one for each device, until they are submitted
    std::atomic<std::size_t> storing{0};  // devices
};

}  // namespace flowstone
