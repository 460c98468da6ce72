// A backend whose ops the engine's caller carries out, for files that have no descriptor.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend.h"

namespace flowstone {

/// Ops wait until a thread of the caller takes them; they end when the caller says so. `File::fd` is whatever number the
/// caller gave the file. Any thread.
///
/// A thread of the caller has to take ops for as long as jobs run: an op of a job that stops is dropped by the next `take`
/// that looks for its kind.
class CallerBackend final : public Backend {
public:
    /// The memory is the op's: it stays valid until the op is completed. None, of a read: the caller lends its own.
    struct Taken {
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
    /// How often a job has stopped or finished. Read it before asking whether a job has, and give it to `take` afterwards:
    /// so none is missed in between.
    std::uint64_t wakes() const;

    /// At most `count` ops of that direction, of files numbered [first, last), in order of submission. Blocks until there
    /// is one, or `wakes` is no longer `since`, for `timeout_s` at most.
    std::vector<Taken> take(Direction direction, int first, int last, std::size_t count, double timeout_s,
                            std::optional<std::uint64_t> since = std::nullopt);

    /// How a taken op has ended: `error` is an errno or 0, `moved_bytes` how many of its first bytes are there; of an op
    /// without memory at `lent`, which is used until this returns, and means nothing for others. Throws
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
