// Sources that become available one after the other while a job writes them.
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

/// Records which rows of a write have their bytes, and which the job no longer needs. So memory can be reused: the
/// caller offers rows in order, and reuses their memory once they are captured. Has a lock; any thread.
class SourceSupply {
public:
    /// `row_bytes`: length of each row.
    explicit SourceSupply(std::vector<std::uint64_t> row_bytes) : left_(std::move(row_bytes)) { skip_captured(); }

    /// The first `rows` rows have their bytes; the number never decreases.
    void offer(std::size_t rows) {
        const std::lock_guard lock(mutex_);
        offered_ = rows;
        changed_.notify_all();
    }
    /// Wait until the first `rows` rows are offered, or `stopping()` is true, which is polled.
    void await(std::size_t rows, const std::function<bool()>& stopping) {
        std::unique_lock lock(mutex_);
        while (offered_ < rows && !stopping()) changed_.wait_for(lock, asked_every);
    }
    /// Record that `bytes` of the row were captured.
    void captured(std::size_t row, std::uint64_t bytes) {
        const std::lock_guard lock(mutex_);
        left_[row] -= bytes;
        skip_captured();
        changed_.notify_all();
    }
    /// Record that the job has ended early: no more bytes are captured.
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
    /// Wait, at most `timeout`, until more than `rows` of the first rows are captured completely. Returns how many are.
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
