// Collapsing memory of this process into huge pages (MADV_COLLAPSE, Linux 6.1), in the background: what is in huge pages
// costs next to nothing to watch (page_watch.h). The content of memory never changes by it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "written_pages.h"

namespace flowstone {

/// Of bytes that were to be in huge pages.
struct CollapseTotals {
    std::uint64_t wanted_bytes = 0;
    std::uint64_t huge_bytes = 0;       // are, in the end; each byte below for one reason is not
    std::uint64_t edge_bytes = 0;       // share 2 MiB with too much of other memory
    std::uint64_t scattered_bytes = 0;  // with pages that are not in memory, or that other processes have, too (or of a file)
    std::uint64_t refused_bytes = 0;    // the system refuses, or something writes there
    std::uint64_t left_bytes = 0;       // the pass was stopped before
    std::uint64_t collapsed_bytes = 0;  // length of the huge pages that were made
    int error = 0;                      // of the first refusal
    double processor_s = 0;             // that this took
};

/// One pass, until it is through or its owner drops it. A thread of low priority takes the huge pages one by one, and rests after each, so that it uses no more
/// than a part of one processor. No memory is added: only huge pages are made of which every small page is there, and is
/// this process's alone. The memory may be written, watched and freed meanwhile.
class Collapse {
public:
    /// The reason why nothing is collapsed here; empty if it is.
    static std::string refusal();

    /// own: any bytes, in any order; they may overlap. share: of one processor, above 0, at most 1. Throws
    /// std::system_error if no thread can be started. Dropping the result stops the pass, and waits for nothing: the
    /// thread keeps what it uses, as the system may hold it for long in one call.
    static std::shared_ptr<Collapse> start(std::vector<Reach> own, double share);
    Collapse(const Collapse&) = delete;
    Collapse& operator=(const Collapse&) = delete;

    /// Go no further. Returns at once.
    void stop();
    /// Whether it has ended, after at most so long.
    bool wait(double timeout_s);
    /// Once it has ended.
    const CollapseTotals& totals() const { return totals_; }

    // A huge page is made if at least this part of it is wanted: what else is in it may be freed, and would stay in memory.
    static constexpr std::uint64_t wanted_min_bytes = std::uint64_t{3} << 19;  // of 2 MiB
    // So many refusals in a row end the pass: memory is short, or in pieces.
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
