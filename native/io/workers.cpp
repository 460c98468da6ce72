#include "io/workers.h"
#include "io/thread_name.h"

#include <utility>

namespace flowstone {

Workers::Workers(std::size_t count, Priority priority) {
    for (std::size_t i = 0; i < count; ++i) live_.push_back(std::make_unique<LiveAccess>());
    const auto body = [this, priority](std::size_t i) {
        name_this_thread("fs-worker");
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

void Workers::stay_near(int node, const std::string& nodes) {
    const std::lock_guard lock(near_mutex_);
    if (node < 0 || node == near_) return;
    near_ = node;
    if (const auto processors = processors_of(node, nodes)) keep_on(threads_, *processors, allowed_);
}

void Workers::post(Task& task) noexcept {
    const std::lock_guard lock(mutex_);
    task.next_ = nullptr;
    (first_ == nullptr ? first_ : last_->next_) = &task;
    last_ = &task;
    posted_.notify_one();
}

void Workers::run(LiveAccess& live) {
    std::unique_lock lock(mutex_);
    for (;;) {
        posted_.wait(lock, [this] { return stopping_ || first_ != nullptr; });
        if (first_ == nullptr) return;
        Task& task = *first_;
        first_ = task.next_;
        lock.unlock();
        task.run(live);
        lock.lock();
    }
}

}  // namespace flowstone
