// A backend for files without a descriptor: the engine's caller carries out its ops.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/backend.h"

namespace flowstone {

/// Ops wait until a thread of the caller takes them, and end when the caller calls `complete`. `File::fd` is any number
/// chosen by the caller. Any thread.
///
/// A thread of the caller must take ops as long as jobs run: the next matching `take` drops an op of a stopped job.
class CallerBackend final : public Backend {
public:
    /// The op's memory stays valid until the op is completed. A read without memory: the caller passes its own.
    struct Request {
        std::uint64_t number;
        int file;
        std::uint64_t offset;
        iovec memory;
        std::uint64_t needed_bytes;
    };

    ~CallerBackend() override;
    void submit(std::unique_ptr<Op> op) override;
    const char* name() const override { return "caller"; }

    void wake() override;
    /// How often a job has stopped or finished. Read it before checking whether a job has ended, and pass it to `take`
    /// afterwards, so that no end is missed in between.
    std::uint64_t wakes() const;

    /// Take at most `count` ops of that direction, of files numbered [first, last), in order of submission. Blocks, at
    /// most `timeout_s`, until there is one, or `wakes` differs from `since`.
    std::vector<Request> take(Direction direction, int first, int last, std::size_t count, double timeout_s,
                              std::optional<std::uint64_t> since = std::nullopt);

    /// Report the end of a taken op: `error` is an errno or 0, `moved_bytes` the number of its first bytes that were
    /// moved. For an op without memory, they are at `lent` until this returns; otherwise `lent` is ignored. Throws
    /// std::invalid_argument for an op that was not taken.
    void complete(std::uint64_t number, std::uint64_t moved_bytes, int error, const std::byte* lent = nullptr);

private:
    mutable std::mutex mutex_;
    std::condition_variable submitted_;  // or woken
    std::uint64_t wakes_ = 0;
    std::deque<std::unique_ptr<Op>> waiting_;
    std::map<std::uint64_t, std::unique_ptr<Op>> taken_;
    std::uint64_t next_number_ = 0;
};

}  // namespace flowstone
