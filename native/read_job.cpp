#include "read_job.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "bounds.h"
#include "codecs.h"
#include "read_window.h"
#include "thread_name.h"
#include "turns.h"

namespace flowstone {
namespace {

/// Windows with the backend at once when reading ahead. All of them complete together here, so with 4 the device waits for
/// the next ones six times in 200 MB; with 16 the last ones come so late that nothing is stored meanwhile.
constexpr std::uint32_t ahead_reads_max = 8;

}  // namespace

ReadJob::ReadJob(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
                 std::shared_ptr<const ReadExtents> rows, const ReadOptions& options)
    : Job(std::move(machine), std::move(arena), std::move(files)), rows_(std::move(rows)), options_(options),
      touched_(rows_->rows.size()) {
    if (!options_.ahead) targets_ = rows_.get();
    coordinator_ = std::jthread([this] {
        name_this_thread("fs-read");
        coordinate([this] { begin_all(); });
    });
}

ReadJob::~ReadJob() {
    cancel();
    coordinator_.join();
}

void ReadJob::aim(std::shared_ptr<const ReadExtents> rows) {
    check_extents(*rows, files_.size());
    const auto is_same = [](const ReadExtent& a, const ReadExtent& b) {
        return std::tie(a.file, a.offset, a.length, a.chunk, a.first, a.last) ==
               std::tie(b.file, b.offset, b.length, b.chunk, b.first, b.last);
    };
    if (!std::equal(rows->rows.begin(), rows->rows.end(), rows_->rows.begin(), rows_->rows.end(), is_same) ||
        rows->digests.size() != rows_->digests.size())
        throw std::invalid_argument("these are not the rows that are read ahead");
    arena_->use(rows->devices);
    std::vector<std::shared_ptr<Window>> held;
    {
        const std::lock_guard lock(held_mutex_);
        if (targets_.load() != nullptr) throw std::invalid_argument("the targets are known already");
        aimed_ = std::move(rows);
        targets_ = aimed_.get();
        held.swap(held_);
    }
    if (held.empty()) return;
    const std::shared_ptr<Workers> workers = machine_.workers;  // the last window's end may end the job
    // Decoding needs a worker's buffers.
    const std::size_t own = rows_->stored.empty() ? held.size() / (1 + workers->count()) : 0;
    for (std::size_t i = own; i < held.size(); ++i) workers->post(held[i]->at(*this, &ReadJob::deliver, held[i]));
    for (std::size_t i = 0; i < own; ++i) {
        try {
            deliver_now(held[i], nullptr);
        } catch (const std::bad_alloc&) {
            abandon(held[i]);
        }
    }
}

/// Whether the verified window waits for `aim`, which then has it stored.
bool ReadJob::hold(const std::shared_ptr<Window>& window) {
    const std::lock_guard lock(held_mutex_);
    if (targets_.load() != nullptr || stopping()) return false;
    held_.push_back(window);
    return true;
}

/// Once it is stopping: no further window is held then.
void ReadJob::drop_held() {
    std::vector<std::shared_ptr<Window>> held;
    {
        const std::lock_guard lock(held_mutex_);
        held.swap(held_);
    }
    for (const std::shared_ptr<Window>& window : held) end(window);
}

std::vector<std::uint64_t> ReadJob::bad_chunks() const {
    const std::lock_guard lock(bad_mutex_);
    return {bad_.begin(), bad_.end()};
}

std::vector<bool> ReadJob::touched() const {
    std::vector<bool> touched(touched_.size());
    for (std::size_t i = 0; i < touched.size(); ++i) touched[i] = touched_[i].load();
    return touched;
}

/// The coordinator. Windows that are held wait for it when the job stops.
void ReadJob::begin_all() {
    if (!options_.ahead) return begin_windows();
    try {
        begin_windows();
    } catch (const std::bad_alloc&) {
        take_outcome(no_memory());
    }
    wait_for_windows();
    drop_held();
}

/// Begins windows in file order, as many at once as keep queue and workers busy; ahead, as many as the arena holds.
void ReadJob::begin_windows() {
    register_files();
    arena_->use(rows_->devices);
    plan_ = plan_reads(*rows_, machine_.request_bytes, arena_->block_bytes(), options_.in_place && !options_.ahead);
    std::erase_if(plan_.windows, [this](const ReadWindow& window) { return files_[window.file] == nullptr; });
    take_turns(plan_.windows.begin(), plan_.windows.end(), files_);
    for (const ReadWindow& window : plan_.windows) {
        const auto is_null = [this](const OtherRange& range) { return files_[range.file] == nullptr; };
        const auto ranges = std::span(plan_.ranges).subspan(window.first_range, window.last_range - window.first_range);
        if (!std::any_of(ranges.begin(), ranges.end(), is_null)) continue;
        return take_outcome({Fault{"find what it is decoded with for", EBADF, files_[window.file]->path, window.begin, window.bytes}, false});
    }
    const auto busy = static_cast<std::uint32_t>(machine_.queue_depth + machine_.workers->count());
    const std::uint32_t windows_max = options_.ahead ? std::min(ahead_reads_max, busy) : busy;
    std::uint64_t blocks = 0, blocks_max = 0;
    for (const ReadWindow& window : plan_.windows) {
        if (window.direct || is_lent() || is_mapped(window)) continue;
        blocks += blocks_of(window);
        blocks_max = std::max<std::uint64_t>(blocks_max, blocks_of(window));
    }
    if (blocks_max * arena_->block_bytes() > arena_->budget_bytes()) return take_outcome(no_memory());
    spans_.expect((options_.ahead ? 3 : 2) * plan_.windows.size());  // read, deliver; ahead, verified before
    if (blocks != 0) arena_->grow((options_.ahead ? blocks : std::min(blocks, std::max<std::uint64_t>(blocks_max, windows_max))) * arena_->block_bytes());
    for (const ReadWindow& window : plan_.windows) {
        wait_for_room(windows_max);
        if (stopping()) break;
        if (is_mapped(window)) {
            begin_mapped(window);
            continue;
        }
        if (window.direct || is_lent()) {
            begin(window, {});
            continue;
        }
        std::vector<Block> taken = arena_->acquire_all(blocks_of(window), [this] { return stopping(); });
        if (taken.empty() || stopping()) break;
        begin(window, std::move(taken));
    }
}

void ReadJob::post(const std::shared_ptr<Window>& window, Stage stage) noexcept {
    machine_.workers->post(window->at(*this, stage, window));
}

/// Devices copy only from pinned blocks, and who reads ahead does not know where to. What lies past the end of a file is
/// asked of the system, which says so.
bool ReadJob::is_mapped(const ReadWindow& planned) const {
    const auto is_far = [this](const WantedChunk& chunk) { return rows_->rows[chunk.row].device != on_host; };
    const auto is_there = [](const File& file, std::uint64_t end) { return file.mapped != 0 && (file.mapping == nullptr || end <= file.mapping->bytes()); };
    const auto is_read = [&](const OtherRange& range) { return !is_there(*files_[range.file], range.needed_end); };
    const auto ranges = std::span(plan_.ranges).subspan(planned.first_range, planned.last_range - planned.first_range);
    return !options_.ahead && is_there(*files_[planned.file], planned.needed_end) && std::none_of(ranges.begin(), ranges.end(), is_read) &&
           !std::any_of(plan_.chunks.begin() + static_cast<std::ptrdiff_t>(planned.first),
                        plan_.chunks.begin() + static_cast<std::ptrdiff_t>(planned.last), is_far);
}

void ReadJob::begin_mapped(const ReadWindow& planned) {
    const auto window = std::make_shared<Window>();
    window->planned = &planned;
    window->mapped = true;
    begin_window(false);
    post(window, &ReadJob::deliver);
}

/// Devices copy from blocks, later; decoding needs a worker's buffers; and who reads ahead keeps the bytes.
bool ReadJob::is_lent() const { return options_.lent && !options_.ahead && rows_->stored.empty() && rows_->devices.empty(); }

std::size_t ReadJob::blocks_of(const ReadWindow& planned) const {
    const std::uint64_t block_bytes = arena_->block_bytes();
    return static_cast<std::size_t>((planned.memory + block_bytes - 1) / block_bytes);
}

void ReadJob::begin(const ReadWindow& planned, std::vector<Block> blocks) {
    const auto window = std::make_shared<Window>();
    window->planned = &planned;
    window->begun_ns = now_ns();
    window->blocks = std::move(blocks);
    std::vector<std::unique_ptr<Op>> ops;
    if (planned.own_bytes() != 0) ops.push_back(make_op(window, {planned.file, planned.begin, planned.end, planned.needed_end}));
    for (std::size_t i = planned.first_range; i < planned.last_range; ++i) ops.push_back(make_op(window, plan_.ranges[i]));
    window->ops_left = ops.size();
    requests_ += ops.size();
    requested_bytes_ += planned.bytes;
    begin_window(false);
    for (std::unique_ptr<Op>& op : ops) {
        try {
            machine_.backend->submit(std::move(op));
        } catch (const std::bad_alloc&) {
            end_op(window, {no_memory(), false});
        }
    }
}

const std::byte* ReadJob::memory(const Window& window, std::uint64_t at) const {
    if (window.lent != nullptr) return window.lent + at;
    return block_memory(window, at);
}

std::byte* ReadJob::block_memory(const Window& window, std::uint64_t at) const {
    return window.blocks[at / arena_->block_bytes()].bytes() + at % arena_->block_bytes();
}

std::unique_ptr<Op> ReadJob::make_op(const std::shared_ptr<Window>& window, const OtherRange& range) {
    auto op = std::make_unique<Op>();
    op->direction = Direction::read;
    op->file = files_[range.file].get();
    op->offset = range.begin;
    op->needed_bytes = range.needed_end - range.begin;
    op->stopping = &stopping_;
    if (window->planned->direct) {
        aim_direct(*window, op->parts);
    } else if (is_lent()) {
        op->parts.push_back({nullptr, range.bytes()});
    } else {
        op->parts.push_back({block_memory(*window, range.at), range.bytes()});
        op->memory_slot = registered().block(window->blocks[range.at / arena_->block_bytes()], arena_->block_bytes());
    }
    op->file_slot = registered().file(range.file);
    op->done = [this, window](const Outcome& outcome) { end_op(window, outcome); };
    return op;
}

/// [bounce head][the target's own pages][bounce tail]
void ReadJob::aim_direct(Window& window, std::vector<iovec>& parts) {
    const ReadWindow& planned = *window.planned;
    const WantedChunk& first = plan_.chunks[planned.first];
    const ReadExtent& row = rows_->rows[first.row];
    touched_[first.row] = true;
    const std::uint64_t low = block_ceil(first.begin);
    const std::uint64_t high = block_floor(planned.needed_end);
    assert(low < high);
    if (planned.begin < low) {
        window.head = allocate_aligned(block_alignment_bytes);
        parts.push_back({window.head.get(), block_alignment_bytes});
    }
    std::byte* const target = row.target() + (low - row.offset);
    assert(reinterpret_cast<std::uintptr_t>(target) % block_alignment_bytes == 0);
    parts.push_back({target, high - low});
    if (high < planned.end) {
        window.tail = allocate_aligned(block_alignment_bytes);
        parts.push_back({window.tail.get(), block_alignment_bytes});
    }
}

void ReadJob::end_op(const std::shared_ptr<Window>& window, const Outcome& outcome) {
    take_outcome(outcome);
    if (outcome.fault || outcome.dropped) window->failed = true;
    if (--window->ops_left != 0) return;
    spans_.add(Phase::read, window->begun_ns, window->planned->bytes);
    if (window->failed) {
        window->blocks.clear();
        end_window();
    } else if (outcome.lent != nullptr) {
        deliver_lent(window, outcome.lent);
    } else {
        if (options_.ahead) set_aside();
        window->aside = options_.ahead;
        post(window, &ReadJob::deliver);
    }
}

/// Verify every chunk of an arrived window whose targets are not known.
void ReadJob::verify(const std::shared_ptr<Window>& window) {
    const std::int64_t begin_ns = now_ns();
    for (std::size_t i = window->planned->first; i < window->planned->last; ++i) check_all(*window, plan_.chunks[i]);
    window->verified = true;
    spans_.add(Phase::deliver, begin_ns, 0);
}

/// What has arrived is stored; ahead, it is verified, and stored once the targets are known.
void ReadJob::deliver(const std::shared_ptr<Window>& window, LiveAccess& live) {
    if (targets_.load() == nullptr) {
        verify(window);
        if (hold(window)) return;
    }
    if (targets_.load() == nullptr)
        end(window);  // stopped before they were known
    else
        deliver_now(window, &live);
}

/// On the thread of the caller's that lends the bytes.
void ReadJob::deliver_lent(const std::shared_ptr<Window>& window, const std::byte* bytes) {
    window->lent = bytes;
    try {
        deliver_now(window, nullptr);
    } catch (const std::bad_alloc&) {
        abandon(window);
    }
}

/// For every chunk of an arrived window: verify it in place, then (from the arena) store it.
void ReadJob::deliver_now(const std::shared_ptr<Window>& window, LiveAccess* live) {
    window->rows = targets_.load();
    const ReadWindow& planned = *window->planned;
    const std::int64_t begin_ns = now_ns();
    std::uint64_t delivered = 0;
    if (!window->rows->devices.empty()) expect_stored(window);
    const bool in_place = planned.direct && !window->mapped;
    if (in_place) copy_edges(*window);
    bool good = false;
    for (std::size_t i = planned.first; i < planned.last; ++i) {
        const WantedChunk& chunk = plan_.chunks[i];
        // Rows that need the same chunk follow each other: parts of one stored tensor, for example.
        const bool known = i != planned.first && chunk.sources == plan_.chunks[i - 1].sources && stored_of(chunk) == stored_of(plan_.chunks[i - 1]);
        good = known ? good : window->verified || check_all(*window, chunk);
        if (!good) continue;
        // Once one chunk is bad the load has failed: report further ones, but change no more memory.
        if (!in_place && !damaged_.load()) {
            if (chunk.sources != 0) {
                if (!compute(*window, chunk, *live)) continue;
            } else if (codec_of(chunk) == codec_raw)
                store(*window, chunk, arrived(*window, chunk));
            else if (!decode(*window, chunk, arrived(*window, chunk), *live))
                continue;
        }
        const std::uint64_t bytes = chunk.length + (chunk.sources < 2 ? 0 : rows_->stored[stored_of(chunk) + 1].length);
        (in_place ? direct_bytes_ : copied_bytes_) += bytes;
        done_bytes_ += bytes;
        delivered += bytes;
    }
    batch_run(*window);
    spans_.add(Phase::deliver, begin_ns, delivered);
    end(window);
}

void ReadJob::expect_stored(const std::shared_ptr<Window>& window) {
    const std::vector<std::shared_ptr<Device>>& devices = window->rows->devices;
    window->batches.reserve(devices.size());
    for (const std::shared_ptr<Device>& device : devices) {
        const auto copied = [this, window, &device = *device](int error) {
            const ReadWindow& planned = *window->planned;
            if (error != 0) take_outcome(device_fault(device, error, *files_[planned.file], planned.begin, planned.end - planned.begin));
            stored(window);
        };
        window->batches.push_back(std::make_unique<CopyBatch>(nullptr, copied));
    }
}

/// The block is given back when no device copies from it any more.
void ReadJob::end(const std::shared_ptr<Window>& window) {
    std::vector<std::unique_ptr<CopyBatch>> batches = std::move(window->batches);  // they hold the window
    const auto is_used = [](const std::unique_ptr<CopyBatch>& batch) { return !batch->copies.empty(); };
    window->storing = 1 + static_cast<std::size_t>(std::count_if(batches.begin(), batches.end(), is_used));
    for (std::size_t i = 0; i < batches.size(); ++i)
        if (is_used(batches[i])) window->rows->devices[i]->submit(std::move(batches[i]));
    stored(window);
}

void ReadJob::stored(const std::shared_ptr<Window>& window) {
    if (--window->storing != 0) return;
    window->blocks.clear();
    end_window(window->aside);  // last: the job may be gone after it
}

/// There was no memory to deliver it.
void ReadJob::abandon(const std::shared_ptr<Window>& window) {
    take_outcome(no_memory());
    end(window);
}

const std::byte* ReadJob::arrived(const Window& window, const WantedChunk& chunk) const {
    const ReadWindow& planned = *window.planned;
    const ReadExtent& row = rows_->rows[chunk.row];
    if (window.mapped) return reinterpret_cast<const std::byte*>(files_[planned.file]->mapped + chunk.begin);
    if (planned.direct) return row.target() + (chunk.begin - row.offset);
    return memory(window, chunk.memory[0].at);
}

/// What is stored at `place`, which is not read in place; `at` is where it is in the window's memory.
const std::byte* ReadJob::arrived(const Window& window, const ChunkPlace& place, std::uint64_t at) const {
    return window.mapped ? reinterpret_cast<const std::byte*>(files_[place.file]->mapped + place.offset) : memory(window, at);
}

void ReadJob::copy_edges(const Window& window) {
    const ReadWindow& planned = *window.planned;
    const WantedChunk& first = plan_.chunks[planned.first];
    const ReadExtent& row = rows_->rows[first.row];
    if (window.head) {
        const std::uint64_t skipped = first.begin - planned.begin;
        std::memcpy(row.target() + (first.begin - row.offset), window.head.get() + skipped, block_alignment_bytes - skipped);
    }
    if (window.tail) {
        const std::uint64_t low = block_floor(planned.needed_end);
        std::memcpy(row.target() + (low - row.offset), window.tail.get(), planned.needed_end - low);
    }
}

std::uint8_t ReadJob::codec_of(const WantedChunk& chunk) const {
    return rows_->stored.empty() ? codec_raw : rows_->stored[digest_of(chunk)].codec;
}

std::uint64_t ReadJob::digest_of(const WantedChunk& chunk) const { return rows_->rows[chunk.row].chunk + chunk.number; }

std::uint64_t ReadJob::stored_of(const WantedChunk& chunk) const {
    const std::uint64_t own = digest_of(chunk);
    return chunk.sources == 0 ? own : rows_->stored[own].offset;
}

bool ReadJob::check(std::uint64_t digest, const std::byte* bytes, std::uint32_t length) {
    if (xxh3_64(bytes, length) == rows_->digests[digest]) return true;
    report_bad(digest);
    return false;
}

/// Check what is stored for a chunk: of a cast one, all that it follows from.
bool ReadJob::check_all(const Window& window, const WantedChunk& chunk) {
    const std::uint64_t stored = stored_of(chunk);
    const bool good = check(stored, arrived(window, chunk), chunk.length);
    if (chunk.sources < 2) return good;
    const ChunkPlace& place = rows_->stored[stored + 1];
    return check(stored + 1, arrived(window, place, chunk.memory[1].at), place.length) && good;
}

void ReadJob::report_bad(std::uint64_t digest) {
    {
        const std::lock_guard lock(bad_mutex_);
        bad_.insert(digest);
    }
    if (!options_.stop_at_bad) return;
    damaged_ = true;
    stop();
}

}  // namespace flowstone
