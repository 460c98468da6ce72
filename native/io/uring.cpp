// The io_uring backend: any thread submits, one reaper thread owns the completion queue.
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cassert>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "io/backend.h"
#include "io/op_queue.h"
#include "io/thread_name.h"
#include "io/thread_start.h"
#include "io/transfer.h"

namespace flowstone {
namespace {

// Values of a completion's user_data other than a Transfer's address.
constexpr std::uint64_t stop_mark = 0;
constexpr std::uint64_t forgotten_mark = 1;

// Enough for any arena whose blocks are reused; an entry costs eight bytes.
constexpr unsigned memory_slots = 1024;
constexpr unsigned file_slots = 64;
constexpr __u64 untagged = 0;
constexpr int not_begun = -1;

unsigned at(int slot) { return static_cast<unsigned>(slot); }

/// The free slots of one of the ring's tables.
class Slots {
public:
    void open(unsigned count) {
        for (unsigned slot = count; slot > 0; --slot) free_.push_back(static_cast<int>(slot - 1));
    }

    /// Fill a slot by `update`, which returns 1 (entries changed) or -errno. Returns the slot, or -errno. After a limit
    /// was hit once, it is not tried again.
    template <class Update> int fill(Update update) {
        const std::lock_guard lock(mutex_);
        if (free_.empty()) return -ENOSYS;
        if (refused_ != 0) return refused_;
        const int slot = free_.back();
        const int updated = update(slot);
        if (updated != 1) return refused_ = updated < 0 ? updated : -EINVAL;
        free_.pop_back();
        return slot;
    }

    void free(int slot) {
        const std::lock_guard lock(mutex_);
        free_.push_back(slot);
        refused_ = 0;
    }

private:
    std::mutex mutex_;
    std::vector<int> free_;
    int refused_ = 0;
};

class UringBackend final : public Backend {
public:
    UringBackend(std::uint32_t queue_depth, FaultInjector injector, Priority priority)
        : queue_depth_(queue_depth), injector_(std::move(injector)) {
        // One entry more than the depth, for the event that stops the reaper.
        const int error = ::io_uring_queue_init(queue_depth + 1, &ring_, 0);
        if (error < 0) throw std::system_error(-error, std::generic_category(), "io_uring_queue_init");
        // Kernels before 5.19 have no sparse tables, so memory cannot be registered.
        if (::io_uring_register_buffers_sparse(&ring_, memory_slots) == 0) memory_.open(memory_slots);
        if (::io_uring_register_files_sparse(&ring_, file_slots) == 0) files_.open(file_slots);
        bell_ = ::eventfd(0, EFD_CLOEXEC);
        try {
            if (bell_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
            start_reaper(priority);
        } catch (...) {
            close();
            throw;
        }
    }

    ~UringBackend() override {
        {
            const std::lock_guard lock(waiting_mutex_);
            assert(waiting_.empty());
        }
        stop_reaper();
        close();
    }

    void submit(std::unique_ptr<Op> op) override {
        auto transfer = std::make_unique<Transfer>(std::move(op), &injector_);
        {
            const std::lock_guard lock(waiting_mutex_);
            if (in_flight_ == queue_depth_) {
                waiting_.push(std::move(transfer));
                return;
            }
            ++in_flight_;
        }
        launch(transfer.release());
    }

    const char* name() const override { return "io_uring"; }

    int register_memory(iovec memory) override {
        return memory_.fill(
            [&](int slot) { return ::io_uring_register_buffers_update_tag(&ring_, at(slot), &memory, &untagged, 1); });
    }

    int register_file(int fd) override {
        return files_.fill([&](int slot) { return ::io_uring_register_files_update(&ring_, at(slot), &fd, 1); });
    }

    void unregister_memory(int slot) override {
        const iovec nothing{};
        if (::io_uring_register_buffers_update_tag(&ring_, at(slot), &nothing, &untagged, 1) == 1) memory_.free(slot);
    }

    void unregister_file(int slot) override {
        const int nothing = -1;
        if (::io_uring_register_files_update(&ring_, at(slot), &nothing, 1) == 1) files_.free(slot);
    }

private:
    void close() {
        if (reaper_.joinable()) reaper_.join();
        ::io_uring_queue_exit(&ring_);
        if (bell_ >= 0) ::close(bell_);
    }

    /// Submit the next attempt to the kernel, and retry until it is accepted. The caller has reserved a place in
    /// flight.
    void launch(Transfer* transfer) {
        for (;;) {
            const int error = try_launch(transfer);
            if (error == 0) return;
            if (transfer->settle(-error) == Transfer::Next::finished) return finish(transfer);
            if (const unsigned pause = transfer->pause_us()) ::usleep(pause);
        }
    }

    /// Returns 0 once the kernel has accepted it (the reaper may already have finished it), otherwise an errno.
    int try_launch(Transfer* transfer) {
        const std::span<const iovec> list = transfer->attempt();
        if (transfer->injected() != 0) return transfer->injected();
        const auto count = static_cast<unsigned>(list.size());
        const int fd = transfer->op().file->fd;
        const bool is_read = transfer->op().direction == Direction::read;
        const std::lock_guard lock(submit_mutex_);
        io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
        if (entry == nullptr) return EBUSY;
        const int slot = transfer->op().memory_slot;
        if (slot >= 0 && count == 1) {
            const auto length = static_cast<unsigned>(list[0].iov_len);
            if (is_read)
                ::io_uring_prep_read_fixed(entry, fd, list[0].iov_base, length, transfer->offset(), slot);
            else
                ::io_uring_prep_write_fixed(entry, fd, list[0].iov_base, length, transfer->offset(), slot);
        } else if (is_read) {
            ::io_uring_prep_readv(entry, fd, list.data(), count, transfer->offset());
        } else {
            ::io_uring_prep_writev(entry, fd, list.data(), count, transfer->offset());
        }
        if (transfer->op().file_slot >= 0) {
            entry->fd = transfer->op().file_slot;
            entry->flags |= IOSQE_FIXED_FILE;
        }
        ::io_uring_sqe_set_data(entry, transfer);
        transfer->publish();
        return flush(entry);
    }

    /// Submit the one entry; if the kernel does not accept it, it becomes a NOP that the next submission includes.
    int flush(io_uring_sqe* entry) {
        int taken = 0;
        do taken = ::io_uring_submit(&ring_);
        while (taken == -EINTR || (taken > 0 && ::io_uring_sq_ready(&ring_) > 0));
        if (taken > 0) return 0;
        ::io_uring_prep_nop(entry);
        entry->user_data = forgotten_mark;
        return taken == 0 ? EAGAIN : -taken;
    }

    /// The ring's first entry completes when the event is signalled: then the reaper wakes even if the kernel accepts
    /// no more entries. Returns 0, or errno.
    int listen() {
        const std::lock_guard lock(submit_mutex_);
        io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
        ::io_uring_prep_poll_add(entry, bell_, POLLIN);
        entry->user_data = stop_mark;
        return flush(entry);
    }

    void stop_reaper() {
        stopping_ = true;
        while (::eventfd_write(bell_, 1) != 0 && errno == EINTR) {}
    }

    void start_reaper(Priority priority) {
        reaper_ = std::jthread([this, priority] {
            name_this_thread("fs-uring");
            assume(priority);
            // Called on this thread, as the kernel cancels requests of a thread that has ended.
            const int error = reserve_throw_memory() ? listen() : ENOMEM;
            began_ = error;
            began_.notify_one();
            if (error == 0) reap();
        });
        began_.wait(not_begun);
        if (const int error = began_; error != 0)
            throw std::system_error(error, std::generic_category(), "io_uring_enter");
    }

    void reap() {
        for (;;) {
            io_uring_cqe* completion = nullptr;
            const int error = ::io_uring_wait_cqe(&ring_, &completion);
            if (error < 0) {
                // The kernel consumed no entry: try again. Even if the call is no longer allowed (seccomp), earlier
                // requests still complete, in memory shared with the kernel.
                if (error != -EINTR && error != -EAGAIN) ::usleep(1000);
                if (stopping_) return;
                continue;
            }
            const std::uint64_t mark = completion->user_data;
            const ssize_t result = completion->res;
            ::io_uring_cqe_seen(&ring_, completion);
            if (mark == stop_mark) return;
            if (mark != forgotten_mark) settle(reinterpret_cast<Transfer*>(mark), result);
        }
    }

    void settle(Transfer* transfer, ssize_t result) {
        transfer->observe();
        if (transfer->settle(result) == Transfer::Next::finished) return finish(transfer);
        if (const unsigned pause = transfer->pause_us()) ::usleep(pause);
        launch(transfer);
    }

    /// Call the owner first: after a fault it drops its waiting ops, so that they do not fail one inside the other.
    void finish(Transfer* transfer) {
        const std::unique_ptr<Transfer> finished(transfer);
        finished->complete();
        begin_next();
    }

    /// Submit a waiting op in place of the finished one.
    void begin_next() {
        for (;;) {
            std::unique_ptr<Transfer> next;
            {
                const std::lock_guard lock(waiting_mutex_);
                if (waiting_.empty()) {
                    --in_flight_;
                    return;
                }
                next = waiting_.pop();
            }
            if (!is_unwanted(next->op())) return launch(next.release());
            next->drop();
        }
    }

    const std::uint32_t queue_depth_;
    const FaultInjector injector_;
    std::mutex waiting_mutex_;
    OpQueue waiting_;
    std::uint32_t in_flight_ = 0;
    std::mutex submit_mutex_;
    io_uring ring_{};
    Slots memory_;
    Slots files_;
    int bell_ = -1;
    std::atomic<int> began_{not_begun};  // whether the reaper has begun; or errno
    std::atomic<bool> stopping_{false};  // set once no op is in progress
    std::jthread reaper_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(std::uint32_t queue_depth, FaultInjector injector, Priority priority) {
    return std::make_unique<UringBackend>(queue_depth, std::move(injector), priority);
}

}  // namespace flowstone
