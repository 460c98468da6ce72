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
    if (!decode_any(window, chunk, bytes, data, data_bytes, live)) {
        report_bad(stored_of(chunk));
        return false;
    }
    if (!is_dense) place(window, chunk, data_bytes, data);
    return true;
}

bool ReadJob::compute(Window& window, const WantedChunk& chunk, const std::byte* bytes, LiveAccess& live) {
    const ReadExtent& row = window.rows->rows[chunk.row];
    const std::uint32_t data_bytes = window.rows->data_bytes(row, chunk.number);
    const std::uint64_t begin = (chunk.half - 1) * cast::half_bytes, singles_bytes = 2 * std::min(cast::half_bytes, data_bytes - begin);
    const std::byte* singles = bytes;
    if (codec_of(chunk) != codec_raw) {
        singles = live.coding_room() + chunk_bytes;
        if (!decode_any(window, chunk, bytes, live.coding_room() + chunk_bytes, singles_bytes, live)) {
            report_bad(stored_of(chunk));
            return false;
        }
    }
    const std::pair key(chunk.row, chunk.number);
    std::shared_ptr<Computed> computed;
    {
        const std::lock_guard lock(computed_mutex_);
        std::shared_ptr<Computed>& found = computed_[key];
        if (found == nullptr) found = std::make_shared<Computed>(Computed{allocate_aligned(block_ceil(data_bytes)), cast::half_count(data_bytes)});
        computed = found;
    }
    const auto element = static_cast<cast::Element>(rows_->stored[digest_of(chunk)].length);
    // Of a NaN, which no writer takes, the digest tells whether it is the one that was saved.
    (void)cast::round(singles, singles_bytes / sizeof(float), element, computed->data.get() + begin);
    {
        const std::lock_guard lock(computed_mutex_);
        if (--computed->halves_left != 0) return true;
        computed_.erase(key);
    }
    if (xxh3_64(computed->data.get(), data_bytes) != rows_->digests[digest_of(chunk)]) {
        report_bad(digest_of(chunk));
        return false;
    }
    if (row.address != verify_only && !damaged_.load()) place(window, chunk, data_bytes, computed->data.get());
    return true;
}

bool ReadJob::decode_any(const Window& window, const WantedChunk& chunk, const std::byte* bytes, std::byte* data, std::size_t data_bytes,
                         LiveAccess& live) const {
    const ChunkBase* const base = rows_->base_of(stored_of(chunk));
    if (base == nullptr) return decode_chunk(codec_of(chunk), bytes, chunk.length, data, data_bytes, live.coding_room());
    static_assert(3 * chunk_bytes <= LiveAccess::coding_room_bytes);
    const std::byte* const stored = arrived(window, chunk, base->place);
    std::byte* const other = live.coding_room() + 2 * chunk_bytes;
    if (xxh3_64(stored, base->place.length) != base->digest ||
        !decode_chunk(base->place.codec, stored, base->place.length, other, data_bytes, live.coding_room()) ||
        !decode_chunk(codec_planes, bytes, chunk.length, data, data_bytes, live.coding_room()))
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

/// To a device, from a buffer that the next chunk takes.
void ReadJob::send(const Window& window, const WantedChunk& chunk, const std::byte* bytes) {
    const ReadExtent& row = window.rows->rows[chunk.row];
    const std::shared_ptr<Device>& device = window.rows->devices[static_cast<std::size_t>(row.device)];
    touched_[chunk.row] = true;
    int error = device->from_host(row.address + chunk.logical_begin(), bytes, chunk.length);
    std::promise<int> copied;
    device->then([&copied](int failure) { copied.set_value(failure); });
    const int later = copied.get_future().get();
    if (error == 0) error = later;
    if (error != 0) take_outcome(device_fault(*device, error, *files_[chunk.file], chunk.begin, chunk.length));
}

void ReadJob::store(Window& window, const WantedChunk& chunk, const std::byte* bytes) {
    const ReadExtent& row = window.rows->rows[chunk.row];
    if (row.address == verify_only) return;
    touched_[chunk.row] = true;
    const std::uint64_t begin = chunk.logical_begin();
    if (row.device != on_host) {
        const std::shared_ptr<Device>& device = window.rows->devices[static_cast<std::size_t>(row.device)];
        arena_->pin(window.block, device);
        window.used[static_cast<std::size_t>(row.device)] = true;
        if (const int error = device->from_host(row.address + begin, bytes, chunk.length))
            take_outcome(device_fault(*device, error, *files_[chunk.file], chunk.begin, chunk.length));
    } else if (row.layout == contiguous)
        std::memcpy(row.target() + begin, bytes, chunk.length);
    else
        window.rows->layouts[static_cast<std::size_t>(row.layout)].scatter(begin, begin + chunk.length, bytes, row.target());
}

}  // namespace flowstone
