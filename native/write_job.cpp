#include "write_job.h"

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
#include "thread_name.h"
#include "window_order.h"
#include "xxh3.h"

namespace flowstone {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t spans_per_window = 3;  // capture, encode, write

}  // namespace

/// A block of the arena, and the data written from it.
struct WriteJob::Window final : Staged<WriteJob, Window> {
    WriteWindow planned{};
    Block block;
    bool in_place = false;                 // captured into the mapped file: it has no block
    int memory_slot = -1;                  // of the block
    std::byte* rest = nullptr;             // of the fetched bytes: see fetch_run; null: none were fetched
    struct Late {
        std::byte* out;
        const std::byte* source;
        std::uint64_t bytes;
    };
    std::vector<Late> gathered;            // of rows that a device gathers: copied once they are there
    std::vector<std::unique_ptr<CopyBatch>> batches;  // into the block, one for each device, until they are submitted
    std::atomic<std::size_t> queueing{0};  // devices
    std::atomic<std::size_t> fetching{0};  // devices
    std::vector<std::unique_ptr<Op>> ops;  // until they are submitted
    std::atomic<std::size_t> ops_left{0};
    std::int64_t handed_over_ns = 0;
    std::uint64_t bytes = 0;               // of all ops
    bool queued = false;                   // one stage at a time
    bool released = false;
};

/// When the next lazy window is due at `bytes_per_s`; idle time is not made up for.
class WriteJob::Pace {
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

WriteJob::WriteJob(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
                   std::vector<std::uint64_t> sizes, std::shared_ptr<const WriteExtents> rows, const WriteOptions& options,
                   std::shared_ptr<MutationDetector> detector)
    : Job(std::move(machine), std::move(arena), std::move(files)),
      sizes_(std::move(sizes)),
      rows_(std::move(rows)),
      options_(options),
      digests_(rows_->chunks, 0),
      detector_(detector ? std::move(detector) : std::make_shared<MutationDetector>(*rows_, options_.watching)),
      reached_(rows_->devices.size()),
      files_ready_(options_.files_ready) {
    const auto is_derived = [](const WriteExtent& row) { return row.derivation != Derivation::none; };
    if (std::any_of(rows_->rows.begin(), rows_->rows.end(), is_derived)) derived_.emplace(*rows_);
    if (!rows_->keeps_places()) appender_.emplace(*rows_, files_.size(), derived_ ? &*derived_ : nullptr);
    coordinator_ = std::jthread([this] {
        name_this_thread("fs-write");
        coordinate([this] {
            std::vector<WriteWindow> windows;
            try {
                windows = this->windows();
                begin_all(windows);
            } catch (const std::bad_alloc&) {
                take_outcome(no_memory());
            }
            end_feeding();
            await_files();
            clear_gaps(windows);  // may throw as well; then the job has failed
        });
        detector_->let_go();
    });
}

std::vector<WriteWindow> WriteJob::windows() const {
    return ordered_windows(*rows_, {window_bytes(), options_.gap_bytes}, files_, derived_ ? &*derived_ : nullptr);
}

std::optional<std::uint64_t> WriteJob::first_bad(std::uint32_t file, int fd) const {
    const std::vector<StoredChunk> chunks = stored();
    std::vector<std::byte> bytes(chunk_bytes);
    for (const WriteExtent& row : rows_->rows) {
        if (row.file != file || row.chunk == no_digest) continue;
        const std::uint64_t last = row.chunk + (row.length + chunk_bytes - 1) / chunk_bytes;
        for (std::uint64_t number = row.chunk; number < last; ++number) {
            const StoredChunk& chunk = chunks[number];
            if (chunk.encoded.kind != Encoded::Kind::stored) continue;
            std::uint64_t got = 0;
            while (got < chunk.encoded.length) {
                const ssize_t now = ::pread(fd, bytes.data() + got, chunk.encoded.length - got, static_cast<off_t>(chunk.offset + got));
                if (now <= 0 && errno != EINTR) break;
                if (now > 0) got += static_cast<std::uint64_t>(now);
            }
            if (got < chunk.encoded.length || xxh3_64(bytes.data(), got) != digests_[number]) return chunk.offset;
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
    arena_->wake();
}

void WriteJob::files_ready() {
    files_ready_ = true;
    hand_over_held();
    arena_->wake();
}

/// The coordinator: begins each window in order, once it is due and has a block.
void WriteJob::begin_all(const std::vector<WriteWindow>& windows) {
    // Files that are not ready may still change under a registered number; registering saves 0.1 us of a request's 4
    // ms.
    register_files(options_.files_ready);
    arena_->use(rows_->devices);
    Pace pace(options_.bytes_per_s);
    Pace cap(options_.cap_bytes_per_s);
    expect_early(static_cast<std::size_t>(std::count_if(windows.begin(), windows.end(), [](const WriteWindow& w) { return w.early; })));
    spans_.expect(spans_per_window * windows.size());
    // Enough to keep the workers busy: a window in place takes no memory that would limit them.
    const auto in_place_max = static_cast<std::uint32_t>(2 * machine_.workers->count());
    for (const WriteWindow& window : windows) {
        if (window.derived) {
            await_sources(window);
            if (follows(window)) continue;
        }
        if (rows_->feed) rows_->feed->await(window.last_row, [this] { return stopping(); });
        if (window.lazy) arena_->wait(pace.due(), [this] { return expedite_ || stopping(); });
        arena_->wait(cap.due(), [this] { return stopping(); });
        const bool in_place = is_in_place(window);
        std::optional<Block> block;
        if (in_place)
            wait_for_room(in_place_max);
        else
            block = acquire_block(window.lazy);
        if (stopping()) break;
        pace.began(window.end - window.begin);
        cap.began(window.end - window.begin);
        if (in_place) {
            begin_in_place(window);
            continue;
        }
        assert(block);  // the arena stays open while the job uses it
        begin(window, std::move(*block));
    }
    if (stopping()) detector_->let_go();  // also of windows that never began
    if (stopping() && rows_->feed) rows_->feed->end();
}

/// The file's memory is written like a block, so it has to be there: a page that the system cannot give kills the process.
/// Windows that no caller waits for yet wait for it: blocks for them would be new memory as well, and a second copy.
bool WriteJob::is_in_place(const WriteWindow& planned) {
    if (files_[planned.file]->mapped == 0 || planned.appended || needs_fetch(*rows_, planned)) return false;
    if (planned.lazy) wait_for_files();
    return files_ready_;
}

/// A block for the next window, once one is free and the window may take it; none when the job stops.
std::optional<Block> WriteJob::acquire_block(bool lazy) {
    // The caller decides how far the arena grows; but without any block nothing would ever move.
    if (arena_->touched_bytes() == 0) arena_->grow(2 * arena_->block_bytes());
    const std::uint32_t blocks = std::max(options_.blocks, 1U);
    return arena_->acquire([&] { return !lazy || expedite_ || lazy_under_way_ < blocks; }, [this] { return stopping(); });
}

void WriteJob::begin(const WriteWindow& planned, Block block) {
    const auto window = std::make_shared<Window>();
    window->planned = planned;
    window->memory_slot = registered().block(block, arena_->block_bytes());
    window->block = std::move(block);
    begin_captured(window);
}

void WriteJob::begin_in_place(const WriteWindow& planned) {
    const auto window = std::make_shared<Window>();
    window->planned = planned;
    window->in_place = true;
    begin_captured(window);
}

void WriteJob::begin_captured(const std::shared_ptr<Window>& window) {
    if (window->planned.lazy) ++lazy_under_way_;
    begin_window(true);
    post(window, needs_fetch(*rows_, window->planned) ? &WriteJob::fetch : &WriteJob::capture);
}

/// Where the window's bytes are captured.
std::byte* WriteJob::image(const Window& window) const {
    if (!window.in_place) return window.block.bytes();
    return reinterpret_cast<std::byte*>(files_[window.planned.file]->mapped + window.planned.begin);
}

void WriteJob::post(const std::shared_ptr<Window>& window, Stage stage) noexcept {
    machine_.workers->post(window->at(*this, stage, window));
}

/// Those with rows on a device are as long as a block: each is one event, and fewer and longer copies keep the bus busy.
std::uint64_t WriteJob::window_bytes() const {
    return rows_->devices.empty() ? machine_.request_bytes : arena_->block_bytes();
}

/// Copy the window's bytes on the host, and have the others copied by their devices.
void WriteJob::fetch(const std::shared_ptr<Window>& window, LiveAccess& live) {
    expect_fetched(window);
    list_copies(*window, live);
    take_change();
    submit_copies(window);
}

void WriteJob::expect_fetched(const std::shared_ptr<Window>& window) {
    window->batches.reserve(rows_->devices.size());
    for (std::size_t number = 0; number < rows_->devices.size(); ++number) {
        const auto fetched = [this, window, number](int error) {
            const Device& device = *rows_->devices[number];
            const WriteWindow& planned = window->planned;
            if (error != 0) take_outcome(device_fault(device, error, *files_[planned.file], planned.begin, planned.end - planned.begin));
            else reached_[number] = true;
            arrived(window);
        };
        window->batches.push_back(std::make_unique<CopyBatch>([this, window] { copies_queued(window); }, fetched));
    }
}

void WriteJob::list_copies(Window& window, LiveAccess& live) {
    // Not used where the window ends with a chunk, and else behind the window: see plan_windows.
    window.rest = window.block.bytes() + (arena_->block_bytes() - chunk_bytes);
    const auto list = [&](const WriteExtent& row, std::uint64_t begin, std::uint64_t bytes, std::byte* out) {
        CopyBatch& batch = *window.batches[static_cast<std::size_t>(row.device)];
        if (row.layout != contiguous)
            return batch.add({out, row.address, bytes, true, 1, 0, 0, &rows_->layouts[static_cast<std::size_t>(row.layout)], begin});
        if (!row.gathered) return batch.add({out, row.address + begin, bytes, true});
        window.gathered.push_back({out, row.source() + begin, bytes});
        batch.waits = true;
    };
    for (const WriteRun& run : runs_of(window.planned))
        if (!stopping())
            fetch_run(*rows_, run, window.block.bytes() + (run.begin - window.planned.begin), window.rest, list, *detector_, live);
}

/// Continue when all copies are over, even failed ones: until then devices use the block.
void WriteJob::submit_copies(const std::shared_ptr<Window>& window) {
    std::vector<std::unique_ptr<CopyBatch>> batches = std::move(window->batches);  // they hold the window
    const auto is_used = [](const std::unique_ptr<CopyBatch>& batch) { return batch->waits || !batch->copies.empty(); };
    // What is gathered is safe as soon as that is in the stream.
    for (const std::unique_ptr<CopyBatch>& batch : batches) batch->early = !window->planned.lazy && !batch->copies.empty();
    window->queueing = window->fetching = 1 + static_cast<std::size_t>(std::count_if(batches.begin(), batches.end(), is_used));
    for (std::size_t i = 0; i < batches.size(); ++i)
        if (is_used(batches[i])) rows_->devices[i]->submit(std::move(batches[i]));
    copies_queued(window);
    arrived(window);
}

void WriteJob::copies_queued(const std::shared_ptr<Window>& window) {
    if (--window->queueing == 0) queue(*window);
}

void WriteJob::arrived(const std::shared_ptr<Window>& window) {
    if (--window->fetching == 0) post(window, &WriteJob::capture);
}

void WriteJob::capture(const std::shared_ptr<Window>& window, LiveAccess& live) {
    if (stopping()) {
        if (rows_->feed) rows_->feed->end();
        release(*window);
        return end(window);
    }
    const std::int64_t begin_ns = now_ns();
    std::uint64_t bytes = 0;
    for (const Window::Late& late : window->gathered) std::memcpy(late.out, late.source, late.bytes);
    const std::vector<WriteRun> runs = runs_of(window->planned);
    std::vector<std::unique_ptr<Op>> ops;
    ops.reserve(runs.size());
    const ChunkNotes notes{digests_, derived_ ? &*derived_ : nullptr};
    for (const WriteRun& run : runs) {
        std::byte* const image = this->image(*window) + (run.begin - window->planned.begin);
        if (!run.appended && !window->in_place) add_ops(ops, window, run.begin, {image, run.end - run.begin});
        capture_run(*rows_, run, image, window->rest, notes, *detector_, live);
        bytes += row_bytes(*rows_, run);
        settle_run(*rows_, run, *detector_);
        if (rows_->feed) tell_captured(run);
    }
    copied_bytes_ += bytes;
    if (derived_) arena_->wake();  // `await_sources`
    spans_.add(Phase::capture, begin_ns, bytes);
    take_change();
    release(*window);
    if (window->planned.appended) {
        if (stopping()) return end(window);
        const std::int64_t encode_ns = now_ns();
        const Appender::Range range = appender_->append(window->planned, window->block.bytes(), live.coding_room(), digests_);
        spans_.add(Phase::encode, encode_ns, bytes);
        if (range.bytes == 0) return end(window);  // all of it is in the base
        add_ops(ops, window, range.offset, {window->block.bytes(), range.bytes});
    }
    if (window->in_place) {
        done_bytes_ += window->planned.end - window->planned.begin;
        return end(window);
    }
    submit(window, std::move(ops));
}

/// The run's part of each row is not read again.
void WriteJob::tell_captured(const WriteRun& run) {
    for (std::size_t at = run.first_row; at < run.last_row; ++at) {
        const WriteExtent& row = rows_->rows[at];
        const std::uint64_t begin = std::max(row.offset, run.begin);
        const std::uint64_t end = std::min(row.end(), run.end);
        if (begin < end) rows_->feed->captured(at, end - begin);
    }
}

/// The written parts of a window, one request each; an appended window is one part, and so is one of a mapped file.
std::vector<WriteRun> WriteJob::runs_of(const WriteWindow& window) const {
    const bool is_mapped = files_[window.file]->mapped != 0;
    return window.appended ? std::vector{window} : split_runs(*rows_, window, is_mapped ? UINT64_MAX : options_.gap_bytes);
}

/// What no window covers of mapped files in which chunks keep their places.
void WriteJob::clear_gaps(const std::vector<WriteWindow>& windows) {
    std::vector<std::uint64_t> cleared(files_.size(), 0);
    const auto clear = [&](std::uint32_t file, std::uint64_t end) {
        if (files_[file]->mapped != 0 && cleared[file] < end)
            std::memset(reinterpret_cast<std::byte*>(files_[file]->mapped) + cleared[file], 0, end - cleared[file]);
    };
    std::vector<WriteWindow> ordered;
    std::copy_if(windows.begin(), windows.end(), std::back_inserter(ordered), [](const WriteWindow& window) { return !window.appended; });
    std::sort(ordered.begin(), ordered.end(), [](const WriteWindow& a, const WriteWindow& b) { return std::tie(a.file, a.begin) < std::tie(b.file, b.begin); });
    for (const WriteWindow& window : ordered) {
        if (stopping()) return;
        clear(window.file, window.begin);
        cleared[window.file] = window.end;
    }
    // The end of an encoder's file is where the encoder has come to.
    const std::size_t kept = rows_->keeps_places() ? files_.size() : std::min<std::size_t>(rows_->encoded_from, files_.size());
    for (std::uint32_t file = 0; file < kept && !stopping(); ++file) clear(file, sizes_[file]);
}

std::unique_ptr<Op> WriteJob::make_op(const std::shared_ptr<Window>& window, std::uint64_t offset, iovec part) {
    auto op = std::make_unique<Op>();
    op->direction = Direction::write;
    op->file = files_[window->planned.file].get();
    op->offset = offset;
    op->parts = {part};
    op->memory_slot = window->memory_slot;
    op->file_slot = registered().file(window->planned.file);
    op->stopping = &stopping_;
    op->done = [this, window, bytes = op->length()](const Outcome& outcome) { end_op(window, bytes, outcome); };
    return op;
}

/// In requests of at most request_bytes, where a window is longer.
void WriteJob::add_ops(std::vector<std::unique_ptr<Op>>& ops, const std::shared_ptr<Window>& window, std::uint64_t offset, iovec part) {
    const std::uint64_t most = machine_.splits_windows ? machine_.request_bytes : part.iov_len;
    for (std::uint64_t at = 0; at < part.iov_len; at += most) {
        const std::uint64_t length = std::min<std::uint64_t>(most, part.iov_len - at);
        ops.push_back(make_op(window, offset + at, {static_cast<std::byte*>(part.iov_base) + at, length}));
    }
}

/// Submit now, or once the files are ready.
void WriteJob::submit(const std::shared_ptr<Window>& window, std::vector<std::unique_ptr<Op>> ops) {
    {
        const std::lock_guard lock(held_mutex_);
        if (!files_ready_ && !stopping()) {
            held_.push_back(window);
            window->ops = std::move(ops);
            return;
        }
    }
    window->ops = std::move(ops);
    hand_over(window);
}

/// Files are ready, or the job stops: submit the held windows; no other call will.
void WriteJob::hand_over_held() {
    std::vector<std::shared_ptr<Window>> windows;
    {
        const std::lock_guard lock(held_mutex_);
        windows.swap(held_);
    }
    // On the workers: they live as long as ops that are submitted on them.
    for (const std::shared_ptr<Window>& window : windows) post(window, &WriteJob::begin_held);
}

void WriteJob::wait_for_files() {
    while (!files_ready_ && !stopping()) arena_->wait(Clock::now() + std::chrono::hours(1), [this] { return files_ready_ || stopping(); });
}

/// Called by the coordinator, once it has begun all windows.
void WriteJob::await_files() {
    wait_for_files();
    hand_over_held();
}

/// An op that cannot be submitted counts as ended, like any other.
void WriteJob::hand_over(const std::shared_ptr<Window>& window) {
    std::vector<std::unique_ptr<Op>> ops = std::move(window->ops);
    window->ops_left = ops.size();
    window->handed_over_ns = now_ns();
    for (const std::unique_ptr<Op>& op : ops) window->bytes += op->length();
    const bool unwanted = stopping();
    if (!unwanted) requests_ += ops.size();
    for (std::unique_ptr<Op>& op : ops) {
        if (unwanted) {
            end_op(window, 0, {std::nullopt, true});
            continue;
        }
        try {
            machine_.backend->submit(std::move(op));
        } catch (const std::bad_alloc&) {
            end_op(window, 0, {no_memory(), false});
        }
    }
}

void WriteJob::end_op(const std::shared_ptr<Window>& window, std::uint64_t bytes, const Outcome& outcome) {
    take_outcome(outcome);
    if (!outcome.fault && !outcome.dropped) done_bytes_ += bytes;
    if (--window->ops_left != 0) return;
    spans_.add(Phase::write, window->handed_over_ns, window->bytes);
    end(window);
}

void WriteJob::take_change() {
    const std::optional<MutationDetector::Change> change = detector_->change();
    if (!change) return;
    const WriteExtent& row = rows_->rows[change->row];
    take_outcome(Fault{"capture", change->error, files_[row.file]->path, row.offset + change->begin, change->end - change->begin});
}

/// The window reads no more from the host, and queues no more copies from devices.
void WriteJob::queue(Window& window) {
    if (std::exchange(window.queued, true)) return;
    if (window.planned.early) release_early();
    queue_sources();
}

void WriteJob::release(Window& window) {
    if (std::exchange(window.released, true)) return;
    if (stopping()) detector_->let_go();  // no result is needed any more; do not make later writes pay for it
    queue(window);
    release_sources();
}

/// A stage had no memory, and has begun no op.
void WriteJob::abandon(const std::shared_ptr<Window>& window) {
    take_outcome(no_memory());
    window->batches.clear();  // they hold the window
    release(*window);
    end(window);
}

void WriteJob::end(const std::shared_ptr<Window>& window) {
    if (window->planned.lazy) --lazy_under_way_;
    window->block.release();
    arena_->wake();
    end_window();  // last: the job may be gone after it
}

}  // namespace flowstone
