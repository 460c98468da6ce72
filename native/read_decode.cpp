// Of a read: what is done to a verified chunk until its data is where it was asked for.
#include <algorithm>
#include <cstring>
#include <future>
#include <utility>

#include "bounds.h"
#include "codecs.h"
#include "digest.h"
#include "planes.h"
#include "read_job.h"
#include "read_window.h"

namespace flowstone {

bool ReadJob::decode(Window& window, const WantedChunk& chunk, const std::byte* bytes, LiveAccess& live) {
    const ReadExtent& row = window.rows->rows[chunk.row];
    const std::uint32_t data_bytes = window.rows->data_bytes(row, chunk.number);
    // Data with a base has a digest of its own: no target changes before that matches.
    const bool is_dense = row.device == on_host && row.layout == contiguous && row.address != verify_only && codec_of(chunk) != codec_xor;
    std::byte* const data = is_dense ? row.target() + chunk.logical_begin() : live.coding_room() + chunk_bytes;
    if (is_dense) touched_[chunk.row] = true;
    if (!decode_any(window, digest_of(chunk), chunk.memory[0], bytes, data, data_bytes, live)) {
        report_bad(digest_of(chunk));
        return false;
    }
    if (!is_dense) place(window, chunk, data_bytes, data);
    return true;
}

bool ReadJob::compute(Window& window, const WantedChunk& chunk, LiveAccess& live) {
    static_assert(4 * chunk_bytes <= LiveAccess::coding_room_bytes);
    const ReadExtent& row = window.rows->rows[chunk.row];
    const std::uint32_t data_bytes = window.rows->data_bytes(row, chunk.number);
    const auto element = static_cast<cast::Element>(rows_->stored[digest_of(chunk)].length);
    std::byte* const data = live.coding_room() + 3 * chunk_bytes;
    for (std::uint64_t half = 0; half < chunk.sources; ++half) {
        const std::uint64_t stored = stored_of(chunk) + half, begin = half * cast::half_bytes;
        const std::uint64_t singles_bytes = 2 * std::min(cast::half_bytes, data_bytes - begin);
        const ChunkPlace& place = rows_->stored[stored];
        const std::byte* singles = arrived(window, place, chunk.memory[half].at);
        if (place.codec != codec_raw) {
            std::byte* const decoded = live.coding_room() + chunk_bytes;
            if (!decode_any(window, stored, chunk.memory[half], singles, decoded, singles_bytes, live)) {
                report_bad(stored);
                return false;
            }
            singles = decoded;
        }
        // Of a NaN, which no writer takes, the digest tells whether it is the one that was saved.
        (void)cast::round(singles, singles_bytes / sizeof(float), element, data + begin);
    }
    if (xxh3_64(data, data_bytes) != rows_->digests[digest_of(chunk)]) {
        report_bad(digest_of(chunk));
        return false;
    }
    if (row.address != verify_only && !damaged_.load()) this->place(window, chunk, data_bytes, data);
    return true;
}

bool ReadJob::decode_any(const Window& window, std::uint64_t stored, const ChunkMemory& memory, const std::byte* bytes, std::byte* data,
                         std::size_t data_bytes, LiveAccess& live) const {
    const ChunkPlace& place = rows_->stored[stored];
    const ChunkBase* const base = rows_->base_of(stored);
    if (base == nullptr) return decode_chunk(place.codec, bytes, place.length, data, data_bytes, live.coding_room());
    static_assert(3 * chunk_bytes <= LiveAccess::coding_room_bytes);
    const std::byte* const near = arrived(window, base->place, memory.base_at);
    std::byte* const other = live.coding_room() + 2 * chunk_bytes;
    if (xxh3_64(near, base->place.length) != base->digest ||
        !decode_chunk(base->place.codec, near, base->place.length, other, data_bytes, live.coding_room()) ||
        !decode_chunk(codec_planes, bytes, place.length, data, data_bytes, live.coding_room()))
        return false;
    xor_into(data, other, data_bytes);
    return xxh3_64(data, data_bytes) == base->data_digest;
}

void ReadJob::place(Window& window, const WantedChunk& chunk, std::uint32_t data_bytes, const std::byte* data) {
    const WantedChunk whole{chunk.begin, data_bytes, chunk.row, chunk.file, chunk.number};
    if (window.rows->rows[chunk.row].device == on_host)
        store(window, whole, data);
    else
        send(window, whole, data);
}

namespace {

/// Verified bytes [begin, end) of a row's extent, to be copied into its target on a device. May throw std::bad_alloc.
void add_copies(CopyBatch& batch, const ReadExtents& rows, const ReadExtent& row, std::uint64_t begin, std::uint64_t end, const std::byte* bytes) {
    auto* const source = const_cast<std::byte*>(bytes);  // it is only read
    if (row.layout == contiguous) return batch.add({source, row.address + begin, end - begin, false});
    for (const StridedRuns& runs : rows.layouts[static_cast<std::size_t>(row.layout)].runs(begin, end)) {
        const std::uint64_t target = row.address + static_cast<std::uint64_t>(runs.memory);
        const auto stride = static_cast<std::uint64_t>(runs.memory_stride);  // of one that is negative: too long
        if (runs.count > 1 && runs.bytes <= stride && stride <= device_stride_max) {
            batch.add({source + runs.packed, target, runs.bytes, false, runs.count, runs.packed_stride, stride});
            continue;
        }
        for (std::uint64_t i = 0; i < runs.count; ++i)
            batch.add({source + runs.packed + i * runs.packed_stride, target + i * stride, runs.bytes, false});
    }
}

}  // namespace

void ReadJob::batch_run(Window& window) {
    const VerifiedRun run = std::exchange(window.run, {});
    if (run.bytes == nullptr) return;
    const ReadExtent& row = window.rows->rows[run.row];
    add_copies(*window.batches[static_cast<std::size_t>(row.device)], *window.rows, row, run.begin, run.end, run.bytes);
}

/// To a device, from a buffer that the next chunk takes.
void ReadJob::send(const Window& window, const WantedChunk& chunk, const std::byte* bytes) {
    const ReadExtent& row = window.rows->rows[chunk.row];
    const std::shared_ptr<Device>& device = window.rows->devices[static_cast<std::size_t>(row.device)];
    touched_[chunk.row] = true;
    std::promise<int> copied;
    auto batch = std::make_unique<CopyBatch>(nullptr, [&copied](int error) { copied.set_value(error); });
    add_copies(*batch, *window.rows, row, chunk.logical_begin(), chunk.logical_begin() + chunk.length, bytes);
    device->submit(std::move(batch));
    if (const int error = copied.get_future().get()) take_outcome(device_fault(*device, error, *files_[chunk.file], chunk.begin, chunk.length));
}

void ReadJob::store(Window& window, const WantedChunk& chunk, const std::byte* bytes) {
    const ReadExtent& row = window.rows->rows[chunk.row];
    if (row.address == verify_only) return;
    touched_[chunk.row] = true;
    const std::uint64_t begin = chunk.logical_begin();
    if (row.device != on_host) {
        const VerifiedRun more{bytes, chunk.row, begin, begin + chunk.length};
        if (window.run.goes_on_with(more)) {
            window.run.end = more.end;
            return;
        }
        batch_run(window);
        window.run = more;
    } else if (row.layout == contiguous)
        std::memcpy(row.target() + begin, bytes, chunk.length);
    else
        window.rows->layouts[static_cast<std::size_t>(row.layout)].scatter(begin, begin + chunk.length, bytes, row.target());
}

}  // namespace flowstone
