// The last stage of a read window: its chunks are verified, decoded, and stored in their targets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "io/read_store.h"
#include "io/read_verify.h"
#include "io/read_window.h"

namespace flowstone {

/// Delivers windows that were read, and ends each once no device copies from its memory any more. Any thread.
class WindowDelivery {
public:
    WindowDelivery(ReadShared& shared, ChunkVerifier& verifier)
        : shared_(shared), verifier_(verifier), targets_(shared) {}

    /// For every chunk of a window: verify it in place, then (from the arena) store it into the targets of `rows`.
    /// `live` may be null if no chunk is encoded.
    void deliver(const ReadWindowPtr& window, const ReadExtents& rows, LiveAccess* live);
    /// End a window that stores no more bytes. Its memory is released when no device copies from it any more.
    void end(const ReadWindowPtr& window);

private:
    void make_batches(const ReadWindowPtr& window);
    void on_stored(const ReadWindowPtr& window);
    void copy_edges(const ReadInFlight& window);
    bool deliver_chunk(ReadInFlight& window, const WantedChunk& chunk, LiveAccess* live);
    /// Decode a chunk: directly into its target if that is one run of bytes on the host, otherwise by way of a buffer
    /// of `live`.
    bool decode(ReadInFlight& window, const WantedChunk& chunk, const std::byte* bytes, LiveAccess& live);
    /// Round a cast chunk from its sources into a buffer, and store it once its digest matches.
    bool compute(ReadInFlight& window, const WantedChunk& chunk, LiveAccess& live);
    /// Decode stored chunk number `stored`, with its base if it has one. Returns false if some bytes are damaged.
    bool decode_any(const ReadInFlight& window, std::uint64_t stored, const ChunkMemory& memory, const std::byte* bytes,
                    std::span<std::byte> data, LiveAccess& live) const;

    ReadShared& shared_;
    ChunkVerifier& verifier_;
    TargetWriter targets_;
};

}  // namespace flowstone
