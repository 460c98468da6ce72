// Verifies the chunks of a read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

#include "io/read_window.h"

namespace flowstone {

/// Compares stored chunks with their digests, and records mismatches. Any thread.
class ChunkVerifier {
public:
    explicit ChunkVerifier(ReadShared& shared) : shared_(shared) {}

    /// Check the stored bytes of a chunk; for a cast chunk, those of all its sources.
    bool check(const ReadInFlight& window, const WantedChunk& chunk);
    /// Record a bad chunk, by the index of its digest. The job stops, unless it reports all bad chunks.
    void report_bad(std::uint64_t digest);

    /// Whether a chunk was bad, so that the job must change no more memory.
    bool is_damaged() const { return damaged_.load(); }
    /// Indices of the digests that did not match so far, ascending.
    std::vector<std::uint64_t> bad_chunks() const;

private:
    bool check_bytes(std::uint64_t digest, const std::byte* bytes, std::uint32_t length);

    ReadShared& shared_;
    std::atomic<bool> damaged_{false};
    mutable std::mutex mutex_;
    std::set<std::uint64_t> bad_;  // under mutex_
};

}  // namespace flowstone
