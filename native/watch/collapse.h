// Collapses memory of this process into huge pages (MADV_COLLAPSE, Linux 6.1) in the background, because huge pages
// cost next to nothing to watch (page_watch.h). Collapsing never changes the content of memory.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "watch/written_pages.h"

namespace flowstone {

/// The result of a pass: how many of the wanted bytes are in huge pages, and why others are not.
struct CollapseTotals {
    std::uint64_t wanted_bytes = 0;
    std::uint64_t huge_bytes = 0;       // in huge pages at the end. Other bytes are not, for one of four reasons:
    std::uint64_t edge_bytes = 0;       // they share 2 MiB with too much other memory
    std::uint64_t scattered_bytes =
        0;  // with pages that are not in memory, or that other processes have, too (or of a file)
    std::uint64_t refused_bytes = 0;    // the system refuses, or another thread writes there
    std::uint64_t left_bytes = 0;       // the pass was stopped before it reached them
    std::uint64_t collapsed_bytes = 0;  // length of the huge pages made by this pass
    int error = 0;                      // of the first refusal
    double processor_s = 0;             // processor time of the pass
};

/// One pass, until it is done or its owner drops it. A thread of low priority makes one huge page after the other, and
/// sleeps after each, so that it uses only a part of one processor. This takes no memory: a huge page is made only if
/// all its small pages are in memory, and private to this process. The memory may be written, watched and freed
/// meanwhile.
class Collapse {
public:
    /// The reason why no memory can be collapsed here; empty if it can.
    static std::string refusal();

    /// own: any ranges, in any order; they may overlap. share: part of one processor, above 0, at most 1. Throws
    /// std::system_error if no thread can be started. Dropping the result stops the pass without a wait, as a system
    /// call of the thread may take long; the thread keeps its data alive.
    static std::shared_ptr<Collapse> start(std::vector<Reach> own, double share);
    Collapse(const Collapse&) = delete;
    Collapse& operator=(const Collapse&) = delete;

    /// Stop the pass. Returns at once.
    void stop();
    /// Wait for the end, at most `timeout_s`. Returns whether the pass has ended.
    bool wait(double timeout_s);
    /// Once it has ended.
    const CollapseTotals& totals() const { return totals_; }

    // A huge page is made only if at least this part of it is wanted, as other memory in it would stay allocated after
    // it was freed.
    static constexpr std::uint64_t wanted_min_bytes = std::uint64_t{3} << 19;  // of 2 MiB
    // This many refusals in a row end the pass: memory is short or fragmented.
    static constexpr std::size_t refusals_max = 16;

private:
    struct Block {
        std::uint64_t begin;
        std::uint64_t wanted_bytes;
    };

    Collapse(std::vector<Reach> own, double share);
    void run() noexcept;
    void collapse_blocks(const WrittenPages& pages);
    bool collapse_block(const WrittenPages& pages, const Block& block);
    bool rest(double seconds);

    const double share_;
    std::vector<Block> blocks_;
    CollapseTotals totals_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool stopped_ = false;
    bool ended_ = false;
};

}  // namespace flowstone
