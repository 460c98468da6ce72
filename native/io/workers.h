// Threads that copy and digest.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "capture/live_memory.h"
#include "io/numa.h"
#include "io/priority.h"
#include "io/thread_start.h"

namespace flowstone {

/// A task of a worker. It is its own link in the queue, so that posting it allocates nothing.
class Task {
public:
    /// `live`: the thread's access to live memory.
    virtual void run(LiveAccess& live) noexcept = 0;

protected:
    ~Task() = default;

private:
    friend class Workers;
    Task* next_ = nullptr;
};

/// A first-in first-out queue of tasks and `count` threads. The length of the queue is bounded by the arena's blocks
/// and the jobs' limits, as every task has one of these.
class Workers {
public:
    /// Throws std::system_error, std::bad_alloc.
    explicit Workers(std::size_t count, Priority priority = Priority::normal);
    /// Runs all queued tasks, then joins the threads.
    ~Workers();
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    /// Does not block. The task must stay valid until it has begun to run, and may be queued once.
    void post(Task& task) noexcept;
    std::size_t count() const { return threads_.size(); }
    /// Run the threads on the processors of a NUMA node, whose memory they read, if the constructor's thread could run
    /// there. Does nothing if the node is -1 or unknown. `nodes`: see processors_of.
    void stay_near(int node, const std::string& nodes = "/sys/devices/system/node");

private:
    void run(LiveAccess& live);
    void stop();

    std::mutex mutex_;
    std::condition_variable posted_;
    Task* first_ = nullptr;
    Task* last_ = nullptr;  // valid if first_ is not null
    bool stopping_ = false;
    std::vector<std::unique_ptr<LiveAccess>> live_;  // one for each thread
    const cpu_set_t allowed_ = own_processors();
    std::mutex near_mutex_;
    int near_ = -1;  // under near_mutex_
    std::vector<std::jthread> threads_;
};

}  // namespace flowstone
