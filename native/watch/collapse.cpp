#include "watch/collapse.h"

#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "bounds.h"
#include "watch/page_watch.h"
#include "io/priority.h"
#include "io/proc_file.h"
#include "io/thread_name.h"

namespace flowstone {
namespace {

constexpr int advice_collapse = 25;  // MADV_COLLAPSE, which the headers of most systems lack
constexpr const char* of_all_sizes = "/sys/kernel/mm/transparent_hugepage/enabled";
constexpr const char* of_two_mib = "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled";  // since Linux 6.8

// Of an entry of /proc/self/pagemap.
constexpr std::uint64_t is_present = std::uint64_t{1} << 63;
constexpr std::uint64_t is_of_file = std::uint64_t{1} << 61;  // or shared memory
constexpr std::uint64_t is_exclusive = std::uint64_t{1} << 56;

bool is_never(const char* path) { return read_whole(path).find("[never]") != std::string::npos; }

double processor_s() {
    timespec now{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

/// Whether each small page of the 2 MiB is in memory, and private to this process.
bool is_own(const WrittenPages& pages, std::uint64_t begin) {
    std::array<std::uint64_t, huge_page_bytes / block_alignment_bytes> entries{};
    if (!pages.read_pagemap(begin, entries)) return false;
    constexpr std::uint64_t wanted = is_present | is_exclusive, looked_at = wanted | is_of_file;
    return std::all_of(entries.begin(), entries.end(),
                       [](std::uint64_t entry) { return (entry & looked_at) == wanted; });
}

/// Whether the 2 MiB are one huge page; also true if they are unmapped by now.
bool is_huge(const WrittenPages& pages, std::uint64_t begin) {
    std::uint64_t first = 0;
    return pages.first_small({begin, begin + huge_page_bytes}) == begin + huge_page_bytes &&
        pages.read_pagemap(begin, {&first, 1}) && (first & is_present) != 0;
}

}  // namespace

std::string Collapse::refusal() {
    if (is_never(of_all_sizes) || is_never(of_two_mib))
        return "huge pages are switched off here (/sys/kernel/mm/transparent_hugepage)";
    if (::prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) > 0) return "huge pages are switched off for this process (prctl)";
    return PageWatch::refusal();
}

Collapse::Collapse(std::vector<Reach> own, double share) : share_(share) {
    std::sort(own.begin(), own.end(), [](const Reach& a, const Reach& b) { return a.begin < b.begin; });
    std::uint64_t done = 0;  // so that overlapping ranges count once
    for (const Reach& reach : own)
        for (std::uint64_t at = std::max(reach.begin, done); at < reach.end; at = done) {
            const std::uint64_t block = round_down(at, huge_page_bytes);
            done = std::min(block + huge_page_bytes, reach.end);
            if (blocks_.empty() || blocks_.back().begin != block) blocks_.push_back({block, 0});
            blocks_.back().wanted_bytes += done - at;
            totals_.wanted_bytes += done - at;
        }
}

std::shared_ptr<Collapse> Collapse::start(std::vector<Reach> own, double share) {
    const std::shared_ptr<Collapse> pass(new Collapse(std::move(own), share));
    std::thread([pass] { pass->run(); }).detach();
    return {pass.get(), [pass](Collapse*) { pass->stop(); }};
}

void Collapse::stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
}

bool Collapse::wait(double timeout_s) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(std::min(timeout_s, 1e6)), [this] { return ended_; });
}

/// Sleep for `seconds`. Returns whether the pass continues.
bool Collapse::rest(double seconds) {
    std::unique_lock lock(mutex_);
    return !changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopped_; });
}

void Collapse::run() noexcept {
    name_this_thread("fs-collapse");
    assume(Priority::background);
    std::shared_ptr<const WrittenPages> pages;
    try {
        std::string refusal;
        pages = PageWatch::open(refusal);
    } catch (const std::bad_alloc&) {  // no memory, no pass
    }
    if (pages != nullptr)
        collapse_blocks(*pages);
    else
        totals_.left_bytes = totals_.wanted_bytes;
    pages.reset();
    const std::lock_guard lock(mutex_);
    totals_.processor_s = processor_s();
    ended_ = true;
    changed_.notify_all();
}

void Collapse::collapse_blocks(const WrittenPages& pages) {
    std::size_t in_vain = 0;
    for (const Block& block : blocks_) {
        if (is_huge(pages, block.begin)) {
            totals_.huge_bytes += block.wanted_bytes;
        } else if (block.wanted_bytes < wanted_min_bytes) {
            totals_.edge_bytes += block.wanted_bytes;
        } else if (in_vain >= refusals_max || !rest(0)) {
            totals_.left_bytes += block.wanted_bytes;
        } else {
            const double began = processor_s();
            in_vain = collapse_block(pages, block) ? 0 : in_vain + 1;
            rest((processor_s() - began) * (1 / share_ - 1));
        }
    }
}

/// False if the system refuses.
bool Collapse::collapse_block(const WrittenPages& pages, const Block& block) {
    if (!is_own(pages, block.begin)) {
        totals_.scattered_bytes += block.wanted_bytes;
        return true;
    }
    if (::madvise(reinterpret_cast<void*>(block.begin), huge_page_bytes, advice_collapse) == 0) {
        totals_.huge_bytes += block.wanted_bytes;
        totals_.collapsed_bytes += huge_page_bytes;
        return true;
    }
    if (totals_.error == 0) totals_.error = errno;
    totals_.refused_bytes += block.wanted_bytes;
    return false;
}

}  // namespace flowstone
