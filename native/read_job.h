// Reading into memory, with each chunk verified against its digest.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "aligned.h"
#include "job.h"
#include "read_plan.h"

namespace flowstone {

/// stop_at_bad    after the first bad chunk, start no new reads, and change no more memory
/// in_place       read straight into targets with the file's alignment, instead of through the arena
/// request_bytes  the longest window; 0: the engine's
/// ahead          the rows' targets are not known yet: read as much as the arena holds, verify, and wait for `aim`.
///                Needs stop_at_bad
/// lent           the thread that carries an op out has the bytes, and lends them: they are verified and stored there, and take
///                no block. But for rows that are coded or go to a device, and ahead
struct ReadOptions {
    bool stop_at_bad = true;
    bool in_place = true;
    std::uint64_t request_bytes = 0;
    bool ahead = false;
    bool lent = false;
};

/// Verified chunks for a device are queued to be copied there from their block: each run of them in one copy, or in as few as
/// the target's layout allows. Chunks in mapped memory are verified
/// there, and copied to their target without a block.
/// Targets stay alive until wait() has returned true; rows, files and arena are the job's.
/// The destructor cancels and waits.
///
/// A job that reads ahead ends when it has its targets and everything is stored, or when it fails or is cancelled.
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

    /// Of a job that reads ahead: the same rows with their targets, which may change from now on. Once. Any thread, which
    /// helps to store what has arrived. Throws std::invalid_argument if these are other rows, or the job has its targets.
    void aim(std::shared_ptr<const ReadExtents> rows);

    /// Indices of the digests that did not match so far, ascending.
    std::vector<std::uint64_t> bad_chunks() const;
    /// For each row.
    std::vector<bool> touched() const;
    std::uint64_t requested_bytes() const { return requested_bytes_.load(); }
    /// Bytes read straight into targets; the others are `copied_bytes`.
    std::uint64_t direct_bytes() const { return direct_bytes_.load(); }

private:
    struct Window;  // one on its way

    using Stage = void (ReadJob::*)(const std::shared_ptr<Window>& window, LiveAccess& live);
    friend struct Staged<ReadJob, Window>;

    void begin_all();
    void begin_windows();
    bool hold(const std::shared_ptr<Window>& window);
    void drop_held();
    void post(const std::shared_ptr<Window>& window, Stage stage) noexcept;
    bool is_mapped(const ReadWindow& planned) const;
    void begin_mapped(const ReadWindow& planned);
    bool is_lent() const;
    void deliver_lent(const std::shared_ptr<Window>& window, const std::byte* bytes);
    std::size_t blocks_of(const ReadWindow& planned) const;
    void begin(const ReadWindow& planned, std::vector<Block> blocks);
    void aim_direct(Window& window, std::vector<iovec>& parts);
    std::unique_ptr<Op> make_op(const std::shared_ptr<Window>& window, const OtherRange& range);
    std::byte* block_memory(const Window& window, std::uint64_t at) const;
    const std::byte* memory(const Window& window, std::uint64_t at) const;
    void end_op(const std::shared_ptr<Window>& window, const Outcome& outcome);
    void deliver(const std::shared_ptr<Window>& window, LiveAccess& live);
    /// `live` is null only where nothing is encoded.
    void deliver_now(const std::shared_ptr<Window>& window, LiveAccess* live);
    void verify(const std::shared_ptr<Window>& window);
    bool check_all(const Window& window, const WantedChunk& chunk);
    void expect_stored(const std::shared_ptr<Window>& window);
    void stored(const std::shared_ptr<Window>& window);
    void abandon(const std::shared_ptr<Window>& window);
    const std::byte* arrived(const Window& window, const WantedChunk& chunk) const;
    const std::byte* arrived(const Window& window, const ChunkPlace& place, std::uint64_t at) const;
    void copy_edges(const Window& window);
    /// Index of the digest of the chunk, and of the first that is stored for it.
    std::uint64_t digest_of(const WantedChunk& chunk) const;
    std::uint64_t stored_of(const WantedChunk& chunk) const;
    std::uint8_t codec_of(const WantedChunk& chunk) const;
    bool check(std::uint64_t digest, const std::byte* bytes, std::uint32_t length);
    void report_bad(std::uint64_t digest);
    /// Into its target where that is one run of bytes on the host, else into a buffer of `live` and from there.
    bool decode(Window& window, const WantedChunk& chunk, const std::byte* bytes, LiveAccess& live);
    /// A cast chunk: from what it follows from, into a buffer, and from there once its digest matches.
    bool compute(Window& window, const WantedChunk& chunk, LiveAccess& live);
    /// What is stored as chunk number `stored`, with its base if it has one. False: something is not what was written.
    bool decode_any(const Window& window, std::uint64_t stored, const ChunkMemory& memory, const std::byte* bytes, std::byte* data,
                    std::size_t data_bytes, LiveAccess& live) const;
    /// From a buffer to the target, whatever that is.
    void place(Window& window, const WantedChunk& chunk, std::uint32_t data_bytes, const std::byte* data);
    void store(Window& window, const WantedChunk& chunk, const std::byte* bytes);
    void send(const Window& window, const WantedChunk& chunk, const std::byte* bytes);
    /// Put what is verified for a device into its batch.
    void batch_run(Window& window);
    void end(const std::shared_ptr<Window>& window);

    const std::shared_ptr<const ReadExtents> rows_;
    const ReadOptions options_;
    ReadPlan plan_;  // the coordinator makes it before it begins the first window
    std::vector<std::atomic<bool>> touched_;
    std::atomic<std::uint64_t> requested_bytes_{0};
    std::atomic<std::uint64_t> direct_bytes_{0};
    std::atomic<bool> damaged_{false};
    mutable std::mutex bad_mutex_;
    std::set<std::uint64_t> bad_;
    std::shared_ptr<const ReadExtents> aimed_;         // under held_mutex_
    std::atomic<const ReadExtents*> targets_{nullptr};  // rows_, or aimed_; null: not known yet
    std::mutex held_mutex_;
    std::vector<std::shared_ptr<Window>> held_;  // verified, until the targets are known; under held_mutex_
    std::jthread coordinator_;  // last: it uses all of the above
};

}  // namespace flowstone
