#include "watch/page_watch.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "bounds.h"

namespace flowstone {
namespace {

// After this many checks without a huge page, skip one block; after twice as many, two, and so on.
constexpr std::uint64_t looks_in_vain = 16;
// The number of watches between two attempts to protect refused memory.
constexpr std::uint64_t tried_anew = 64;

std::uint64_t block_of(std::uint64_t address) { return address / huge_page_bytes; }

Reach hull(const Reach& a, const Reach& b) { return {std::min(a.begin, b.begin), std::max(a.end, b.end)}; }
Reach whole_blocks(const Reach& reach) {
    return {round_down(reach.begin, huge_page_bytes), round_up(reach.end, huge_page_bytes)};
}

/// each(number of a block, the part of the reach in it)
template <class Each> void for_blocks(const Reach& reach, Each each) {
    for (std::uint64_t begin = reach.begin; begin < reach.end;) {
        const std::uint64_t number = block_of(begin), end = std::min((number + 1) * huge_page_bytes, reach.end);
        each(number, Reach{begin, end});
        begin = end;
    }
}

/// Merge reaches that overlap or touch; ascending.
std::vector<Reach> merged(std::vector<Reach> reaches) {
    std::sort(reaches.begin(), reaches.end(), [](const Reach& a, const Reach& b) { return a.begin < b.begin; });
    std::vector<Reach> whole;
    for (const Reach& reach : reaches) {
        if (!whole.empty() && reach.begin <= whole.back().end)
            whole.back().end = std::max(whole.back().end, reach.end);
        else
            whole.push_back(reach);
    }
    return whole;
}

/// The huge pages in the blocks of `wanted`. Skipped blocks count as small pages.
std::vector<Reach> find_huge(const WrittenPages& pages, std::vector<Reach> wanted) {
    for (Reach& reach : wanted) reach = whole_blocks(reach);
    std::vector<Reach> huge;
    std::uint64_t in_vain = 0, passed = 0;
    for (const Reach& span : merged(std::move(wanted)))
        for (std::uint64_t at = std::max(span.begin, passed); at < span.end;) {
            const std::uint64_t end = round_down(pages.first_small({at, span.end}), huge_page_bytes);
            if (end > at) huge.push_back({at, end});
            in_vain = end > at ? 0 : in_vain + 1;
            at = passed = end + (1 + in_vain / looks_in_vain) * huge_page_bytes;
        }
    return merged(std::move(huge));
}

}  // namespace

/// State shared by all watches of one process. A forked child does not use its parent's state.
struct PageWatch::Process {
    struct Holders {
        std::uint32_t count = 0;
        Reach reach{~std::uint64_t{0}, 0};  // all memory held by watches since the block was last free
    };

    const pid_t id = ::getpid();
    std::mutex mutex;
    std::unique_ptr<WrittenPages> pages;  // while there are users
    std::size_t users = 0;
    std::unordered_map<std::uint64_t, Holders> blocks;  // by number
    std::vector<PageWatch*> watches;
    // Begin -> end of memory that could not be protected, as an attempt takes milliseconds. It is retried now and then.
    std::unordered_map<std::uint64_t, std::uint64_t> not_own;
    std::uint64_t begun = 0;  // watches

    void leave();
};

namespace {

std::atomic<WrittenPages*> closed_in_children{nullptr};

/// A child must close the descriptors, whichever code forks it, and whatever locks are held.
void close_in_child() {
    if (WrittenPages* const pages = closed_in_children.exchange(nullptr)) pages->forget();
}

}  // namespace

void PageWatch::Process::leave() {
    if (id != ::getpid()) return;
    const std::lock_guard lock(mutex);
    if (--users != 0) return;
    closed_in_children = nullptr;
    pages.reset();
}

PageWatch::Process& PageWatch::process() {
    static std::atomic<Process*> current{nullptr};
    Process* known = current.load();
    while (known == nullptr || known->id != ::getpid()) {
        // A parent's state is leaked, as one of its threads may hold the mutex for ever. This process's state is not
        // freed at exit either.
        auto* const made = new Process;
        if (current.compare_exchange_strong(known, made)) return *made;
        delete made;
    }
    return *known;
}

std::shared_ptr<const WrittenPages> PageWatch::open(std::string& refusal) {
    [[maybe_unused]] static const int heard = ::pthread_atfork(nullptr, nullptr, close_in_child);
    Process& process = PageWatch::process();
    {
        const std::lock_guard lock(process.mutex);
        if (process.pages == nullptr) {
            process.pages = WrittenPages::open(refusal);
            if (process.pages == nullptr) return nullptr;
            process.not_own.clear();
            closed_in_children = process.pages.get();
        }
        ++process.users;
    }
    return {process.pages.get(), [&process](const WrittenPages*) { process.leave(); }};
}

std::string PageWatch::refusal() {
    std::string refusal;
    open(refusal);
    return refusal;
}

PageWatch::PageWatch(const std::vector<Reach>& wanted, OnRefusal refused)
    : process_(&process()), held_(wanted.size(), false) {
    std::string refusal;
    if (!wanted.empty() && !pages_are_merged()) pages_ = open(refusal);
    if (pages_ == nullptr) {
        ended_ = true;
        return;
    }
    std::vector<std::size_t> order(wanted.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return wanted[a].begin < wanted[b].begin; });
    huge_ = find_huge(*pages_, wanted);
    const std::lock_guard lock(process_->mutex);
    if (++process_->begun % tried_anew == 0) process_->not_own.clear();
    choose(wanted, refused);
    try {
        const std::vector<std::size_t> failed = protect(wanted, order);
        count(wanted);
        forget(wanted, failed);
        count_huge(wanted, order);
        process_->watches.push_back(this);
    } catch (...) {  // no memory: undo the counts
        release_first(counted_);
        throw;
    }
}

/// Under the mutex: choose all memory except what is known to be refused.
void PageWatch::choose(const std::vector<Reach>& wanted, OnRefusal refused) {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        const auto known = process_->not_own.find(wanted[i].begin);
        const bool was_refused = known != process_->not_own.end() && known->second == wanted[i].end;
        held_[i] = refused == OnRefusal::retry || !was_refused;
    }
}

void PageWatch::count_huge(const std::vector<Reach>& wanted, const std::vector<std::size_t>& order) {
    auto run = huge_.begin();
    for (const std::size_t i : order) {
        while (run != huge_.end() && run->end <= wanted[i].begin) ++run;
        for (auto at = run; held_[i] && at != huge_.end() && at->begin < wanted[i].end; ++at)
            huge_bytes_ += std::min(at->end, wanted[i].end) - std::max(at->begin, wanted[i].begin);
    }
}

bool PageWatch::is_huge(std::uint64_t address) const {
    const auto found =
        std::partition_point(huge_.begin(), huge_.end(), [&](const Reach& run) { return run.end <= address; });
    return found != huge_.end() && found->begin <= address;
}

/// A huge page is protected as a whole: protecting a part would split it.
Reach PageWatch::widened(const Reach& reach) const {
    const Reach blocks = whole_blocks(reach);
    return {is_huge(reach.begin) ? blocks.begin : reach.begin, is_huge(reach.end - 1) ? blocks.end : reach.end};
}

/// Under the mutex. Returns the entries that cannot be protected, even after preparing them; these are not held.
std::vector<std::size_t> PageWatch::protect(const std::vector<Reach>& wanted, const std::vector<std::size_t>& order) {
    std::vector<Reach> chosen;
    for (const std::size_t i : order)
        if (held_[i]) chosen.push_back(widened(wanted[i]));
    std::vector<Reach> failed;
    for (const Reach& reach : merged(std::move(chosen)))
        if (protect_reach(reach) != 0) failed.push_back(reach);
    if (failed.empty()) return {};
    std::vector<std::size_t> again, not_own;
    std::vector<Reach> reaches;
    for (const std::size_t i : order) {
        if (!held_[i]) continue;
        const Reach reach = widened(wanted[i]);
        const auto at =
            std::partition_point(failed.begin(), failed.end(), [&](const Reach& f) { return f.end <= reach.begin; });
        if (at == failed.end() || !at->overlaps(reach)) continue;
        again.push_back(i);
        reaches.push_back(reach);
    }
    const std::vector<bool> ready = pages_->prepare(reaches);
    for (std::size_t n = 0; n < again.size(); ++n) {
        if (ready[n] && protect_reach(reaches[n]) == 0) continue;
        held_[again[n]] = false;
        not_own.push_back(again[n]);
    }
    return not_own;
}

/// Under the mutex. Protecting clears written marks, so these writes are reported to other watches of the memory.
int PageWatch::protect_reach(const Reach& reach) {
    std::vector<PageWatch*> others;
    for (PageWatch* other : process_->watches) {
        const std::uint64_t first = block_of(reach.begin);
        const auto found = std::partition_point(other->blocks_.begin(), other->blocks_.end(),
                                                [&](const Block& b) { return b.number < first; });
        if (found != other->blocks_.end() && found->number * huge_page_bytes < reach.end) others.push_back(other);
    }
    if (others.empty()) {
        const auto run =
            std::partition_point(huge_.begin(), huge_.end(), [&](const Reach& r) { return r.end <= reach.begin; });
        return pages_->protect(reach, run != huge_.end() && run->begin <= reach.begin && reach.end <= run->end);
    }
    std::vector<Reach> written;
    const int error = pages_->protect(reach, written);
    for (PageWatch* other : others) other->written_.insert(other->written_.end(), written.begin(), written.end());
    return error;
}

/// Under the mutex: count the held blocks, and how much of each is held.
void PageWatch::count(const std::vector<Reach>& wanted) {
    struct Part {
        std::uint64_t number;
        Reach reach;
        std::uint64_t bytes;
    };
    std::vector<Part> parts;
    for (std::size_t i = 0; i < wanted.size(); ++i)
        if (held_[i])
            for_blocks(widened(wanted[i]), [&](std::uint64_t number, const Reach& part) {
                parts.push_back(
                    {number, part, std::min(wanted[i].end, part.end) - std::max(wanted[i].begin, part.begin)});
            });
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.number < b.number; });
    blocks_.reserve(parts.size());
    for (const Part& part : parts) {
        if (blocks_.empty() || blocks_.back().number != part.number) {
            blocks_.emplace_back(part.number, part.reach, part.bytes);
            continue;
        }
        blocks_.back().reach = hull(blocks_.back().reach, part.reach);
        blocks_.back().left += part.bytes;
    }
    for (const Block& block : blocks_) {
        Process::Holders& holders = process_->blocks[block.number];
        ++holders.count;
        holders.reach = hull(holders.reach, block.reach);
        ++counted_;
    }
}

/// Under the mutex: unprotect memory that failed, as parts of it may be protected and would never be released.
void PageWatch::forget(const std::vector<Reach>& wanted, const std::vector<std::size_t>& failed) {
    for (const std::size_t i : failed) {
        process_->not_own[wanted[i].begin] = wanted[i].end;
        for_blocks(widened(wanted[i]), [&](std::uint64_t number, const Reach& part) {
            const auto found = process_->blocks.find(number);
            if (found != process_->blocks.end())
                found->second.reach = hull(found->second.reach, part);
            else
                pages_->unprotect(part);
        });
    }
}

std::optional<Reach> PageWatch::first_written(const Reach& reach) const {
    if (ended_ || reach.begin >= reach.end) return std::nullopt;
    const std::lock_guard lock(process_->mutex);
    const auto found =
        std::find_if(written_.begin(), written_.end(), [&](const Reach& one) { return one.overlaps(reach); });
    if (found != written_.end()) return Reach{std::max(found->begin, reach.begin), std::min(found->end, reach.end)};
    return pages_->first_written(reach);
}

void PageWatch::release(std::uint64_t begin, std::uint64_t end) {
    if (ended_ || begin >= end) return;
    const std::uint64_t first = block_of(begin);
    auto block = std::partition_point(blocks_.begin(), blocks_.end(), [&](const Block& b) { return b.number < first; });
    std::unique_lock lock(process_->mutex, std::defer_lock);
    Reach free{0, 0};
    for (; block != blocks_.end() && block->number * huge_page_bytes < end; ++block) {
        const std::uint64_t low = std::max(begin, block->number * huge_page_bytes);
        const std::uint64_t high = std::min(end, (block->number + 1) * huge_page_bytes);
        if (block->left.fetch_sub(high - low) != high - low) continue;
        if (!lock.owns_lock()) lock.lock();
        release(*block, free);
    }
    if (free.bytes() != 0) pages_->unprotect(free);
}

void PageWatch::release() {
    if (ended_.exchange(true) || process_->id != ::getpid()) return;  // a forked child holds no memory
    const std::lock_guard lock(process_->mutex);
    release_first(blocks_.size());
    std::erase(process_->watches, this);
}

/// Under the mutex. Release the first `count` blocks; allocates nothing, as memory may be short.
void PageWatch::release_first(std::size_t count) {
    Reach free{0, 0};
    for (std::size_t i = 0; i < count; ++i)
        if (blocks_[i].left.exchange(0) != 0) release(blocks_[i], free);
    if (free.bytes() != 0) pages_->unprotect(free);
}

/// Under the mutex, once for each block: add it to `free`, which is unprotected first if the block is not adjacent.
void PageWatch::release(const Block& block, Reach& free) {
    const auto found = process_->blocks.find(block.number);
    if (--found->second.count != 0) return;
    const Reach reach = found->second.reach;
    process_->blocks.erase(found);
    if (free.end == reach.begin) {
        free.end = reach.end;
        return;
    }
    if (free.bytes() != 0) pages_->unprotect(free);
    free = reach;
}

PageWatch::~PageWatch() { release(); }

}  // namespace flowstone
