#include "io/read_job.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "bounds.h"
#include "codec/codecs.h"
#include "io/read_window.h"
#include "io/thread_name.h"
#include "io/path_order.h"

namespace flowstone {
namespace {

/// The most windows in flight when reading ahead. On the measured disk they all complete together: with 4 the device
/// waits for new ones six times in 200 MB; with 16 the last ones complete so late that no chunk can be stored
/// meanwhile.
constexpr std::uint32_t ahead_reads_max = 8;

}  // namespace

ReadJob::ReadJob(Machine machine, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<const File>> files,
                 std::shared_ptr<const ReadExtents> rows, const ReadOptions& options)
    : Job(std::move(machine), std::move(arena), std::move(files)),
      shared_(core_, std::move(rows), options),
      verifier_(shared_),
      delivery_(shared_, verifier_) {
    if (!shared_.options.ahead) targets_ = shared_.rows.get();
    coordinator_ = std::jthread([this] {
        name_this_thread("fs-read");
        core_.coordinate([this] { begin_all(); });
    });
}

ReadJob::~ReadJob() {
    cancel();
    coordinator_.join();
}

void ReadJob::aim(std::shared_ptr<const ReadExtents> rows) {
    check_extents(*rows, core_.files().size());
    const auto is_same = [](const ReadExtent& a, const ReadExtent& b) {
        return std::tie(a.file, a.offset, a.length, a.chunk, a.first, a.last) ==
            std::tie(b.file, b.offset, b.length, b.chunk, b.first, b.last);
    };
    if (!std::equal(rows->rows.begin(), rows->rows.end(), shared_.rows->rows.begin(), shared_.rows->rows.end(),
                    is_same) ||
        rows->digests.size() != shared_.rows->digests.size())
        throw std::invalid_argument("aim: these rows differ from those that are read ahead");
    core_.arena().use(rows->devices);
    std::vector<ReadWindowPtr> held;
    {
        const std::lock_guard lock(held_mutex_);
        if (targets_.load() != nullptr) throw std::invalid_argument("aim: the job has its targets already");
        aimed_ = std::move(rows);
        targets_ = aimed_.get();
        held.swap(held_);
    }
    if (held.empty()) return;
    const std::shared_ptr<Workers> workers = core_.machine().workers;  // the last window's end may end the job
    // Decoding needs a worker's buffers.
    const std::size_t own = shared_.rows->stored.empty() ? held.size() / (1 + workers->count()) : 0;
    for (std::size_t i = own; i < held.size(); ++i) workers->post(held[i]->at<&ReadJob::deliver>(*this, held[i]));
    for (std::size_t i = 0; i < own; ++i) {
        try {
            delivery_.deliver(held[i], *targets_.load(), nullptr);
        } catch (const std::bad_alloc&) { abandon(held[i]); }
    }
}

/// Hold a verified window back for `aim`, which has it stored. Returns whether it is held.
bool ReadJob::hold(const ReadWindowPtr& window) {
    const std::lock_guard lock(held_mutex_);
    if (targets_.load() != nullptr || core_.stopping()) return false;
    held_.push_back(window);
    return true;
}

/// Drop held windows of a stopping job; no further window is held then.
void ReadJob::drop_held() {
    std::vector<ReadWindowPtr> held;
    {
        const std::lock_guard lock(held_mutex_);
        held.swap(held_);
    }
    for (const ReadWindowPtr& window : held) delivery_.end(window);
}

std::vector<bool> ReadJob::touched() const {
    std::vector<bool> touched(shared_.touched.size());
    for (std::size_t i = 0; i < touched.size(); ++i) touched[i] = shared_.touched[i].load();
    return touched;
}

/// Runs on the coordinator. When the job stops, it ends held windows.
void ReadJob::begin_all() {
    if (!shared_.options.ahead) return begin_windows();
    try {
        begin_windows();
    } catch (const std::bad_alloc&) { core_.record_outcome(core_.no_memory()); }
    core_.wait_for_windows();
    drop_held();
}

/// Begins windows in file order, as many at once as keep queue and workers busy; when reading ahead, as many as the
/// arena holds.
void ReadJob::begin_windows() {
    core_.register_files();
    core_.arena().use(shared_.rows->devices);
    shared_.plan = plan_reads(*shared_.rows, core_.machine().request_bytes, core_.arena().block_bytes(),
                              shared_.options.in_place && !shared_.options.ahead);
    std::erase_if(shared_.plan.windows,
                  [this](const ReadWindow& window) { return core_.files()[window.file] == nullptr; });
    interleave_paths(shared_.plan.windows.begin(), shared_.plan.windows.end(), core_.files());
    for (const ReadWindow& window : shared_.plan.windows) {
        const auto is_null = [this](const OtherRange& range) { return core_.files()[range.file] == nullptr; };
        const auto ranges =
            std::span(shared_.plan.ranges).subspan(window.first_range, window.last_range - window.first_range);
        if (!std::any_of(ranges.begin(), ranges.end(), is_null)) continue;
        return core_.record_outcome(
            {Fault{"find the base chunks for", EBADF, core_.files()[window.file]->path, window.begin, window.bytes},
             false});
    }
    const auto busy = static_cast<std::uint32_t>(core_.machine().queue_depth + core_.machine().workers->count());
    const std::uint32_t windows_max = shared_.options.ahead ? std::min(ahead_reads_max, busy) : busy;
    std::uint64_t blocks = 0, blocks_max = 0;
    for (const ReadWindow& window : shared_.plan.windows) {
        if (window.direct || is_lent() || is_mapped(window)) continue;
        blocks += blocks_of(window);
        blocks_max = std::max<std::uint64_t>(blocks_max, blocks_of(window));
    }
    if (blocks_max * core_.arena().block_bytes() > core_.arena().budget_bytes())
        return core_.record_outcome(core_.no_memory());
    core_.spans.expect((shared_.options.ahead ? 3 : 2) *
                       shared_.plan.windows.size());  // spans: read, deliver; when reading ahead, also verify
    if (blocks != 0)
        core_.arena().grow(
            (shared_.options.ahead ? blocks : std::min(blocks, std::max<std::uint64_t>(blocks_max, windows_max))) *
            core_.arena().block_bytes());
    for (const ReadWindow& window : shared_.plan.windows) {
        core_.wait_for_room(windows_max);
        if (core_.stopping()) break;
        if (is_mapped(window)) {
            begin_mapped(window);
            continue;
        }
        if (window.direct || is_lent()) {
            begin(window, {});
            continue;
        }
        std::vector<Block> taken = core_.arena().acquire_all(blocks_of(window), [this] { return core_.stopping(); });
        if (taken.empty() || core_.stopping()) break;
        begin(window, std::move(taken));
    }
}

/// Devices copy only from pinned blocks, and a read-ahead has no targets yet. A range past the end of a file is read by
/// the system, which reports that.
bool ReadJob::is_mapped(const ReadWindow& planned) const {
    const auto is_far = [this](const WantedChunk& chunk) { return shared_.rows->rows[chunk.row].device != on_host; };
    const auto is_there = [](const File& file, std::uint64_t end) {
        return file.mapped != 0 && (file.mapping == nullptr || end <= file.mapping->bytes());
    };
    const auto is_read = [&](const OtherRange& range) {
        return !is_there(shared_.core.file(range.file), range.needed_end);
    };
    const auto ranges =
        std::span(shared_.plan.ranges).subspan(planned.first_range, planned.last_range - planned.first_range);
    return !shared_.options.ahead && is_there(shared_.core.file(planned.file), planned.needed_end) &&
        std::none_of(ranges.begin(), ranges.end(), is_read) &&
        !std::any_of(shared_.plan.chunks.begin() + static_cast<std::ptrdiff_t>(planned.first),
                     shared_.plan.chunks.begin() + static_cast<std::ptrdiff_t>(planned.last), is_far);
}

void ReadJob::begin_mapped(const ReadWindow& planned) {
    const auto window = std::make_shared<ReadInFlight>();
    window->planned = &planned;
    window->mapped = true;
    core_.begin_window(false);
    core_.workers().post(window->at<&ReadJob::deliver>(*this, window));
}

/// Not if devices copy from blocks later, if decoding needs a worker's buffers, or if a read-ahead keeps the bytes.
bool ReadJob::is_lent() const {
    return shared_.options.lent && !shared_.options.ahead && shared_.rows->stored.empty() &&
        shared_.rows->devices.empty();
}

std::size_t ReadJob::blocks_of(const ReadWindow& planned) const {
    const std::uint64_t block_bytes = core_.arena().block_bytes();
    return static_cast<std::size_t>((planned.memory + block_bytes - 1) / block_bytes);
}

void ReadJob::begin(const ReadWindow& planned, std::vector<Block> blocks) {
    const auto window = std::make_shared<ReadInFlight>();
    window->planned = &planned;
    window->begun_ns = now_ns();
    window->blocks = std::move(blocks);
    std::vector<std::unique_ptr<Op>> ops;
    if (planned.own_bytes() != 0)
        ops.push_back(make_op(window, {planned.file, planned.begin, planned.end, planned.needed_end}));
    for (std::size_t i = planned.first_range; i < planned.last_range; ++i)
        ops.push_back(make_op(window, shared_.plan.ranges[i]));
    window->ops_left = ops.size();
    core_.requests += ops.size();
    shared_.requested_bytes += planned.bytes;
    core_.begin_window(false);
    for (std::unique_ptr<Op>& op : ops) {
        try {
            core_.machine().backend->submit(std::move(op));
        } catch (const std::bad_alloc&) { end_op(window, {core_.no_memory(), false}); }
    }
}

std::unique_ptr<Op> ReadJob::make_op(const ReadWindowPtr& window, const OtherRange& range) {
    auto op = std::make_unique<Op>();
    op->direction = Direction::read;
    op->file = core_.files()[range.file].get();
    op->offset = range.begin;
    op->needed_bytes = range.needed_end - range.begin;
    op->stopping = &core_.stop_flag();
    if (window->planned->direct) {
        aim_direct(*window, op->parts);
    } else if (is_lent()) {
        op->parts.push_back({nullptr, range.bytes()});
    } else {
        op->parts.push_back({shared_.block_memory(*window, range.at), range.bytes()});
        op->memory_slot = core_.registrations().block(window->blocks[range.at / core_.arena().block_bytes()],
                                                      core_.arena().block_bytes());
    }
    op->file_slot = core_.registrations().file(range.file);
    op->done = [this, window](const Outcome& outcome) { end_op(window, outcome); };
    return op;
}

/// [bounce head][the target's own pages][bounce tail]
void ReadJob::aim_direct(ReadInFlight& window, std::vector<iovec>& parts) {
    const ReadWindow& planned = *window.planned;
    const WantedChunk& first = shared_.plan.chunks[planned.first];
    const ReadExtent& row = shared_.rows->rows[first.row];
    shared_.touched[first.row] = true;
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

void ReadJob::end_op(const ReadWindowPtr& window, const Outcome& outcome) {
    core_.record_outcome(outcome);
    if (outcome.fault || outcome.dropped) window->failed = true;
    if (--window->ops_left != 0) return;
    core_.spans.add(Phase::read, window->begun_ns, window->planned->bytes);
    if (window->failed) {
        window->blocks.clear();
        core_.end_window();
    } else if (outcome.lent != nullptr) {
        deliver_lent(window, outcome.lent);
    } else {
        if (shared_.options.ahead) core_.set_aside();
        window->aside = shared_.options.ahead;
        core_.workers().post(window->at<&ReadJob::deliver>(*this, window));
    }
}

/// Verify every chunk of an arrived window whose targets are not known.
void ReadJob::verify(const ReadWindowPtr& window) {
    const std::int64_t begin_ns = now_ns();
    for (std::size_t i = window->planned->first; i < window->planned->last; ++i)
        verifier_.check(*window, shared_.plan.chunks[i]);
    window->verified = true;
    core_.spans.add(Phase::deliver, begin_ns, 0);
}

/// Store the chunks of a window that was read; when reading ahead, only verify them until the targets are known.
void ReadJob::deliver(const ReadWindowPtr& window, LiveAccess& live) {
    if (targets_.load() == nullptr) {
        verify(window);
        if (hold(window)) return;
    }
    if (targets_.load() == nullptr)
        delivery_.end(window);  // stopped before the targets were known
    else
        delivery_.deliver(window, *targets_.load(), &live);
}

/// Runs on the caller's thread that lends the bytes.
void ReadJob::deliver_lent(const ReadWindowPtr& window, const std::byte* bytes) {
    window->lent = bytes;
    try {
        delivery_.deliver(window, *targets_.load(), nullptr);
    } catch (const std::bad_alloc&) { abandon(window); }
}

/// End a window that could not be delivered for lack of memory.
void ReadJob::abandon(const ReadWindowPtr& window) {
    core_.record_outcome(core_.no_memory());
    delivery_.end(window);
}

}  // namespace flowstone
