// Sources that come one after the other while a job writes them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace flowstone {

/// Which rows of a write have their bytes, and which the job needs no more. So rows may lie in memory that is used again: the
/// caller offers rows in order, and puts others into their memory once they are captured. Locked; any thread.
class Feed {
public:
    /// How many bytes each row has.
    explicit Feed(std::vector<std::uint64_t> row_bytes) : left_(std::move(row_bytes)) { skip_captured(); }

    /// Rows before that number have their bytes. Never fewer than before.
    void offer(std::size_t rows) {
        const std::lock_guard lock(mutex_);
        offered_ = rows;
        changed_.notify_all();
    }
    /// Wait until rows before that number are offered, or `stopping` holds, which is asked from time to time.
    void await(std::size_t rows, const std::function<bool()>& stopping) {
        std::unique_lock lock(mutex_);
        while (offered_ < rows && !stopping()) changed_.wait_for(lock, asked_every);
    }
    /// So many bytes of the row were captured.
    void captured(std::size_t row, std::uint64_t bytes) {
        const std::lock_guard lock(mutex_);
        left_[row] -= bytes;
        skip_captured();
        changed_.notify_all();
    }
    /// The job has ended early: nothing is captured any more.
    void end() {
        const std::lock_guard lock(mutex_);
        ended_ = true;
        changed_.notify_all();
    }
    bool ended() {
        const std::lock_guard lock(mutex_);
        return ended_;
    }
    std::size_t rows() const { return left_.size(); }
    /// How many rows at the beginning are captured whole: more than `rows`, or after `timeout` as many as there are.
    std::size_t await_captured(std::size_t rows, std::chrono::duration<double> timeout) {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, timeout, [&] { return captured_ > rows || ended_; });
        return captured_;
    }

private:
    static constexpr std::chrono::milliseconds asked_every{20};

    void skip_captured() {
        while (captured_ < left_.size() && left_[captured_] == 0) ++captured_;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::uint64_t> left_;
    std::size_t offered_ = 0;
    std::size_t captured_ = 0;
    bool ended_ = false;
};

}  // namespace flowstone
