// Watches memory for writes, page by page; shared by all jobs of this process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "watch/written_pages.h"

namespace flowstone {

/// From construction until release, every write by any thread into the held memory is detected. Several watches may
/// hold the same memory; none hides a write from another. A page is unprotected when the last watch has released all of
/// its 2 MiB block, so that no huge page is split.
///
/// Small pages cost more to protect than to sample (bench/watching.py), huge ones almost nothing.
class PageWatch {
public:
    /// Open the system's interfaces, which all watches of this process share. They stay open while the result is
    /// referenced, so that memory that is watched repeatedly is prepared once. Null if the system refuses: `refusal`
    /// has the reason.
    static std::shared_ptr<const WrittenPages> open(std::string& refusal);
    /// The reason why no memory can be held; empty if it can.
    static std::string refusal();
    /// Whether memory that an earlier watch could not hold is tried again at once, or only now and then.
    enum class OnRefusal : std::uint8_t { skip, retry };

    /// `wanted`: complete pages.
    PageWatch(const std::vector<Reach>& wanted, OnRefusal refused);
    ~PageWatch();
    PageWatch(const PageWatch&) = delete;
    PageWatch& operator=(const PageWatch&) = delete;

    /// Whether entry number `wanted` is held; false: other processes can write it undetected, or the system refuses.
    bool holds(std::size_t wanted) const { return held_[wanted]; }
    /// Held bytes in huge pages; may be slightly too low, as not every small page is examined.
    std::uint64_t huge_bytes() const { return huge_bytes_; }

    // For held memory; any thread:

    /// The first written pages of the reach. Pages that were mapped anew count as written, too.
    std::optional<Reach> first_written(const Reach& reach) const;
    /// Release addresses [begin, end), in complete pages or not; each address once, when later writes do not matter any
    /// more.
    void release(std::uint64_t begin, std::uint64_t end);
    /// Release everything.
    void release();

    /// The result of `open`; null if no memory is held.
    const std::shared_ptr<const WrittenPages>& pages() const { return pages_; }

private:
    struct Process;
    struct Block {
        std::uint64_t number;
        Reach reach;               // protected in this block, possibly with other pages in between
        std::atomic<std::uint64_t> left;  // bytes not released yet

        Block(std::uint64_t n, const Reach& r, std::uint64_t bytes) : number(n), reach(r), left(bytes) {}
        Block(Block&& other) noexcept : number(other.number), reach(other.reach), left(other.left.load()) {}
    };

    static Process& process();
    void choose(const std::vector<Reach>& wanted, OnRefusal refused);
    std::vector<std::size_t> protect(const std::vector<Reach>& wanted, const std::vector<std::size_t>& order);
    int protect_reach(const Reach& reach);
    void count(const std::vector<Reach>& wanted);
    void count_huge(const std::vector<Reach>& wanted, const std::vector<std::size_t>& order);
    void forget(const std::vector<Reach>& wanted, const std::vector<std::size_t>& failed);
    bool is_huge(std::uint64_t address) const;
    Reach widened(const Reach& reach) const;
    void release_first(std::size_t count);
    void release(const Block& block, Reach& free);

    Process* const process_;
    std::shared_ptr<const WrittenPages> pages_;
    std::vector<Reach> huge_;  // runs of complete huge pages, ascending
    std::vector<bool> held_;
    std::uint64_t huge_bytes_ = 0;
    std::vector<Block> blocks_;   // ascending
    std::size_t counted_ = 0;     // blocks counted by the process
    std::vector<Reach> written_;  // found by later watches; under the process's mutex
    std::atomic<bool> ended_{false};
};

}  // namespace flowstone
