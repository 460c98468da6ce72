#include "workers.h"

#include <utility>

namespace flowstone {

Workers::Workers(std::size_t count, Priority priority) {
    for (std::size_t i = 0; i < count; ++i) live_.push_back(std::make_unique<LiveAccess>());
    const auto body = [this, priority](std::size_t i) {
        assume(priority);
        run(*live_[i]);
    };
    threads_ = start_threads(count, body, [this] { stop(); });
}

void Workers::stop() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    posted_.notify_all();
}

Workers::~Workers() {
    stop();
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
