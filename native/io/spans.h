// Spans of a job's threads: phase, time and bytes; always recorded, for traces.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace flowstone {

/// capture  a window is copied into its block and digested
/// encode   its chunks are encoded, unless the encoder is the identity, and digested again
/// write    the backend has its requests
/// read     the backend has its requests
/// deliver  its chunks are verified and scattered to their targets
enum class Phase : std::uint8_t { capture, encode, write, read, deliver };
inline constexpr std::size_t phases = 5;

struct PhaseSpan {
    std::int64_t begin_ns = 0;  // of the monotonic clock
    std::int64_t end_ns = 0;
    std::uint64_t bytes = 0;
    std::uint32_t thread = 0;  // thread id
    Phase phase = Phase::capture;
};

inline std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

/// The spans of one job. A span costs two readings of the clock, about 50 ns; windows have megabytes.
class Spans {
public:
    /// Reserve memory for `count` spans, at most 65,536 of 40 bytes; further spans of a phase are merged into one. Call
    /// it before the first `add`. Throws std::bad_alloc.
    void expect(std::size_t count);
    /// Add a span of this thread that ends now. Any thread.
    void add(Phase phase, std::int64_t begin_ns, std::uint64_t bytes) noexcept;
    /// All spans. Call it once no thread adds any more.
    std::vector<PhaseSpan> all() const;

private:
    std::unique_ptr<PhaseSpan[]> room_;
    std::size_t size_ = 0;
    std::atomic<std::size_t> count_{0};  // also counts spans that were merged
    mutable std::mutex rest_mutex_;
    std::array<PhaseSpan, phases> rest_{};
};

}  // namespace flowstone
