// Which pages of this process's memory were written, as the kernel reports it: userfaultfd's write protection, in the
// mode in which the kernel itself lifts it at the first write, and PAGEMAP_SCAN, which lists written pages. Linux 6.7
// on.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory_areas.h"

namespace flowstone {

/// The system's calls, for the process that opened them: descriptors inherited by a child refer to its parent's memory.
/// Reading protected memory costs nothing; the first write to each page costs a fault, and splits a huge page.
class WrittenPages {
public:
    /// Opens them, and tests them on memory of its own. Null if the system refuses: `refusal` has the reason.
    static std::unique_ptr<WrittenPages> open(std::string& refusal);
    /// Restores prepared memory to normal.
    ~WrittenPages();
    /// In a forked child: closes its copies, which would keep the parent's memory prepared while the child lives.
    void forget();
    WrittenPages(const WrittenPages&) = delete;
    WrittenPages& operator=(const WrittenPages&) = delete;

    /// Clear the reach's written marks, and detect writes from now on. Returns errno; then a part may be unprotected.
    /// `huge`: it is in huge pages, for which another call is faster, and flushes the TLBs only once.
    int protect(const Reach& reach, bool huge) const;
    /// The same, and adds pages that had been written since, or are gone, to `written`; no write is missed in between.
    int protect(const Reach& reach, std::vector<Reach>& written) const;
    /// Writes cost nothing again. Unmapped memory is skipped.
    void unprotect(const Reach& reach) const;
    /// The first pages that were written since they were protected, or are gone.
    std::optional<Reach> first_written(const Reach& reach) const;
    /// The begin of the first page that is not part of a huge one; the end if there is none.
    std::uint64_t first_small(const Reach& reach) const;
    /// The entries of /proc/self/pagemap of so many pages, from the one at `begin` on. False if the system refuses.
    bool read_pagemap(std::uint64_t begin, std::span<std::uint64_t> entries) const;

    /// Prepares memory for protection, while it is mapped and this is open. Returns for each reach whether all of it is
    /// prepared; not if others may write it through their own page tables (shared with other processes, or of a file).
    std::vector<bool> prepare(std::span<const Reach> reaches) const;

private:
    WrittenPages(int faults, int pagemap) : faults_(faults), pagemap_(pagemap) {}
    bool register_reach(const Reach& reach) const;
    /// Errno if the reach is not prepared, or by another userfaultfd of this process: the calls that protect do not
    /// check.
    int check_ours(const Reach& reach) const;
    int set_protection(const Reach& reach, std::uint64_t mode) const;
    bool works() const;

    int faults_;  // userfaultfd
    int pagemap_;
};

/// Of each reach, whether all of it is memory that only this process can write, and `register_reach` accepts it: it is
/// given, for each area, the memory from the first of these reaches to the last.
std::vector<bool> register_own(std::span<const Reach> reaches, const std::function<bool(const Reach&)>& register_reach);

/// The size of a small page.
std::uint64_t page_bytes();

/// Whether the kernel merges equal pages of this process (KSM), which looks like a write.
bool pages_are_merged();

}  // namespace flowstone
