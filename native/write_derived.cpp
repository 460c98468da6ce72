// Windows whose rows may follow from others: when a job begins them, and which it need not begin.
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bounds.h"
#include "window_order.h"
#include "write_job.h"

namespace flowstone {
namespace {

using Clock = std::chrono::steady_clock;

bool is_within(const WriteExtent& row, const WriteWindow& window) { return row.length != 0 && row.end() > window.begin && row.offset < window.end; }

}  // namespace

/// All that the window's rows follow from has a block already, or had one: so this waits for no memory.
void WriteJob::await_sources(const WriteWindow& window) {
    const std::vector<std::uint64_t> sources = derived_->sources_of(chunks_beginning_in(*rows_, window));
    const auto is_ready = [&] { return derived_->are_noted(sources) || stopping(); };
    while (!is_ready()) arena_->wait(Clock::now() + std::chrono::hours(1), is_ready);
}

/// Whether every chunk of the window follows from others, as the digest says that its device has made of it when the save began: then
/// it is left out. What that digest is compared with is made of captured bytes, those that the files get, and is that of what a reader
/// decodes. So nothing that the device or a stream does meanwhile can make it hold where it does not.
bool WriteJob::follows(const WriteWindow& window) {
    if (!await_digests(window)) return false;
    struct Chunk {
        std::uint64_t number;
        std::uint64_t digest;
        std::uint8_t codec;
    };
    std::vector<Chunk> chunks;
    for (std::size_t i = window.first_row; i < window.last_row; ++i) {
        const WriteExtent& row = rows_->rows[i];
        if (!is_within(row, window)) continue;
        const std::uint64_t first = chunk_count(std::max(row.offset, window.begin) - row.offset);
        const std::uint64_t last = chunk_count(std::min(row.end(), window.end) - row.offset);
        for (std::uint64_t chunk = first; chunk < last; ++chunk) {
            const std::optional<std::uint64_t> digest = detector_->device_digest(i, chunk);
            const std::optional<std::uint8_t> codec = digest ? derived_->codec_of(row.chunk + chunk, *digest) : std::nullopt;
            if (!codec) return false;
            chunks.push_back({row.chunk + chunk, *digest, *codec});
        }
    }
    for (const Chunk& chunk : chunks) {
        appender_->leave_out(chunk.number, chunk.codec, chunk.digest);
        digests_[chunk.number] = chunk.digest;
    }
    return true;
}

/// Whether all of the window has digests of devices, once they are there. Their kernel may be behind copies of which none has come yet,
/// where what the window follows from is on the host.
bool WriteJob::await_digests(const WriteWindow& window) {
    for (std::size_t i = window.first_row; i < window.last_row; ++i)
        if (is_within(rows_->rows[i], window) && rows_->digests_of(rows_->rows[i]) == nullptr) return false;
    for (std::size_t i = window.first_row; i < window.last_row; ++i)
        if (is_within(rows_->rows[i], window)) await_device(static_cast<std::size_t>(rows_->rows[i].device));
    return !stopping();
}

/// Blocks until what the device's first copy follows is there, or the job is stopping.
void WriteJob::await_device(std::size_t number) {
    if (reached_[number] || stopping()) return;
    auto batch = std::make_unique<CopyBatch>(nullptr, [this, number](int error) {
        if (error != 0) take_outcome(device_fault(*rows_->devices[number], error, *files_.front(), 0, 0));
        else reached_[number] = true;
        arena_->wake();
        end_window();  // last: the job may be gone after it
    });
    begin_window(false);  // until the device has told
    rows_->devices[number]->submit(std::move(batch));
    const auto is_told = [&] { return reached_[number] || stopping(); };
    while (!is_told()) arena_->wait(Clock::now() + std::chrono::hours(1), is_told);
}

}  // namespace flowstone
