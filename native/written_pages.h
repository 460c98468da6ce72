// Which pages of this process's memory somebody has written, by the kernel's word: userfaultfd's write protection, in the
// mode in which the kernel itself takes it away at the first write, and PAGEMAP_SCAN, which tells where. Linux 6.7 on.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace flowstone {

/// Addresses [begin, end), whole pages.
struct Reach {
    std::uint64_t begin;
    std::uint64_t end;

    std::uint64_t bytes() const { return end - begin; }
    bool overlaps(const Reach& other) const { return begin < other.end && other.begin < end; }
};

/// The system's calls, for the process that opened them: descriptors that a child inherits speak of its parent's memory.
/// Reads of protected memory cost nothing; the first write to each page of it costs a fault, and splits a huge page.
class WrittenPages {
public:
    /// Opens them, and tries them on memory of its own. Null where the system refuses: `refusal` says why.
    static std::unique_ptr<WrittenPages> open(std::string& refusal);
    /// Memory that was prepared is as it was before.
    ~WrittenPages();
    /// In a forked child: closes its copies, which would keep the parent's memory prepared for as long as it lives.
    void forget();
    WrittenPages(const WrittenPages&) = delete;
    WrittenPages& operator=(const WrittenPages&) = delete;

    /// Forget what was written in the reach, and notice from now on. Returns errno: not all of it is prepared, perhaps.
    /// `huge`: it lies in huge pages, for which another call is faster, and flushes the processors' caches once for all.
    int protect(const Reach& reach, bool huge) const;
    /// The same, and adds what had been written since, or is not there any more, to `written`: nothing falls in between.
    int protect(const Reach& reach, std::vector<Reach>& written) const;
    /// Writes cost nothing again. Memory that has gone is passed over.
    void unprotect(const Reach& reach) const;
    /// The first pages that somebody has written since they were protected, or that are not there any more.
    std::optional<Reach> first_written(const Reach& reach) const;
    /// Where the first page begins that is not part of a huge one; the end where there is none.
    std::uint64_t first_small(const Reach& reach) const;

    /// Makes memory ready to be protected, for as long as it is mapped and this is open: for each reach, whether all of it is. It is not where
    /// others may write it by page tables of their own (shared with other processes, of a file).
    std::vector<bool> prepare(std::span<const Reach> reaches) const;

private:
    WrittenPages(int faults, int pagemap) : faults_(faults), pagemap_(pagemap) {}
    bool register_reach(const Reach& reach) const;
    /// Errno where the reach is not prepared, or by another userfaultfd of this process: no call that protects asks whose.
    int check_ours(const Reach& reach) const;
    int set_protection(const Reach& reach, std::uint64_t mode) const;
    bool works() const;

    int faults_;  // userfaultfd
    int pagemap_;
};

/// The size of a page that is not huge.
std::uint64_t page_bytes();

/// Whether the kernel is merging equal pages of this process (KSM), which looks like a write.
bool pages_are_merged();

}  // namespace flowstone
