// Combines the backends of several engines: each request goes to the backend of its file's path.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/backend.h"

namespace flowstone {

/// The bytes that a path has moved in one direction, and the time in which it had requests in flight.
struct PathTraffic {
    std::uint64_t bytes = 0;
    std::chrono::nanoseconds busy{};
};

/// Requests of a file go to the backend number `File::of_path`. Any thread.
///
/// If a write into a file that `may_move` fails, it is held back, and so are all later writes into the file, until the
/// caller sends them into another file (`move`), or lets them fail (`refuse`). Until then the job does not end.
class PathsBackend final : public Backend {
public:
    using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // begin, end

    explicit PathsBackend(std::vector<std::shared_ptr<Backend>> paths);
    ~PathsBackend() override;

    void submit(std::unique_ptr<Op> op) override;
    const char* name() const override { return "paths"; }
    void wake() override {
        for (const std::shared_ptr<Backend>& path : paths_) path->wake();
    }
    int register_memory(iovec memory) override;
    void unregister_memory(int slot) override;

    std::size_t paths() const { return paths_.size(); }
    PathTraffic traffic(std::size_t path, Direction direction) const;

    /// The fault of the first failed write, if writes into the file are held back.
    std::optional<Fault> failed(const std::shared_ptr<const File>& file) const;
    /// Send writes into `file`, including those held back, into `target`, which has at least its size.
    void move(const std::shared_ptr<const File>& file, std::shared_ptr<const File> target);
    /// Let held-back writes fail; later writes are no longer held back.
    void refuse(const std::shared_ptr<const File>& file);
    /// The ranges that were written into the file's target. Call it after the last write; it drops all records of the
    /// file.
    Ranges forget(const std::shared_ptr<const File>& file);

private:
    struct MovableFile {
        std::shared_ptr<const File> target;  // null: not decided, or refused
        bool is_refused = false;
        std::optional<Fault> fault;  // of the first write that was held back
        std::vector<std::unique_ptr<Op>> held;
        Ranges written;  // into the target
    };
    struct Traffic {
        PathTraffic moved;
        std::uint32_t under_way = 0;
        std::chrono::steady_clock::time_point since;
    };

    void pass(std::unique_ptr<Op> op, bool may_move);
    bool hold(const File* file, std::unique_ptr<Op>& op, const Fault& fault) noexcept;
    bool resubmit(std::unique_ptr<Op>& op, const std::shared_ptr<const File>& target) noexcept;
    void begin(std::uint32_t path, Direction direction);
    void end(std::uint32_t path, Direction direction, std::uint64_t bytes);
    Traffic& traffic_locked(std::size_t path, Direction direction) {
        return traffic_[2 * path + (direction == Direction::write)];
    }

    const std::vector<std::shared_ptr<Backend>> paths_;
    mutable std::mutex mutex_;
    std::vector<Traffic> traffic_;
    std::unordered_map<const File*, MovableFile> moved_;
    std::vector<std::vector<int>> slots_;  // registered memory: its slot on each path; empty: free
};

}  // namespace flowstone
