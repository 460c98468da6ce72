// Reading into memory, with each chunk verified against its digest.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "io/job.h"
#include "io/read_deliver.h"
#include "io/read_plan.h"
#include "io/read_verify.h"
#include "io/read_window.h"

namespace flowstone {

/// The job begins windows and makes their requests; ChunkVerifier verifies and WindowDelivery stores their chunks.
///
/// Verified chunks for a device are copied there from their block: each run of them in one copy, or in as few as the
/// target's layout allows. Chunks in mapped files are verified there, and copied to their target without a block.
/// Targets must stay alive until wait() has returned true; the job owns rows, files and arena. The destructor cancels
/// and waits.
///
/// A job that reads ahead ends when it has its targets and all chunks are stored, or when it fails or is cancelled.
///
/// Invariant: a chunk that went through the arena reaches its target only after its digest matched;
/// a row's touched flag is set before the first byte of its target can change.
class ReadJob final : public Job {
public:
    /// Starts at once. `rows` have passed check_extents; the arena's blocks hold a request. Rows of null files are left
    /// out.
    ReadJob(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
            std::shared_ptr<const ReadExtents> rows, const ReadOptions& options);
    ~ReadJob();

    /// Set the targets of a job that reads ahead: the same rows with their targets, which may change from now on. Call
    /// it once. Any thread; it helps to store chunks that were read. Throws std::invalid_argument if the rows differ,
    /// or the job has its targets.
    void aim(std::shared_ptr<const ReadExtents> rows);

    /// Indices of the digests that did not match so far, ascending.
    std::vector<std::uint64_t> bad_chunks() const { return verifier_.bad_chunks(); }
    /// For each row.
    std::vector<bool> touched() const;
    std::uint64_t requested_bytes() const { return shared_.requested_bytes.load(); }
    /// Bytes read directly into targets; all other bytes are `copied_bytes`.
    std::uint64_t direct_bytes() const { return shared_.direct_bytes.load(); }

private:
    friend struct WindowTask<ReadInFlight>;

    void begin_all();
    void begin_windows();
    bool hold(const ReadWindowPtr& window);
    void drop_held();
    bool is_mapped(const ReadWindow& planned) const;
    void begin_mapped(const ReadWindow& planned);
    bool is_lent() const;
    std::size_t blocks_of(const ReadWindow& planned) const;
    void begin(const ReadWindow& planned, std::vector<Block> blocks);
    void aim_direct(ReadInFlight& window, std::vector<iovec>& parts);
    std::unique_ptr<Op> make_op(const ReadWindowPtr& window, const OtherRange& range);
    void end_op(const ReadWindowPtr& window, const Outcome& outcome);
    void verify(const ReadWindowPtr& window);
    void deliver(const ReadWindowPtr& window, LiveAccess& live);
    void deliver_lent(const ReadWindowPtr& window, const std::byte* bytes);
    void abandon(const ReadWindowPtr& window);

    ReadShared shared_;
    ChunkVerifier verifier_;
    WindowDelivery delivery_;
    std::shared_ptr<const ReadExtents> aimed_;          // under held_mutex_
    std::atomic<const ReadExtents*> targets_{nullptr};  // the job's rows, or aimed_; null: not known yet
    std::mutex held_mutex_;
    std::vector<ReadWindowPtr> held_;  // verified, until the targets are known; under held_mutex_
    std::jthread coordinator_;         // last: it uses all of the above
};

}  // namespace flowstone
