#include "capture/guarded_copy.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include "bounds.h"
#include "io/thread_name.h"
#include "io/thread_start.h"

namespace flowstone {
namespace {

// The kernel's interfaces, declared here: see written_pages.cpp.

struct UffdApi {
    std::uint64_t api, features, ioctls;
};
struct UffdRange {
    std::uint64_t start, length;
};
struct UffdRegister {
    UffdRange range;
    std::uint64_t mode, ioctls;
};
struct UffdWriteProtect {
    UffdRange range;
    std::uint64_t mode;
};
struct UffdMessage {
    std::uint8_t event;
    std::array<std::uint8_t, 7> reserved;
    std::uint64_t flags, address, feature;
};
static_assert(sizeof(UffdMessage) == 32);

constexpr std::uint64_t uffd_api = 0xAA;
constexpr std::uint64_t feature_wp = 1U << 0;
constexpr std::uint64_t feature_wp_unpopulated = 1U << 13;  // also pages that were never touched, and read as zero
constexpr std::uint64_t register_mode_wp = 2;
constexpr std::uint64_t write_protect = 1;
constexpr std::uint8_t event_pagefault = 0x12;
constexpr unsigned long uffd_api_call = _IOWR(0xAA, 0x3F, UffdApi);
constexpr unsigned long uffd_register_call = _IOWR(0xAA, 0x00, UffdRegister);
constexpr unsigned long uffd_unregister_call = _IOR(0xAA, 0x01, UffdRange);
constexpr unsigned long uffd_write_protect_call = _IOWR(0xAA, 0x06, UffdWriteProtect);
constexpr unsigned long uffd_new_call = _IO(0xAA, 0x00);  // of /dev/userfaultfd

#ifdef SYS_userfaultfd
constexpr long userfaultfd_number = SYS_userfaultfd;
#else
constexpr long userfaultfd_number = -1;
#endif

// A writer waits for the copy of one chunk, 0.3 ms, after the one in progress. Chunks end where huge pages do.
constexpr std::uint64_t guarded_chunk_bytes = huge_page_bytes;
// Removing the protection holds the lock of the address space: 1 ms for this length.
constexpr std::uint64_t unregister_bytes = std::uint64_t{32} << 20;

/// each(part of the reach), in parts that end at multiples of `unit`.
template <class Each> void for_parts(const Reach& reach, std::uint64_t unit, Each each) {
    for (std::uint64_t begin = reach.begin; begin < reach.end;) {
        const std::uint64_t end = std::min(round_down(begin, unit) + unit, reach.end);
        each(Reach{begin, end});
        begin = end;
    }
}

Reach whole_pages(const CopyRow& row) {
    const Reach pages{round_up(row.source, page_bytes()), round_down(row.source + row.bytes, page_bytes())};
    return pages.begin + GuardedCopy::guarded_bytes_min <= pages.end ? pages : Reach{0, 0};
}

void copy_bytes(std::uint64_t target, std::uint64_t source, std::uint64_t bytes) {
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes);
}

}  // namespace

/// The protection of memory, whose writers wait. Used by the thread that created it, then by one other thread.
class GuardedCopy::Protection {
public:
    static std::unique_ptr<Protection> open(std::string& refusal) {
        std::unique_ptr<Protection> made(new Protection);
        // Handle faults of the kernel, too: otherwise a system call that writes into protected memory would fail.
        made->faults_ = static_cast<int>(::syscall(userfaultfd_number, O_CLOEXEC | O_NONBLOCK));
        if (made->faults_ < 0) made->open_device();
        if (made->faults_ < 0)
            return refusal = std::string("userfaultfd is refused (") + std::strerror(errno) + ")", nullptr;
        UffdApi api{uffd_api, feature_wp | feature_wp_unpopulated, 0};
        if (::ioctl(made->faults_, uffd_api_call, &api) != 0)
            return refusal = "this kernel cannot hold back writes (Linux 6.4 can)", nullptr;
        return made;
    }
    /// Removes the protection of all memory.
    ~Protection() {
        // Closing the descriptor alone would leave it in place as long as a forked child has a copy of the descriptor.
        for (const Reach& reach : registrations_)
            for_parts(reach, unregister_bytes, [this](const Reach& part) { unregister(part); });
        if (faults_ >= 0) ::close(faults_);
    }
    Protection(const Protection&) = delete;
    Protection& operator=(const Protection&) = delete;

    std::vector<bool> prepare(std::span<const Reach> reaches) {
        return register_own(reaches, [this](const Reach& reach) {
            UffdRegister call{{reach.begin, reach.bytes()}, register_mode_wp, 0};
            if (::ioctl(faults_, uffd_register_call, &call) != 0) return false;
            registrations_.push_back(reach);
            return true;
        });
    }

    bool protect(const Reach& reach) const { return set(reach, write_protect); }

    /// Releases waiting writers. No writer waits for memory that is unmapped by now.
    void lift(const Reach& reach) const {
        if (set(reach, 0)) return;
        for_parts(reach, page_bytes(), [this](const Reach& page) { (void)set(page, 0); });
    }

    /// The addresses to which threads wait to write, as far as new since the last call.
    std::span<const UffdMessage> waiting() {
        const ssize_t count = ::read(faults_, messages_.data(), sizeof messages_);
        return std::span(messages_).first(count < 0 ? 0 : static_cast<std::size_t>(count) / sizeof(UffdMessage));
    }

private:
    Protection() = default;

    void open_device() {
        const int error = errno;
        const int device = ::open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
        if (device >= 0) {
            faults_ = ::ioctl(device, uffd_new_call, O_CLOEXEC | O_NONBLOCK);
            ::close(device);
        }
        errno = error;
    }

    bool set(const Reach& reach, std::uint64_t mode) const {
        UffdWriteProtect call{{reach.begin, reach.bytes()}, mode};
        while (::ioctl(faults_, uffd_write_protect_call, &call) != 0)
            if (errno != EAGAIN) return false;  // another thread forks: try again soon
        return true;
    }

    void unregister(const Reach& reach) const {
        UffdRange range{reach.begin, reach.bytes()};
        if (::ioctl(faults_, uffd_unregister_call, &range) == 0) return;
        for_parts(reach, page_bytes(), [this](const Reach& page) {
            UffdRange one{page.begin, page.bytes()};
            (void)::ioctl(faults_, uffd_unregister_call, &one);
        });
    }

    int faults_ = -1;
    std::vector<Reach> registrations_;
    std::array<UffdMessage, 64> messages_;
};

std::string GuardedCopy::refusal() {
    std::string refusal;
    (void)Protection::open(refusal);
    return refusal;
}

GuardedCopy::GuardedCopy(std::vector<CopyRow> rows, bool guard)
    : rows_(std::move(rows)), guarded_(rows_.size(), Reach{0, 0}) {
    std::string refusal;
    if (guard && page_bytes() == block_alignment_bytes) protection_ = Protection::open(refusal);
    if (protection_ != nullptr) guard_rows();
    if (chunks_.empty()) protection_.reset();
    if (protection_ == nullptr) {
        is_done_ = true;
        for (const CopyRow& row : rows_) copy_unguarded(row);
        return;
    }
    live_ = std::make_unique<LiveAccess>();
    // The thread is started before any page is protected: from then on a write may wait for it.
    thread_ = start_threads(1, [this](std::size_t) { run(); }, [] {});
    for (std::size_t i = 0; i < rows_.size(); ++i)
        if (guarded_[i].bytes() != 0 && !protection_->protect(guarded_[i])) {
            protection_->lift(guarded_[i]);
            for (Chunk& chunk : chunks_) chunk.done = chunk.done || chunk.row == i;
            guarded_bytes_ -= guarded_[i].bytes();
            guarded_[i] = {0, 0};
        }
    {
        const std::lock_guard lock(mutex_);
        is_protected_ = true;
        changed_.notify_all();
    }
    copy_rest();
}

GuardedCopy::~GuardedCopy() { thread_.clear(); }

/// Choose what is guarded, and cut it into chunks.
void GuardedCopy::guard_rows() {
    std::vector<std::size_t> order(rows_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(),
              [this](std::size_t a, std::size_t b) { return rows_[a].source < rows_[b].source; });
    std::vector<std::size_t> chosen;
    std::vector<Reach> reaches;
    for (const std::size_t i : order) {
        const Reach pages = whole_pages(rows_[i]);
        if (pages.bytes() == 0 || (!reaches.empty() && pages.begin < reaches.back().end)) continue;
        chosen.push_back(i);
        reaches.push_back(pages);
    }
    const std::vector<bool> ready = protection_->prepare(reaches);
    for (std::size_t at = 0; at < chosen.size(); ++at) {
        if (!ready[at]) continue;
        guarded_[chosen[at]] = reaches[at];
        guarded_bytes_ += reaches[at].bytes();
        for_parts(reaches[at], guarded_chunk_bytes,
                  [&](const Reach& part) { chunks_.push_back({part, chosen[at], false}); });
    }
}

/// Copy all bytes that are not guarded.
void GuardedCopy::copy_rest() {
    for (std::size_t i = 0; i < rows_.size(); ++i) {
        const CopyRow& row = rows_[i];
        const Reach& pages = guarded_[i];
        if (pages.bytes() == 0) {
            copy_unguarded(row);
            continue;
        }
        copy_unguarded({row.source, pages.begin - row.source, row.target});
        copy_unguarded({pages.end, row.source + row.bytes - pages.end, row.target + (pages.end - row.source)});
    }
}

void GuardedCopy::copy_unguarded(const CopyRow& row) const { copy_bytes(row.target, row.source, row.bytes); }

// The members below run on the thread, and must not allocate: a thread that waits for it may hold the allocator's
// locks.

void GuardedCopy::run() {
    name_this_thread("fs-guard");
    {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return is_protected_; });
    }
    for (Chunk& chunk : chunks_) {
        serve();
        if (!chunk.done) copy(chunk);
    }
    protection_.reset();
    const std::lock_guard lock(mutex_);
    is_done_ = true;
    changed_.notify_all();
}

/// First what threads wait to write to.
void GuardedCopy::serve() {
    for (const UffdMessage& message : protection_->waiting()) {
        if (message.event != event_pagefault) continue;
        const auto chunk = std::partition_point(chunks_.begin(), chunks_.end(),
                                                [&](const Chunk& c) { return c.reach.end <= message.address; });
        const bool is_found = chunk != chunks_.end() && chunk->reach.begin <= message.address;
        if (is_found && !chunk->done)
            copy(*chunk);
        else
            protection_->lift(
                {round_down(message.address, page_bytes()), round_down(message.address, page_bytes()) + page_bytes()});
    }
}

void GuardedCopy::copy(Chunk& chunk) {
    const CopyRow& row = rows_[chunk.row];
    auto* const target = reinterpret_cast<std::byte*>(row.target + (chunk.reach.begin - row.source));
    if (live_->read(target, reinterpret_cast<const std::byte*>(chunk.reach.begin), chunk.reach.bytes()) != 0) {
        const std::lock_guard lock(mutex_);
        gone_ = std::min(gone_.value_or(chunk.row), chunk.row);
    }
    chunk.done = true;
    protection_->lift(chunk.reach);
}

bool GuardedCopy::wait(std::chrono::duration<double> timeout) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, [this] { return is_done_; });
}

std::optional<std::size_t> GuardedCopy::gone() const {
    const std::lock_guard lock(mutex_);
    return gone_;
}

}  // namespace flowstone
