#include "workers.h"

#include <utility>

namespace flowstone {

Workers::Workers(std::size_t count, Priority priority) {
    for (std::size_t i = 0; i < count; ++i) live_.push_back(std::make_unique<LiveAccess>());
    threads_.reserve(count);
    for (std::size_t i = 0; i < count; ++i)
        threads_.emplace_back([this, priority, i] {
            assume(priority);
            run(*live_[i]);
        });
}

Workers::~Workers() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        posted_.notify_all();
    }
    for (std::jthread& thread : threads_) thread.join();
}

void Workers::post(Task task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    posted_.notify_one();
}

void Workers::run(LiveAccess& live) {
    std::unique_lock lock(mutex_);
    for (;;) {
        posted_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        const Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task(live);
        lock.lock();
    }
}

}  // namespace flowstone
