// Memory that is watched for writes, page by page, by all jobs of this process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "written_pages.h"

namespace flowstone {

/// From its construction on every write into the memory that it holds is noticed, whoever makes it, until that memory is
/// let go of. Several may hold the same memory: none hides a write from another, and a page is unprotected when the last
/// one has let go of all of its block (2 MiB, so that no huge page is split).
///
/// Pages in small pages cost more to protect than to sample (bench/watching.py), those in huge ones next to nothing; so
/// one may say how many bytes of the former to hold.
class PageWatch {
public:
    /// The system's calls, for all watches of this process: open as long as somebody has what this returns, so that what is
    /// watched again and again is made ready for it once. Null where the system refuses: `refusal` says why.
    static std::shared_ptr<const WrittenPages> open(std::string& refusal);
    /// Why nothing can be held; empty where it can.
    static std::string refusal();
    static constexpr std::uint64_t unlimited_bytes = ~std::uint64_t{0};

    /// `wanted` are whole pages. small_bytes_max: so much of them that is not in huge pages is held, beside the ends of
    /// what is; `turn` says where to begin.
    PageWatch(const std::vector<Reach>& wanted, std::uint64_t small_bytes_max, std::uint64_t turn);
    ~PageWatch();
    PageWatch(const PageWatch&) = delete;
    PageWatch& operator=(const PageWatch&) = delete;

    enum class Held : std::uint8_t { yes, beyond_limit, not_own };
    /// By the order of `wanted`; not_own: others can write it unseen, or the system refuses.
    Held held(std::size_t wanted) const { return held_[wanted]; }

    // Of what is held; any thread:

    /// The first pages of the reach that were written. What lies there may be another mapping by now: that is written, too.
    std::optional<Reach> first_written(const Reach& reach) const;
    /// Addresses [begin, end), whole pages or not: each of them once, when writes to it are none of ours any more.
    void let_go(std::uint64_t begin, std::uint64_t end);
    /// All of it.
    void let_go();

    /// What `open` gave; null where nothing is held.
    const std::shared_ptr<const WrittenPages>& pages() const { return pages_; }

private:
    struct Process;
    struct Block {
        std::uint64_t number;
        Reach reach;               // that is protected in it, and perhaps other pages between those
        std::atomic<std::uint64_t> left;  // bytes that are not let go of

        Block(std::uint64_t n, const Reach& r, std::uint64_t bytes) : number(n), reach(r), left(bytes) {}
        Block(Block&& other) noexcept : number(other.number), reach(other.reach), left(other.left.load()) {}
    };

    static Process& process();
    void choose(const std::vector<Reach>& wanted, const std::vector<std::size_t>& order, std::uint64_t small_bytes_max,
                std::uint64_t turn);
    std::vector<std::size_t> protect(const std::vector<Reach>& wanted, const std::vector<std::size_t>& order);
    int protect_reach(const Reach& reach);
    void count(const std::vector<Reach>& wanted);
    void forget(const std::vector<Reach>& wanted, const std::vector<std::size_t>& failed);
    bool is_huge(std::uint64_t address) const;
    Reach widened(const Reach& reach) const;
    void let_go_of(std::size_t count);
    void release(const Block& block, Reach& free);

    Process* const process_;
    std::shared_ptr<const WrittenPages> pages_;
    std::vector<Reach> huge_;  // runs of whole huge pages, ascending
    std::vector<Held> held_;
    std::vector<Block> blocks_;   // ascending
    std::size_t counted_ = 0;     // of them, by the process
    std::vector<Reach> written_;  // found by others that came later; under the process's mutex
    std::atomic<bool> ended_{false};
};

}  // namespace flowstone
