#include "io/read_deliver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "bounds.h"
#include "codec/codecs.h"
#include "codec/digest.h"
#include "codec/planes.h"

namespace flowstone {

void WindowDelivery::deliver(const ReadWindowPtr& window, const ReadExtents& rows, LiveAccess* live) {
    window->rows = &rows;
    const ReadWindow& planned = *window->planned;
    const std::int64_t begin_ns = now_ns();
    std::uint64_t delivered = 0;
    if (!window->rows->devices.empty()) make_batches(window);
    const bool in_place = planned.direct && !window->mapped;
    if (in_place) copy_edges(*window);
    bool good = false;
    for (std::size_t i = planned.first; i < planned.last; ++i) {
        const WantedChunk& chunk = shared_.plan.chunks[i];
        // Rows that need the same chunk are adjacent: parts of one stored tensor, for example.
        const bool known = i != planned.first && chunk.sources == shared_.plan.chunks[i - 1].sources &&
            shared_.stored_of(chunk) == shared_.stored_of(shared_.plan.chunks[i - 1]);
        good = known ? good : window->verified || verifier_.check(*window, chunk);
        if (!good) continue;
        // Once one chunk is bad the load has failed: report further ones, but change no more memory.
        if (!in_place && !verifier_.is_damaged() && !deliver_chunk(*window, chunk, live)) continue;
        const std::uint64_t bytes =
            chunk.length + (chunk.sources < 2 ? 0 : shared_.rows->stored[shared_.stored_of(chunk) + 1].length);
        (in_place ? shared_.direct_bytes : shared_.core.copied_bytes) += bytes;
        shared_.core.done_bytes += bytes;
        delivered += bytes;
    }
    targets_.flush(*window);
    shared_.core.spans.add(Phase::deliver, begin_ns, delivered);
    end(window);
}

/// Decode and store a chunk whose stored bytes are verified. Returns false if the decoded data is bad.
bool WindowDelivery::deliver_chunk(ReadInFlight& window, const WantedChunk& chunk, LiveAccess* live) {
    if (chunk.sources != 0) return compute(window, chunk, *live);
    const std::byte* const bytes = shared_.bytes_of(window, chunk);
    if (shared_.codec_of(chunk) != codec_raw) return decode(window, chunk, bytes, *live);
    targets_.store(window, chunk, bytes);
    return true;
}

void WindowDelivery::make_batches(const ReadWindowPtr& window) {
    const std::vector<std::shared_ptr<Device>>& devices = window->rows->devices;
    window->batches.reserve(devices.size());
    for (const std::shared_ptr<Device>& device : devices) {
        const auto copied = [this, window, &device = *device](int error) {
            const ReadWindow& planned = *window->planned;
            if (error != 0)
                shared_.core.record_outcome(device_fault(device, error, shared_.core.file(planned.file), planned.begin,
                                                         planned.end - planned.begin));
            on_stored(window);
        };
        window->batches.push_back(std::make_unique<CopyBatch>(nullptr, copied));
    }
}

void WindowDelivery::end(const ReadWindowPtr& window) {
    std::vector<std::unique_ptr<CopyBatch>> batches = std::move(window->batches);  // they keep the window alive
    const auto is_used = [](const std::unique_ptr<CopyBatch>& batch) { return !batch->copies.empty(); };
    window->storing = 1 + static_cast<std::size_t>(std::count_if(batches.begin(), batches.end(), is_used));
    for (std::size_t i = 0; i < batches.size(); ++i)
        if (is_used(batches[i])) window->rows->devices[i]->submit(std::move(batches[i]));
    on_stored(window);
}

void WindowDelivery::on_stored(const ReadWindowPtr& window) {
    if (--window->storing != 0) return;
    window->blocks.clear();
    shared_.core.end_window(window->aside);  // last: the job may be destroyed by it
}

void WindowDelivery::copy_edges(const ReadInFlight& window) {
    const ReadWindow& planned = *window.planned;
    const WantedChunk& first = shared_.plan.chunks[planned.first];
    const ReadExtent& row = shared_.rows->rows[first.row];
    if (window.head) {
        const std::uint64_t skipped = first.begin - planned.begin;
        std::memcpy(row.target() + (first.begin - row.offset), window.head.get() + skipped,
                    block_alignment_bytes - skipped);
    }
    if (window.tail) {
        const std::uint64_t low = block_floor(planned.needed_end);
        std::memcpy(row.target() + (low - row.offset), window.tail.get(), planned.needed_end - low);
    }
}

bool WindowDelivery::decode(ReadInFlight& window, const WantedChunk& chunk, const std::byte* bytes, LiveAccess& live) {
    const ReadExtent& row = window.rows->rows[chunk.row];
    const std::uint32_t data_bytes = window.rows->data_bytes(row, chunk.number);
    // Data decoded with a base has its own digest: no target changes before it matches.
    const bool is_dense = row.device == on_host && row.layout == contiguous && row.address != verify_only &&
        shared_.codec_of(chunk) != codec_xor;
    std::byte* const data = is_dense ? row.target() + chunk.logical_begin() : live.coding_room() + chunk_bytes;
    if (is_dense) shared_.touched[chunk.row] = true;
    if (!decode_any(window, shared_.digest_of(chunk), chunk.memory[0], bytes, {data, data_bytes}, live)) {
        verifier_.report_bad(shared_.digest_of(chunk));
        return false;
    }
    if (!is_dense) targets_.store_buffer(window, chunk, data_bytes, data);
    return true;
}

bool WindowDelivery::compute(ReadInFlight& window, const WantedChunk& chunk, LiveAccess& live) {
    static_assert(4 * chunk_bytes <= LiveAccess::coding_room_bytes);
    const ReadExtent& row = window.rows->rows[chunk.row];
    const std::uint32_t data_bytes = window.rows->data_bytes(row, chunk.number);
    const auto element = static_cast<cast::Element>(shared_.rows->stored[shared_.digest_of(chunk)].length);
    std::byte* const data = live.coding_room() + 3 * chunk_bytes;
    for (std::uint64_t half = 0; half < chunk.sources; ++half) {
        const std::uint64_t stored = shared_.stored_of(chunk) + half, begin = half * cast::half_bytes;
        const std::uint64_t singles_bytes = 2 * std::min(cast::half_bytes, data_bytes - begin);
        const ChunkPlace& place = shared_.rows->stored[stored];
        const std::byte* singles = shared_.bytes_of(window, place, chunk.memory[half].at);
        if (place.codec != codec_raw) {
            std::byte* const decoded = live.coding_room() + chunk_bytes;
            if (!decode_any(window, stored, chunk.memory[half], singles, {decoded, singles_bytes}, live)) {
                verifier_.report_bad(stored);
                return false;
            }
            singles = decoded;
        }
        // A NaN, which no writer rounds, may give other bits: the digest detects that.
        (void)cast::round(singles, singles_bytes / sizeof(float), element, data + begin);
    }
    if (xxh3_64(data, data_bytes) != shared_.rows->digests[shared_.digest_of(chunk)]) {
        verifier_.report_bad(shared_.digest_of(chunk));
        return false;
    }
    if (row.address != verify_only && !verifier_.is_damaged()) targets_.store_buffer(window, chunk, data_bytes, data);
    return true;
}

bool WindowDelivery::decode_any(const ReadInFlight& window, std::uint64_t stored, const ChunkMemory& memory,
                                const std::byte* bytes, std::span<std::byte> data, LiveAccess& live) const {
    const ChunkPlace& place = shared_.rows->stored[stored];
    const ChunkBase* const base = shared_.rows->base_of(stored);
    if (base == nullptr)
        return decode_chunk(place.codec, bytes, place.length, data.data(), data.size(), live.coding_room());
    static_assert(3 * chunk_bytes <= LiveAccess::coding_room_bytes);
    const std::byte* const near = shared_.bytes_of(window, base->place, memory.base_at);
    std::byte* const other = live.coding_room() + 2 * chunk_bytes;
    if (xxh3_64(near, base->place.length) != base->digest ||
        !decode_chunk(base->place.codec, near, base->place.length, other, data.size(), live.coding_room()) ||
        !decode_chunk(codec_planes, bytes, place.length, data.data(), data.size(), live.coding_room()))
        return false;
    xor_into(data.data(), other, data.size());
    return xxh3_64(data.data(), data.size()) == base->data_digest;
}

}  // namespace flowstone
