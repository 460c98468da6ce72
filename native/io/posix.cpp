// The fallback backend: threads that call preadv and pwritev.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "io/backend.h"
#include "bounds.h"
#include "io/op_queue.h"
#include "io/thread_name.h"
#include "io/thread_start.h"
#include "io/transfer.h"

namespace flowstone {
namespace {

ssize_t call(const Op& op, std::span<const iovec> list, std::uint64_t offset) {
    const int fd = op.file->fd;
    const int count = static_cast<int>(list.size());
    const auto at = static_cast<off_t>(offset);
    const ssize_t result =
        op.direction == Direction::read ? ::preadv(fd, list.data(), count, at) : ::pwritev(fd, list.data(), count, at);
    return result < 0 ? -errno : result;
}

void carry_out(Transfer& transfer) {
    for (;;) {
        const std::span<const iovec> list = transfer.attempt();
        const ssize_t result =
            transfer.injected() != 0 ? -transfer.injected() : call(transfer.op(), list, transfer.offset());
        if (transfer.settle(result) == Transfer::Next::finished) break;
        if (const unsigned pause = transfer.pause_us()) ::usleep(pause);
    }
    transfer.complete();
}

void carry_out_or_drop(Transfer& transfer, bool unwanted) {
    if (unwanted)
        transfer.drop();
    else
        carry_out(transfer);
}

class PosixBackend final : public Backend {
public:
    PosixBackend(std::uint32_t queue_depth, FaultInjector injector, Priority priority)
        : injector_(std::move(injector)) {
        const std::size_t count = std::min<std::size_t>(queue_depth, posix_threads_max);
        const auto body = [this, priority](std::size_t) {
            name_this_thread("fs-posix");
            assume(priority);
            run();
        };
        threads_ = start_threads(count, body, [this] { stop(); });
    }

    ~PosixBackend() override {
        assert(waiting_.empty());
        stop();
        for (std::jthread& thread : threads_) thread.join();
    }

    void submit(std::unique_ptr<Op> op) override {
        auto transfer = std::make_unique<Transfer>(std::move(op), &injector_);
        const std::lock_guard lock(mutex_);
        waiting_.push(std::move(transfer));
        submitted_.notify_one();
    }

    const char* name() const override { return "posix"; }

private:
    void stop() {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        submitted_.notify_all();
    }

    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            submitted_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            std::unique_ptr<Transfer> transfer = waiting_.pop();
            // Checked here, not after the lock, so that an op submitted before a failed one is always carried out.
            const bool unwanted = is_unwanted(transfer->op());
            lock.unlock();
            carry_out_or_drop(*transfer, unwanted);
            transfer.reset();
            lock.lock();
        }
    }

    const FaultInjector injector_;
    std::mutex mutex_;
    std::condition_variable submitted_;
    OpQueue waiting_;
    bool stopping_ = false;
    std::vector<std::jthread> threads_;
};

class SyncBackend final : public Backend {
public:
    void submit(std::unique_ptr<Op> op) override {
        Transfer transfer(std::move(op), nullptr);
        carry_out_or_drop(transfer, is_unwanted(transfer.op()));
    }
    const char* name() const override { return "sync"; }
};

}  // namespace

std::unique_ptr<Backend> make_sync_backend() { return std::make_unique<SyncBackend>(); }

std::unique_ptr<Backend> make_posix_backend(std::uint32_t queue_depth, FaultInjector injector, Priority priority) {
    return std::make_unique<PosixBackend>(queue_depth, std::move(injector), priority);
}

}  // namespace flowstone
