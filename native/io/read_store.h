// Stores the verified data of a read in its targets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/read_window.h"

namespace flowstone {

/// Puts the data of verified chunks into targets: on the host at once; on devices by copies from the window's memory,
/// which complete later. Targets are known. Any thread; one thread per window.
class TargetWriter {
public:
    explicit TargetWriter(ReadShared& shared) : shared_(shared) {}

    /// Store data that stays in the window's memory until the copies of its batches are done.
    void store(ReadInFlight& window, const WantedChunk& chunk, const std::byte* bytes);
    /// Store `data_bytes` of data from a buffer that is reused after this returns.
    void store_buffer(ReadInFlight& window, const WantedChunk& chunk, std::uint32_t data_bytes, const std::byte* data);
    /// Put the remaining data of this window into its device's batch. Call it after the last `store`.
    void flush(ReadInFlight& window);

private:
    void send(const ReadInFlight& window, const WantedChunk& chunk, const std::byte* bytes);

    ReadShared& shared_;
};

}  // namespace flowstone
