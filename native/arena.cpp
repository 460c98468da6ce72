#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "bounds.h"
#include "thread_name.h"

namespace flowstone {

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

Stay::Stay(Arena& arena) : arena_(arena) { arena_.enter(); }
Stay::~Stay() { arena_.leave(); }

Arena::Arena(std::uint64_t budget_bytes, std::uint64_t block_bytes, Priority priority) : block_bytes_(block_bytes) {
    if (block_bytes < huge_page_bytes || block_bytes % block_alignment_bytes != 0 || block_bytes > request_bytes_max)
        throw std::invalid_argument("block_bytes must be a multiple of 4096, from 2 MiB to 1 GiB");
    block_count_ = std::max<std::uint64_t>(2, budget_bytes / block_bytes);
    if (block_count_ > UINT32_MAX || budget_bytes > file_bytes_max)
        throw std::invalid_argument("budget_bytes is beyond any machine");
    mapping_bytes_ = block_count_ * block_bytes_ + huge_page_bytes;
    // Address space only: NORESERVE, so that a generous budget costs nothing until it is touched.
    mapping_ = ::mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the arena");
    const auto start = reinterpret_cast<std::uintptr_t>(mapping_);
    base_ = reinterpret_cast<std::byte*>(round_up(start, huge_page_bytes));
    // Both are hints: without huge pages touching is slower, and without DONTFORK a child merely inherits pages that it
    // never reads.
    (void)::madvise(mapping_, mapping_bytes_, MADV_HUGEPAGE);
    (void)::madvise(mapping_, mapping_bytes_, MADV_DONTFORK);
    try {
        toucher_ = std::jthread([this, priority](const std::stop_token& stop) {
            name_this_thread("fs-touch");
            touch_loop(stop, priority);
        });
    } catch (...) {
        ::munmap(mapping_, mapping_bytes_);
        throw;
    }
}

Arena::~Arena() {
    // Jobs hold the arena, so no block can be in use here.
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

void Arena::grow(std::uint64_t total_bytes, bool when_idle) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t blocks = total_bytes / block_bytes_ + (total_bytes % block_bytes_ != 0);
    std::uint64_t& wanted = when_idle ? wanted_idle_ : wanted_;
    wanted = std::max(wanted, std::min(blocks, block_count_));
    grown_.notify_all();
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

std::optional<Block> Arena::acquire(const Question& may_take, const Question& give_up) {
    std::unique_lock lock(mutex_);
    bool may = false;
    available_.wait(lock, [&] {
        may = may_take();
        return closed_ || (may && free_ != 0) || give_up();
    });
    return may ? take_free_locked() : std::nullopt;
}

std::vector<Block> Arena::acquire_all(std::size_t count, const Question& give_up) {
    std::vector<Block> blocks;
    blocks.reserve(count);
    std::unique_lock lock(mutex_);
    available_.wait(lock, [&] { return closed_ || free_ >= count || give_up(); });
    if (!closed_ && free_ >= count)
        while (blocks.size() < count) blocks.push_back(*take_free_locked());
    return blocks;
}

void Arena::wait(std::chrono::steady_clock::time_point deadline, const Question& enough) {
    std::unique_lock lock(mutex_);
    available_.wait_until(lock, deadline, [&] { return closed_ || enough(); });
}

void Arena::pin(const Block& block, const std::shared_ptr<Device>& device) {
    {
        const std::lock_guard lock(mutex_);
        if (!pinned_.try_emplace(block.index()).second) return;
    }
    const bool pinned = device->pin(block.bytes(), block_bytes_);
    const std::lock_guard lock(mutex_);
    pinned_[block.index()] = pinned ? device : nullptr;
}

void Arena::wake() {
    // Under the lock: a waiter between its check and its sleep would miss the notification.
    const std::lock_guard lock(mutex_);
    available_.notify_all();
}

void Arena::give_back(std::uint32_t index) {
    const std::lock_guard lock(mutex_);
    assert(!closed_ && free_ < touched_);
    free_locked(index);
    available_.notify_all();  // all: a single waiter might not be allowed to take the block
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
        if (jobs_ != 0 || free_ != touched_) throw std::invalid_argument("the arena is in use: wait for its jobs first");
        closed_ = true;
        available_.notify_all();
    }
    toucher_.request_stop();
    toucher_.join();
    const std::lock_guard lock(mutex_);
    for (const auto& [index, device] : pinned_)
        if (device != nullptr) device->unpin(address(index));
    pinned_.clear();
    free_ = 0;
    touched_ = 0;
    ::munmap(mapping_, mapping_bytes_);
}

void Arena::touch_loop(const std::stop_token& stop, Priority priority) {
    assume(priority);
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
        // closed_ too: close() checks under the lock that no block is in use, and none may appear later.
        if (!grown_.wait(lock, stop, [&] { return closed_ || may_touch_locked(); }) || closed_) return;
        const auto index = static_cast<std::uint32_t>(touched_);
        lock.unlock();
        touch(index);
        lock.lock();
        if (closed_) return;
        ++touched_;
        free_locked(index);
        available_.notify_all();
    }
}

void Arena::touch(std::uint32_t index) {
    // Page by page, as any program would: a fault takes the lock of its own mapping only. MADV_POPULATE_WRITE
    // holds the address space's lock for the whole block (20 ms for 8 MiB, measured), and every thread that
    // starts, maps or grows the heap meanwhile waits for it.
    std::byte* block = address(index);
    for (std::uint64_t at = 0; at < block_bytes_; at += block_alignment_bytes)
        static_cast<volatile std::byte*>(block)[at] = std::byte{0};
}

}  // namespace flowstone
