// A window of a write in progress, and the data that the parts of a write share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "codec/derived.h"
#include "codec/encode.h"
#include "io/job.h"
#include "io/write_options.h"
#include "io/write_plan.h"
#include "watch/mutation_detector.h"

namespace flowstone {

/// A window with its arena block. One stage at a time owns it.
struct WriteInFlight final : WindowTask<WriteInFlight> {
    WriteWindow planned{};
    Block block;
    bool in_place = false;      // captured into the mapped file: it has no block
    int memory_slot = -1;       // of the block
    std::byte* rest = nullptr;  // see fetch_run; null: no bytes were fetched
    struct GatheredRun {
        std::byte* out;
        const std::byte* source;
        std::uint64_t bytes;
    };
    std::vector<GatheredRun> gathered;                // by a device: copied once in host memory
    std::vector<std::unique_ptr<CopyBatch>> batches;  // into the block, one for each device, until they are submitted
    std::atomic<std::size_t> queueing{0};  // devices that have not queued its copies yet
    std::atomic<std::size_t> fetching{0};  // devices that still copy
    std::vector<std::unique_ptr<Op>> ops;  // until they are submitted
    std::atomic<std::size_t> ops_left{0};
    std::int64_t submitted_ns = 0;
    std::uint64_t bytes = 0;  // length of all ops
    bool queued = false;
    bool released = false;
};

using WriteWindowPtr = std::shared_ptr<WriteInFlight>;

/// The shared data of all parts of a write. Its constant part is complete before the first window begins.
struct WriteShared {
    WriteShared(JobCore& core, std::shared_ptr<const WriteExtents> rows, const WriteOptions& options,
                std::shared_ptr<MutationDetector> detector);

    JobCore& core;
    const std::shared_ptr<const WriteExtents> rows;
    const WriteOptions options;
    std::vector<std::uint64_t> digests;
    const std::shared_ptr<MutationDetector> detector;
    std::optional<DerivedChunks> derived;  // none: no row is derived
    std::optional<Appender> appender;  // none: chunks keep their planned places
    /// For each device, whether the work before its first copy is done: bytes are gathered, digests computed.
    std::vector<std::atomic<bool>> devices_reached;

    const DerivedChunks* derived_chunks() const { return derived ? &*derived : nullptr; }
    /// The written parts of a window, one request each. An appended window, or one of a mapped file, is one part.
    std::vector<WriteRun> runs_of(const WriteWindow& window) const;
    /// Fail if a lazy source has changed.
    void check_sources() const;
};

/// Begins windows, and ends each in any case; counts windows that read sources, lazy windows, and all windows.
class WindowTracker {
public:
    explicit WindowTracker(const WriteShared& shared) : shared_(shared) {}

    void begin(const WriteInFlight& window);
    /// Record that the window reads no more from the host, and queues no more copies from devices.
    void mark_queued(WriteInFlight& window);
    /// Record that the window reads no source any more.
    void release_sources(WriteInFlight& window);
    /// End the window. Call it last: the job may be destroyed by it.
    void end(const WriteWindowPtr& window);
    /// End the window after a stage ran out of memory, before it began an op.
    void abandon(const WriteWindowPtr& window);

    /// The number of lazy windows that have begun and not ended.
    std::uint32_t lazy_windows() const { return lazy_windows_.load(); }

private:
    const WriteShared& shared_;
    std::atomic<std::uint32_t> lazy_windows_{0};
};

}  // namespace flowstone
