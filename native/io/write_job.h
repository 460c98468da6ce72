// Writing to files.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "io/job.h"
#include "io/write_capture.h"
#include "io/write_derived.h"
#include "io/write_fetch.h"
#include "io/write_options.h"
#include "io/write_submit.h"
#include "io/write_window.h"

namespace flowstone {

/// Sources must stay alive and unchanged until captured; the job owns rows, files and arena. The destructor cancels and
/// waits.
///
/// The job itself is the coordinator: it begins windows. Each then goes through its stages: DeviceFetcher (windows with
/// rows on devices), WindowCapturer, WindowSubmitter.
///
/// Windows with a row that is not lazy are captured first, as fast as possible. Lazy windows follow within the limits
/// of `options`, until a thread waits for them. Rows on a device are first copied into a block. A lazy source that
/// changed before its capture is a fault ("capture", with the place in the file), never a silent mixture; so is memory
/// that was freed (EFAULT).
///
/// A window is captured into a block, encoded, digested and submitted. With an encoder other than identity, it has
/// complete chunks, and gets its place in the file once their lengths are known.
///
/// Windows of derived rows begin once all their sources are captured. If devices have digested every chunk of such a
/// window, and all digests match those made from the sources, the window is not captured: it is not copied, and takes
/// no block.
///
/// Capture does not need the files: until they are ready, windows are captured while the arena has room, and their ops
/// wait.
///
/// Windows of a mapped file that is ready are captured and digested in the mapping, without block and requests, unless
/// they have rows on a device or are encoded. Bytes of such a file that no window covers become zero, as its memory may
/// have been another file's.
class WriteJob final : public Job {
public:
    /// Starts at once. `rows` have passed check_extents; the arena's blocks hold a request.
    /// `sizes`: of the files. `detector`: the watch of these rows, if it has begun; null: it begins now.
    WriteJob(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
             std::vector<std::uint64_t> sizes, std::shared_ptr<const WriteExtents> rows, const WriteOptions& options,
             std::shared_ptr<MutationDetector> detector = nullptr);
    ~WriteJob();

    /// Wait, at most `timeout_s`, until no early source on the host will be read any more, and those on devices are
    /// queued or gathered. Returns whether that is so.
    bool wait_early(double timeout_s) { return core_.wait_until_early(timeout_s); }
    /// Captured windows may be written from now on. Does not block; any thread.
    void files_ready() { submitter_.mark_files_ready(); }
    /// Capture as fast as memory and device allow from now on, because a thread waits. Does not block; any thread.
    void expedite();
    /// Wait, at most `timeout_s`, until no source on the host will be read any more, and copies of all sources on
    /// devices are queued. Returns whether that is so. Work that is queued on a device later may then change them.
    bool wait_queued(double timeout_s) { return core_.wait_until_queued(timeout_s); }
    /// Wait, at most `timeout_s`, until no source will be read any more. Returns whether that is so.
    bool wait_captured(double timeout_s) { return core_.wait_until_captured(timeout_s); }

    /// Complete once wait() has returned true without fault and the job was not cancelled.
    const std::vector<std::uint64_t>& digests() const { return shared_.digests; }
    /// How each chunk is stored; complete when the digests are.
    std::vector<StoredChunk> stored() const {
        return shared_.appender ? shared_.appender->stored() : planned_chunks(*shared_.rows);
    }
    /// The end of each file, if an encoder decided it; empty: as planned.
    std::vector<std::uint64_t> file_ends() const {
        return shared_.appender ? shared_.appender->file_ends() : std::vector<std::uint64_t>();
    }
    /// The windows in the order in which they begin. Pure; any time.
    std::vector<WriteWindow> windows() const;
    /// Compare the file `fd` with the chunks of file number `file`. Returns the offset of the first chunk that differs.
    /// Blocks. Call it once the job is complete.
    std::optional<std::uint64_t> first_bad(std::uint32_t file, int fd) const;
    /// How lazy sources are watched.
    const MutationDetector& detector() const { return *shared_.detector; }

private:
    void begin_all(const std::vector<WriteWindow>& windows);
    bool is_in_place(const WriteWindow& planned);
    std::optional<Block> acquire_block(bool lazy);
    void begin(const WriteWindow& planned, Block block);
    void begin_in_place(const WriteWindow& planned);
    void clear_gaps(const std::vector<WriteWindow>& windows);
    std::uint64_t window_bytes() const;

    const std::vector<std::uint64_t> sizes_;
    std::atomic<bool> expedite_{false};
    WriteShared shared_;
    WindowTracker tracker_;
    WindowSubmitter submitter_;
    WindowCapturer capturer_;
    DeviceFetcher fetcher_;
    DerivedWindows derived_windows_;
    std::jthread coordinator_;  // last: it uses all of the above
};

}  // namespace flowstone
