// Finds the pages of this process's memory that were written, as the kernel reports them: by userfaultfd's write
// protection, in the mode in which the kernel itself removes it at the first write, and PAGEMAP_SCAN, which lists
// written pages. Needs Linux 6.7.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "watch/memory_areas.h"

namespace flowstone {

/// The kernel's interfaces, for the process that opened them: descriptors inherited by a child refer to its parent's
/// memory. Reading protected memory costs nothing; the first write to each page costs a fault, and splits a huge page.
class WrittenPages {
public:
    /// Opens the interfaces, and tests them on its own memory. Null if the system refuses: `refusal` has the reason.
    static std::unique_ptr<WrittenPages> open(std::string& refusal);
    /// Restores prepared memory to normal.
    ~WrittenPages();
    /// In a forked child: closes its copies, which would keep the parent's memory prepared while the child lives.
    void forget();
    WrittenPages(const WrittenPages&) = delete;
    WrittenPages& operator=(const WrittenPages&) = delete;

    /// Clear the reach's written marks, and detect writes from now on. Returns errno; then a part may be unprotected.
    /// `huge`: whether it is in huge pages, for which another call is faster, and flushes the TLBs only once.
    int protect(const Reach& reach, bool huge) const;
    /// Like `protect`, but also adds pages that were written since the last call, or unmapped, to `written`, without
    /// missing a write in between.
    int protect(const Reach& reach, std::vector<Reach>& written) const;
    /// Remove the protection. Unmapped memory is skipped.
    void unprotect(const Reach& reach) const;
    /// The first pages that were written since they were protected, or unmapped.
    std::optional<Reach> first_written(const Reach& reach) const;
    /// The address of the first page that is not part of a huge page; the end if there is none.
    std::uint64_t first_small(const Reach& reach) const;
    /// Read the entries of /proc/self/pagemap for pages from `begin` on. Returns false if the system refuses.
    bool read_pagemap(std::uint64_t begin, std::span<std::uint64_t> entries) const;

    /// Prepare memory for protection, as long as it is mapped and this object lives. Returns for each reach whether all
    /// of it is prepared; memory shared with other processes or a file is not, as these may write it undetected.
    std::vector<bool> prepare(std::span<const Reach> reaches) const;

private:
    WrittenPages(int faults, int pagemap) : faults_(faults), pagemap_(pagemap) {}
    bool register_reach(const Reach& reach) const;
    /// Returns an errno if the reach is not prepared, or was prepared by another userfaultfd of this process. The calls
    /// that protect do not check that.
    int check_ours(const Reach& reach) const;
    int set_protection(const Reach& reach, std::uint64_t mode) const;
    bool works() const;

    int faults_;  // userfaultfd
    int pagemap_;
};

/// For each reach, whether only this process can write it, and `register_reach` accepts it. `register_reach` is called
/// for each area, with the memory from its first reach to its last.
std::vector<bool> register_own(std::span<const Reach> reaches, const std::function<bool(const Reach&)>& register_reach);

/// The size of a small page.
std::uint64_t page_bytes();

/// Whether the kernel merges equal pages of this process (KSM), which looks like a write.
bool pages_are_merged();

}  // namespace flowstone
