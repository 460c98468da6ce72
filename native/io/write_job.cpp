#include "io/write_job.h"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>

#include "bounds.h"
#include "io/thread_name.h"
#include "io/window_order.h"
#include "codec/xxh3.h"

namespace flowstone {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t spans_per_window = 3;  // capture, encode, write

/// Computes when the next lazy window is due at `bytes_per_s`; idle time does not count.
class Pace {
public:
    explicit Pace(std::uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}

    Clock::time_point due() const { return due_; }

    void began(std::uint64_t bytes) {
        if (bytes_per_s_ == 0) return;
        const std::chrono::duration<double> share(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
        due_ = std::max(due_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(share);
    }

private:
    const std::uint64_t bytes_per_s_;
    Clock::time_point due_{};
};

}  // namespace

WriteJob::WriteJob(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
                   std::vector<std::uint64_t> sizes, std::shared_ptr<const WriteExtents> rows,
                   const WriteOptions& options, std::shared_ptr<MutationDetector> detector)
    : Job(std::move(machine), std::move(arena), std::move(files)),
      sizes_(std::move(sizes)),
      shared_(core_, std::move(rows), options, std::move(detector)),
      tracker_(shared_),
      submitter_(shared_, tracker_),
      capturer_(shared_, tracker_, submitter_),
      fetcher_(shared_, tracker_, capturer_),
      derived_windows_(shared_) {
    coordinator_ = std::jthread([this] {
        name_this_thread("fs-write");
        core_.coordinate([this] {
            std::vector<WriteWindow> windows;
            try {
                windows = this->windows();
                begin_all(windows);
            } catch (const std::bad_alloc&) { core_.record_outcome(core_.no_memory()); }
            core_.mark_all_begun();
            submitter_.wait_for_files();
            submitter_.submit_held();
            clear_gaps(windows);  // may throw as well; then the job has failed
        });
        shared_.detector->release();
    });
}

std::vector<WriteWindow> WriteJob::windows() const {
    return ordered_windows(*shared_.rows, {window_bytes(), shared_.options.gap_bytes}, core_.files(),
                           shared_.derived_chunks());
}

std::optional<std::uint64_t> WriteJob::first_bad(std::uint32_t file, int fd) const {
    const std::vector<StoredChunk> chunks = stored();
    std::vector<std::byte> bytes(chunk_bytes);
    for (const WriteExtent& row : shared_.rows->rows) {
        if (row.file != file || row.chunk == no_digest) continue;
        const std::uint64_t last = row.chunk + (row.length + chunk_bytes - 1) / chunk_bytes;
        for (std::uint64_t number = row.chunk; number < last; ++number) {
            const StoredChunk& chunk = chunks[number];
            if (chunk.encoded.kind != ChunkEncoding::Kind::stored) continue;
            std::uint64_t got = 0;
            while (got < chunk.encoded.length) {
                const ssize_t now =
                    ::pread(fd, bytes.data() + got, chunk.encoded.length - got, static_cast<off_t>(chunk.offset + got));
                if (now <= 0 && errno != EINTR) break;
                if (now > 0) got += static_cast<std::uint64_t>(now);
            }
            if (got < chunk.encoded.length || xxh3_64(bytes.data(), got) != shared_.digests[number])
                return chunk.offset;
        }
    }
    return std::nullopt;
}

WriteJob::~WriteJob() {
    cancel();
    coordinator_.join();
}

void WriteJob::expedite() {
    expedite_ = true;
    core_.arena().wake();
}

/// The coordinator: begins each window in order, once it is due and has a block.
void WriteJob::begin_all(const std::vector<WriteWindow>& windows) {
    // Do not register files that are not ready, as they may still change; registering only saves 0.1 us of a request's
    // 4 ms.
    core_.register_files(shared_.options.files_ready);
    core_.arena().use(shared_.rows->devices);
    Pace pace(shared_.options.bytes_per_s);
    Pace cap(shared_.options.cap_bytes_per_s);
    core_.expect_early(static_cast<std::size_t>(
        std::count_if(windows.begin(), windows.end(), [](const WriteWindow& w) { return w.early; })));
    core_.spans.expect(spans_per_window * windows.size());
    // Enough to keep the workers busy: a window in place takes no memory that would limit them.
    const auto in_place_max = static_cast<std::uint32_t>(2 * core_.machine().workers->count());
    for (const WriteWindow& window : windows) {
        if (window.derived) {
            derived_windows_.wait_for_sources(window);
            if (derived_windows_.leave_out(window)) continue;
        }
        if (shared_.rows->supply) shared_.rows->supply->await(window.last_row, [this] { return core_.stopping(); });
        if (window.lazy) core_.arena().wait(pace.due(), [this] { return expedite_ || core_.stopping(); });
        core_.arena().wait(cap.due(), [this] { return core_.stopping(); });
        const bool in_place = is_in_place(window);
        std::optional<Block> block;
        if (in_place)
            core_.wait_for_room(in_place_max);
        else
            block = acquire_block(window.lazy);
        if (core_.stopping()) break;
        pace.began(window.end - window.begin);
        cap.began(window.end - window.begin);
        if (in_place) {
            begin_in_place(window);
            continue;
        }
        assert(block);  // the arena stays open while the job uses it
        begin(window, std::move(*block));
    }
    if (core_.stopping()) shared_.detector->release();  // also for windows that never began
    if (core_.stopping() && shared_.rows->supply) shared_.rows->supply->end();
}

/// The file's memory is written like a block, so it must be allocated: if the system cannot provide a page, it kills
/// the process. Lazy windows wait for the allocation, as blocks for them would also be new memory, and need a second
/// copy.
bool WriteJob::is_in_place(const WriteWindow& planned) {
    if (core_.file(planned.file).mapped == 0 || planned.appended || needs_fetch(*shared_.rows, planned)) return false;
    if (planned.lazy) submitter_.wait_for_files();
    return submitter_.are_files_ready();
}

/// Wait for a free block that the next window may take; nullopt when the job stops.
std::optional<Block> WriteJob::acquire_block(bool lazy) {
    // The caller decides how far the arena grows; but without any block the job could not proceed.
    if (core_.arena().touched_bytes() == 0) core_.arena().grow(2 * core_.arena().block_bytes());
    const std::uint32_t blocks = std::max(shared_.options.blocks, 1U);
    return core_.arena().acquire([&] { return !lazy || expedite_ || tracker_.lazy_windows() < blocks; },
                                 [this] { return core_.stopping(); });
}

void WriteJob::begin(const WriteWindow& planned, Block block) {
    const auto window = std::make_shared<WriteInFlight>();
    window->planned = planned;
    window->memory_slot = core_.registrations().block(block, core_.arena().block_bytes());
    window->block = std::move(block);
    tracker_.begin(*window);
    if (needs_fetch(*shared_.rows, planned))
        fetcher_.post(window);
    else
        capturer_.post(window);
}

void WriteJob::begin_in_place(const WriteWindow& planned) {
    const auto window = std::make_shared<WriteInFlight>();
    window->planned = planned;
    window->in_place = true;
    tracker_.begin(*window);
    capturer_.post(window);
}

/// Windows with rows on a device are as long as a block: each needs one event, and fewer, longer copies keep the bus
/// busy.
std::uint64_t WriteJob::window_bytes() const {
    return shared_.rows->devices.empty() ? core_.machine().request_bytes : core_.arena().block_bytes();
}

/// Clear the bytes that no window covers, in mapped files in which chunks keep their places.
void WriteJob::clear_gaps(const std::vector<WriteWindow>& windows) {
    std::vector<std::uint64_t> cleared(core_.files().size(), 0);
    const auto clear = [&](std::uint32_t file, std::uint64_t end) {
        if (core_.file(file).mapped != 0 && cleared[file] < end)
            std::memset(reinterpret_cast<std::byte*>(core_.file(file).mapped) + cleared[file], 0, end - cleared[file]);
    };
    std::vector<WriteWindow> ordered;
    std::copy_if(windows.begin(), windows.end(), std::back_inserter(ordered),
                 [](const WriteWindow& window) { return !window.appended; });
    std::sort(ordered.begin(), ordered.end(), [](const WriteWindow& a, const WriteWindow& b) {
        return std::tie(a.file, a.begin) < std::tie(b.file, b.begin);
    });
    for (const WriteWindow& window : ordered) {
        if (core_.stopping()) return;
        clear(window.file, window.begin);
        cleared[window.file] = window.end;
    }
    // The end of an encoded file is where the last encoded chunk ends.
    const std::size_t kept = shared_.rows->keeps_places()
        ? core_.files().size()
        : std::min<std::size_t>(shared_.rows->encoded_from, core_.files().size());
    for (std::uint32_t file = 0; file < kept && !core_.stopping(); ++file) clear(file, sizes_[file]);
}

}  // namespace flowstone
