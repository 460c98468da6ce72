#include "io/read_store.h"

#include <cstring>
#include <future>
#include <utility>

#include "bounds.h"

namespace flowstone {
namespace {

/// Add copies of verified bytes [begin, end) of a row's extent into its target on a device. May throw std::bad_alloc.
void add_copies(CopyBatch& batch, const ReadExtents& rows, const ReadExtent& row, std::uint64_t begin,
                std::uint64_t end, const std::byte* bytes) {
    auto* const source = const_cast<std::byte*>(bytes);  // it is only read
    if (row.layout == contiguous) return batch.add({source, row.address + begin, end - begin, false});
    for (const StridedRuns& runs : rows.layouts[static_cast<std::size_t>(row.layout)].runs(begin, end)) {
        const std::uint64_t target = row.address + static_cast<std::uint64_t>(runs.memory);
        const auto stride = static_cast<std::uint64_t>(runs.memory_stride);  // a negative stride becomes too long
        if (runs.count > 1 && runs.bytes <= stride && stride <= device_stride_max) {
            batch.add({source + runs.packed, target, runs.bytes, false, runs.count, runs.packed_stride, stride});
            continue;
        }
        for (std::uint64_t i = 0; i < runs.count; ++i)
            batch.add({source + runs.packed + i * runs.packed_stride, target + i * stride, runs.bytes, false});
    }
}

}  // namespace

void TargetWriter::store_buffer(ReadInFlight& window, const WantedChunk& chunk, std::uint32_t data_bytes,
                                const std::byte* data) {
    const WantedChunk whole{chunk.begin, data_bytes, chunk.row, chunk.file, chunk.number};
    if (window.rows->rows[chunk.row].device == on_host)
        store(window, whole, data);
    else
        send(window, whole, data);
}

void TargetWriter::flush(ReadInFlight& window) {
    const VerifiedRun run = std::exchange(window.run, {});
    if (run.bytes == nullptr) return;
    const ReadExtent& row = window.rows->rows[run.row];
    add_copies(*window.batches[static_cast<std::size_t>(row.device)], *window.rows, row, run.begin, run.end, run.bytes);
}

/// Send data to a device, from a buffer that the next chunk reuses.
void TargetWriter::send(const ReadInFlight& window, const WantedChunk& chunk, const std::byte* bytes) {
    const ReadExtent& row = window.rows->rows[chunk.row];
    const std::shared_ptr<Device>& device = window.rows->devices[static_cast<std::size_t>(row.device)];
    shared_.touched[chunk.row] = true;
    std::promise<int> copied;
    auto batch = std::make_unique<CopyBatch>(nullptr, [&copied](int error) { copied.set_value(error); });
    add_copies(*batch, *window.rows, row, chunk.logical_begin(), chunk.logical_begin() + chunk.length, bytes);
    device->submit(std::move(batch));
    if (const int error = copied.get_future().get())
        shared_.core.record_outcome(
            device_fault(*device, error, shared_.core.file(chunk.file), chunk.begin, chunk.length));
}

void TargetWriter::store(ReadInFlight& window, const WantedChunk& chunk, const std::byte* bytes) {
    const ReadExtent& row = window.rows->rows[chunk.row];
    if (row.address == verify_only) return;
    shared_.touched[chunk.row] = true;
    const std::uint64_t begin = chunk.logical_begin();
    if (row.device != on_host) {
        const VerifiedRun more{bytes, chunk.row, begin, begin + chunk.length};
        if (window.run.continues_with(more)) {
            window.run.end = more.end;
            return;
        }
        flush(window);
        window.run = more;
    } else if (row.layout == contiguous)
        std::memcpy(row.target() + begin, bytes, chunk.length);
    else
        window.rows->layouts[static_cast<std::size_t>(row.layout)].scatter(begin, begin + chunk.length, bytes,
                                                                           row.target());
}

}  // namespace flowstone
