// Writing to files.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "encode.h"
#include "job.h"
#include "mutation_detector.h"
#include "write_plan.h"

namespace flowstone {

/// gap_bytes  untouched blocks between two rows, up to this length, are written as zero; longer runs are skipped
/// blocks     how many arena blocks lazy windows may use at once, until `expedite`; at least one
/// bytes_per_s  how fast lazy windows may begin, until `expedite`; 0 is no limit
/// cap_bytes_per_s  how fast any window may begin, also while a thread waits; 0 is no limit
/// watching  how lazy sources are watched for changes
/// files_ready  false: nothing is written before the call of `files_ready`
struct WriteOptions {
    std::uint64_t gap_bytes = 0;
    std::uint32_t blocks = UINT32_MAX;
    std::uint64_t bytes_per_s = 0;
    std::uint64_t cap_bytes_per_s = 0;
    Watching watching = Watching::samples;
    bool files_ready = true;
};

/// Sources stay alive and unchanged until captured; rows, files and arena are the job's.
/// The destructor cancels and waits.
///
/// Windows with a row that is not lazy come first, as fast as possible. The others follow within the limits of
/// `options`, until a thread waits for them. Rows on a device are queued to be copied into a block, and continue like
/// others once they are there. A lazy source that changed before it was captured is a fault ("capture", with the place
/// in the file), never a silent mixture; so is memory that is gone (EFAULT).
///
/// A window is captured into a block, encoded, digested and submitted. With an encoder other than identity, it holds
/// whole chunks, and gets its place in the file once their lengths are known.
///
/// Windows of derived rows begin once all that they follow from is captured: a few windows later. A window of which devices have
/// digested every chunk as it has to be then is not captured at all: it is not copied, and takes no block.
///
/// Capture does not need the files: until they are ready, windows are captured while the arena has room, and their ops
/// wait.
///
/// A file that is mapped, and ready, is its own block: its windows are captured, and digested, where they stay, without a
/// request. So are not those with rows on a device, or of an encoder. Bytes of such a file that no window covers become
/// zero: its memory may have been another file's.
class WriteJob final : public Job {
public:
    /// Starts at once. `rows` have passed check_extents; the arena's blocks hold a request.
    /// `sizes`: of the files. `detector`: of these rows, if they are watched already; null: they are from now on.
    WriteJob(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
             std::vector<std::uint64_t> sizes, std::shared_ptr<const WriteExtents> rows, const WriteOptions& options,
             std::shared_ptr<MutationDetector> detector = nullptr);
    ~WriteJob();

    /// Whether no early source on the host will be read any more, and those on devices are queued or gathered, after at most
    /// `timeout_s`.
    bool wait_early(double timeout_s) { return wait_until_early(timeout_s); }
    /// Captured windows may be written from now on. Does not block; any thread.
    void files_ready();
    /// Capture as fast as memory and device allow from now on, because a thread waits. Does not block; any thread.
    void expedite();
    /// Whether no source on the host will be read any more, and all on devices are queued, after at most `timeout_s`.
    /// Work that a device does after its present queue may then change them.
    bool wait_queued(double timeout_s) { return wait_until_queued(timeout_s); }
    /// Whether no source will be read any more, after at most `timeout_s`.
    bool wait_captured(double timeout_s) { return wait_until_captured(timeout_s); }

    /// Complete once wait() has returned true without fault and the job was not cancelled.
    const std::vector<std::uint64_t>& digests() const { return digests_; }
    /// How each chunk is stored; complete when the digests are.
    std::vector<StoredChunk> stored() const { return appender_ ? appender_->stored() : planned_chunks(*rows_); }
    /// The end of each file, if an encoder decided it; empty: as planned.
    std::vector<std::uint64_t> file_ends() const { return appender_ ? appender_->file_ends() : std::vector<std::uint64_t>(); }
    /// The windows in the order in which they begin. Pure; any time.
    std::vector<WriteWindow> windows() const;
    /// Where the first chunk begins that is not in the file `fd` as it was to be written into file number `file`; blocks. Once
    /// complete.
    std::optional<std::uint64_t> first_bad(std::uint32_t file, int fd) const;
    /// How lazy sources are watched.
    const MutationDetector& detector() const { return *detector_; }

private:
    struct Window;  // one window under way
    class Pace;     // at which lazy windows begin

    using Stage = void (WriteJob::*)(const std::shared_ptr<Window>& window, LiveAccess& live);
    friend struct Staged<WriteJob, Window>;

    void begin_all(const std::vector<WriteWindow>& windows);
    void await_sources(const WriteWindow& window);
    bool follows(const WriteWindow& window);
    bool await_digests(const WriteWindow& window);
    void await_device(std::size_t number);
    bool is_in_place(const WriteWindow& planned);
    void wait_for_files();
    std::optional<Block> acquire_block(bool lazy);
    void begin_in_place(const WriteWindow& planned);
    void begin(const WriteWindow& planned, Block block);
    void begin_captured(const std::shared_ptr<Window>& window);
    void clear_gaps(const std::vector<WriteWindow>& windows);
    std::byte* image(const Window& window) const;
    void fetch(const std::shared_ptr<Window>& window, LiveAccess& live);
    void expect_fetched(const std::shared_ptr<Window>& window);
    void list_copies(Window& window, LiveAccess& live);
    void submit_copies(const std::shared_ptr<Window>& window);
    void copies_queued(const std::shared_ptr<Window>& window);
    void arrived(const std::shared_ptr<Window>& window);
    void post(const std::shared_ptr<Window>& window, Stage stage) noexcept;
    void capture(const std::shared_ptr<Window>& window, LiveAccess& live);
    std::vector<WriteRun> runs_of(const WriteWindow& window) const;
    void tell_captured(const WriteRun& run);
    std::unique_ptr<Op> make_op(const std::shared_ptr<Window>& window, std::uint64_t offset, iovec part);
    void add_ops(std::vector<std::unique_ptr<Op>>& ops, const std::shared_ptr<Window>& window, std::uint64_t offset, iovec part);
    void submit(const std::shared_ptr<Window>& window, std::vector<std::unique_ptr<Op>> ops);
    void hand_over(const std::shared_ptr<Window>& window);
    void begin_held(const std::shared_ptr<Window>& window, LiveAccess&) { hand_over(window); }
    void hand_over_held();
    void await_files();
    void end_op(const std::shared_ptr<Window>& window, std::uint64_t bytes, const Outcome& outcome);
    void take_change();
    void queue(Window& window);
    void release(Window& window);
    void abandon(const std::shared_ptr<Window>& window);
    std::uint64_t window_bytes() const;
    void end(const std::shared_ptr<Window>& window);

    const std::vector<std::uint64_t> sizes_;
    const std::shared_ptr<const WriteExtents> rows_;
    const WriteOptions options_;
    std::vector<std::uint64_t> digests_;
    const std::shared_ptr<MutationDetector> detector_;
    std::optional<DerivedChunks> derived_;  // none: no row is derived
    std::optional<Appender> appender_;  // none: chunks keep their planned places
    std::atomic<bool> expedite_{false};
    std::atomic<std::uint32_t> lazy_under_way_{0};
    std::vector<std::atomic<bool>> reached_;  // of each device, whether what its first copy follows is there: gathered bytes, and digests
    std::atomic<bool> files_ready_;
    std::mutex held_mutex_;
    std::vector<std::shared_ptr<Window>> held_;  // captured before the files were ready
    std::jthread coordinator_;  // last: it uses all of the above
};

}  // namespace flowstone
