#include "io/read_verify.h"

#include "codec/digest.h"

namespace flowstone {

const std::byte* ReadShared::bytes_of(const ReadInFlight& window, const WantedChunk& chunk) const {
    const ReadWindow& planned = *window.planned;
    const ReadExtent& row = rows->rows[chunk.row];
    if (window.mapped) return reinterpret_cast<const std::byte*>(core.file(planned.file).mapped + chunk.begin);
    if (planned.direct) return row.target() + (chunk.begin - row.offset);
    return memory(window, chunk.memory[0].at);
}

bool ChunkVerifier::check(const ReadInFlight& window, const WantedChunk& chunk) {
    const std::uint64_t stored = shared_.stored_of(chunk);
    const bool good = check_bytes(stored, shared_.bytes_of(window, chunk), chunk.length);
    if (chunk.sources < 2) return good;
    const ChunkPlace& place = shared_.rows->stored[stored + 1];
    return check_bytes(stored + 1, shared_.bytes_of(window, place, chunk.memory[1].at), place.length) && good;
}

bool ChunkVerifier::check_bytes(std::uint64_t digest, const std::byte* bytes, std::uint32_t length) {
    if (xxh3_64(bytes, length) == shared_.rows->digests[digest]) return true;
    report_bad(digest);
    return false;
}

void ChunkVerifier::report_bad(std::uint64_t digest) {
    {
        const std::lock_guard lock(mutex_);
        bad_.insert(digest);
    }
    if (!shared_.options.stop_at_bad) return;
    damaged_ = true;
    shared_.core.stop();
}

std::vector<std::uint64_t> ChunkVerifier::bad_chunks() const {
    const std::lock_guard lock(mutex_);
    return {bad_.begin(), bad_.end()};
}

}  // namespace flowstone
