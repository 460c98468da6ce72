// Threads that copy and digest.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "live_memory.h"
#include "priority.h"
#include "thread_start.h"

namespace flowstone {

/// A first-in first-out queue of tasks and `count` threads. The queue has no bound of its own:
/// every task holds an arena block or one of its job's places, and those are bounded.
class Workers {
public:
    /// Throws std::system_error, std::bad_alloc.
    explicit Workers(std::size_t count, Priority priority = Priority::normal);
    /// Runs what is queued, then joins.
    ~Workers();
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    /// Does not block. Tasks do not throw; each is given what its thread copies live memory with.
    using Task = std::function<void(LiveAccess& live)>;
    void post(Task task);
    std::size_t count() const { return threads_.size(); }

private:
    void run(LiveAccess& live);
    void stop();

    std::mutex mutex_;
    std::condition_variable posted_;
    std::deque<Task> tasks_;
    bool stopping_ = false;
    std::vector<std::unique_ptr<LiveAccess>> live_;  // one each
    std::vector<std::jthread> threads_;
};

}  // namespace flowstone
