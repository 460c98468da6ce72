#include "io/arena.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "bounds.h"
#include "io/thread_name.h"
#include "io/thread_start.h"

namespace flowstone {
namespace {

// The longest slab for memory that is touched in advance; and for memory that a job may wait for: a job gets its first
// blocks after one slab.
constexpr std::uint64_t slab_bytes_max = std::uint64_t{1} << 30;
constexpr std::uint64_t awaited_slab_bytes_max = std::uint64_t{64} << 20;

constexpr std::uint64_t numa_nodes_max = 1024;  // the kernel's own limit (NODES_SHIFT)

}  // namespace

Block& Block::operator=(Block&& other) noexcept {
    if (this != &other) {
        release();
        arena_ = std::exchange(other.arena_, nullptr);
        index_ = other.index_;
    }
    return *this;
}

std::byte* Block::bytes() const {
    assert(arena_ != nullptr);
    return arena_->address(index_);
}

void Block::release() {
    if (Arena* arena = std::exchange(arena_, nullptr)) arena->give_back(index_);
}

ArenaLease::ArenaLease(Arena& arena) : arena_(arena) { arena_.enter(); }
ArenaLease::~ArenaLease() { arena_.leave(); }

Arena::Arena(std::uint64_t budget_bytes, std::uint64_t block_bytes, Priority priority)
    : block_bytes_(block_bytes), priority_(priority) {
    if (block_bytes < huge_page_bytes || block_bytes % block_alignment_bytes != 0 || block_bytes > request_bytes_max)
        throw std::invalid_argument("block_bytes must be a multiple of 4096, from 2 MiB to 1 GiB");
    block_count_ = std::max<std::uint64_t>(2, budget_bytes / block_bytes);
    if (block_count_ > UINT32_MAX || budget_bytes > file_bytes_max)
        throw std::invalid_argument("budget_bytes is too large");
    mapping_bytes_ = block_count_ * block_bytes_ + huge_page_bytes;
    // Address space only: NORESERVE, so that a generous budget costs nothing until it is touched.
    mapping_ =
        ::mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the arena");
    const auto start = reinterpret_cast<std::uintptr_t>(mapping_);
    base_ = reinterpret_cast<std::byte*>(round_up(start, huge_page_bytes));
    // Both are hints: without huge pages touching is slower, and without DONTFORK a child only inherits pages that it
    // never reads.
    (void)::madvise(mapping_, mapping_bytes_, MADV_HUGEPAGE);
    (void)::madvise(mapping_, mapping_bytes_, MADV_DONTFORK);
    try {
        toucher_ = std::jthread([this, priority](const std::stop_token& stop) { touch_loop(stop, priority, false); });
    } catch (...) {
        ::munmap(mapping_, mapping_bytes_);
        throw;
    }
}

Arena::~Arena() {
    // Jobs keep the arena alive, so no block can be in use here.
    if (!closed()) close();
}

std::uint64_t Arena::touched_bytes() const {
    const std::lock_guard lock(mutex_);
    return touched_ * block_bytes_;
}

std::uint64_t Arena::free_bytes() const {
    const std::lock_guard lock(mutex_);
    return free_ * block_bytes_;
}

std::uint64_t Arena::pinned_bytes() const {
    const std::lock_guard lock(mutex_);
    return pinned_ * block_bytes_;
}

std::string Arena::refusal() const {
    const std::lock_guard lock(mutex_);
    return refusal_;
}

std::uint64_t Arena::blocks_of(std::uint64_t bytes) const {
    return std::min(bytes / block_bytes_ + (bytes % block_bytes_ != 0), block_count_);
}

void Arena::grow(std::uint64_t total_bytes, bool when_idle) {
    const std::lock_guard lock(mutex_);
    std::uint64_t& wanted = when_idle ? wanted_idle_ : wanted_;
    wanted = std::max(wanted, blocks_of(total_bytes));
    grown_.notify_all();
}

void Arena::grow_at_once(std::uint64_t total_bytes, std::size_t threads) {
    std::vector<std::jthread> ended;
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    wanted_at_once_ = std::max(wanted_at_once_, blocks_of(total_bytes));
    wanted_ = std::max(wanted_, wanted_at_once_);
    grown_.notify_all();
    if (helping_ != 0 || threads < 2) return;
    ended.swap(helpers_);  // joined after the lock is released
    helpers_.reserve(threads - 1);
    while (helpers_.size() < threads - 1) {
        try {
            helpers_.emplace_back([this](const std::stop_token& stop) { touch_loop(stop, priority_, true); });
        } catch (const std::system_error&) {
            return;  // the running helpers do it
        }
        ++helping_;
    }
}

bool Arena::wait_grown(double timeout_s) {
    std::unique_lock lock(mutex_);
    return available_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                               [&] { return closed_ || touched_ >= wanted_; });
}

std::optional<Block> Arena::take_free_locked() {
    if (closed_ || free_ == 0) return std::nullopt;
    const std::uint32_t index = first_free_;
    std::memcpy(&first_free_, address(index), sizeof first_free_);
    --free_;
    return Block(this, index);
}

void Arena::free_locked(std::uint32_t index) {
    std::memcpy(address(index), &first_free_, sizeof first_free_);
    first_free_ = index;
    ++free_;
}

std::optional<Block> Arena::acquire(const Question& may_take, const Question& is_cancelled) {
    std::unique_lock lock(mutex_);
    bool may = false;
    available_.wait(lock, [&] {
        may = may_take();
        return closed_ || (may && free_ != 0) || is_cancelled();
    });
    return may ? take_free_locked() : std::nullopt;
}

std::vector<Block> Arena::acquire_all(std::size_t count, const Question& is_cancelled) {
    std::vector<Block> blocks;
    blocks.reserve(count);
    std::unique_lock lock(mutex_);
    available_.wait(lock, [&] { return closed_ || free_ >= count || is_cancelled(); });
    if (!closed_ && free_ >= count)
        while (blocks.size() < count) blocks.push_back(*take_free_locked());
    return blocks;
}

void Arena::wait(std::chrono::steady_clock::time_point deadline, const Question& enough) {
    std::unique_lock lock(mutex_);
    available_.wait_until(lock, deadline, [&] { return closed_ || enough(); });
}

void Arena::use(std::span<const std::shared_ptr<Device>> devices) {
    if (devices.empty()) return;
    const std::lock_guard first(use_mutex_);
    std::uint64_t before = 0;
    {
        const std::lock_guard lock(mutex_);
        if (device_ != nullptr || closed_) return;
        slabs_.reserve(block_count_);
        pins_.reserve(block_count_);
        device_ = devices.front();
        before = claimed_;  // these blocks belong to no slab
    }
    const std::uint64_t most = std::max<std::uint64_t>(1, slab_bytes_max / block_bytes_);
    for (std::uint64_t at = 0; at < before; at += most)
        pin(static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(std::min(most, before - at)));
}

/// Call it without the lock. If pinning a range is refused, its halves may be accepted; once a single block is refused,
/// no more is tried.
void Arena::pin(std::uint32_t first, std::uint32_t count) {
    {
        const std::lock_guard lock(mutex_);
        if (!refusal_.empty()) return;
    }
    const int error = device_->pin(address(first), count * block_bytes_);
    if (error != 0 && count > 1) {
        pin(first, count / 2);
        return pin(first + count / 2, count - count / 2);
    }
    if (error != 0) return refuse(error);
    const std::lock_guard lock(mutex_);
    pins_.push_back(address(first));
    pinned_ += count;
}

void Arena::refuse(int error) {
    std::string text = "no memory";  // short enough to need no allocation
    try {
        text = device_->name() + " refuses to pin host memory: " + device_->describe(error);
    } catch (const std::bad_alloc&) {}
    const std::lock_guard lock(mutex_);
    refusal_ = std::move(text);
}

int Arena::place(int node) {
    if (node < 0 || static_cast<std::uint64_t>(node) >= numa_nodes_max) return EINVAL;
    constexpr std::uint64_t bits = 8 * sizeof(unsigned long);
    unsigned long nodes[numa_nodes_max / bits] = {};
    nodes[static_cast<std::uint64_t>(node) / bits] = 1UL << (static_cast<std::uint64_t>(node) % bits);
    // Preferred, not bound: if that node is full, memory of another node is better than none. (The kernel
    // reads one bit less than the number that it is given, so the number is one above the number of nodes.)
    if (::syscall(SYS_mbind, mapping_, mapping_bytes_, MPOL_PREFERRED, nodes, numa_nodes_max + 1, 0) != 0) return errno;
    node_ = node;
    return 0;
}

void Arena::wake() {
    // With the lock held: otherwise a waiter between its check and its sleep would miss the notification.
    const std::lock_guard lock(mutex_);
    available_.notify_all();
}

void Arena::give_back(std::uint32_t index) {
    const std::lock_guard lock(mutex_);
    assert(!closed_ && free_ < touched_);
    free_locked(index);
    available_.notify_all();  // all, as a single waiter might not be allowed to take the block
}

void Arena::enter() {
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::invalid_argument("the arena is closed");
    ++jobs_;
}

void Arena::leave() {
    const std::lock_guard lock(mutex_);
    assert(jobs_ > 0);
    if (--jobs_ == 0) grown_.notify_all();
}

bool Arena::closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
}

void Arena::close() {
    {
        const std::lock_guard lock(mutex_);
        if (closed_) return;
        if (jobs_ != 0 || free_ != touched_)
            throw std::invalid_argument("the arena is in use: wait for its jobs first");
        closed_ = true;
        available_.notify_all();
    }
    toucher_.request_stop();
    toucher_.join();
    helpers_.clear();  // each joins
    std::shared_ptr<Device> device;  // destroyed after the lock is released
    const std::lock_guard lock(mutex_);
    for (std::byte* const begin : pins_) device_->unpin(begin);
    pins_.clear();
    device.swap(device_);
    pinned_ = 0;
    free_ = 0;
    touched_ = 0;
    ::munmap(mapping_, mapping_bytes_);
}

/// A begun slab is always finished: its blocks cannot be used before.
bool Arena::may_touch_locked() const {
    const bool is_open = !slabs_.empty() && claimed_ < slabs_.back().first + slabs_.back().count;
    return is_open || claimed_ < wanted_ || (claimed_ < wanted_idle_ && jobs_ == 0);
}

/// The slab of the next block; null: no device uses the arena.
Arena::Slab* Arena::open_slab_locked() {
    if (device_ == nullptr) return nullptr;
    if (slabs_.empty() || claimed_ >= slabs_.back().first + slabs_.back().count) {
        const bool is_awaited = claimed_ < wanted_ && claimed_ >= wanted_at_once_;
        const std::uint64_t most = (is_awaited ? awaited_slab_bytes_max : slab_bytes_max) / block_bytes_;
        const std::uint64_t wanted = (claimed_ < wanted_ ? wanted_ : wanted_idle_) - claimed_;
        const auto count = static_cast<std::uint32_t>(std::min(std::max<std::uint64_t>(1, most), wanted));
        slabs_.push_back({static_cast<std::uint32_t>(claimed_), count, count});
    }
    return &slabs_.back();
}

/// Helpers end when no block is left to touch.
void Arena::touch_loop(const std::stop_token& stop, Priority priority, bool is_helper) {
    name_this_thread("fs-touch");
    assume(priority);
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
        // closed_ too: close() checks under the lock that no block is in use, and none may appear later.
        if (is_helper ? !may_touch_locked() : !grown_.wait(lock, stop, [&] { return closed_ || may_touch_locked(); }))
            break;
        if (closed_) break;
        Slab* const slab = open_slab_locked();  // stays where it is: there is room for all
        const auto index = static_cast<std::uint32_t>(claimed_++);
        lock.unlock();
        touch(index);
        lock.lock();
        if (closed_) break;
        if (slab == nullptr) {
            add_locked(index, 1);
        } else if (--slab->left == 0) {
            lock.unlock();
            pin(slab->first, slab->count);
            lock.lock();
            if (closed_) break;
            add_locked(slab->first, slab->count);
        }
    }
    if (is_helper) --helping_;
}

void Arena::add_locked(std::uint32_t first, std::uint32_t count) {
    touched_ += count;
    for (std::uint32_t index = first; index < first + count; ++index) free_locked(index);
    available_.notify_all();
}

void Arena::touch(std::uint32_t index) {
    // Touch page by page: a page fault locks only its own mapping. MADV_POPULATE_WRITE holds the address space's lock
    // for the full block (20 ms for 8 MiB, measured), and every thread that starts, maps memory or grows the heap waits
    // for it.
    std::byte* block = address(index);
    for (std::uint64_t at = 0; at < block_bytes_; at += block_alignment_bytes)
        static_cast<volatile std::byte*>(block)[at] = std::byte{0};
}

}  // namespace flowstone
