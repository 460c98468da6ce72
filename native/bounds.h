// Every constant of the native core, with its origin.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowstone {

// Windows, slots and arena blocks are multiples of this. It is a multiple of every O_DIRECT alignment that Flowstone
// accepts (512 or 4096), so a range aligned to it is aligned for the device.
inline constexpr std::uint64_t block_alignment_bytes = 4096;

// The longest run that one digest covers: a chunk. Chunks start at each extent's start.
inline constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 20;

// Live memory that is only compared is read in parts of this length; a divisor of chunk_bytes.
inline constexpr std::uint64_t look_bytes = std::uint64_t{256} << 10;

// In WriteExtent::chunk: the row is written without digests.
inline constexpr std::uint64_t no_digest = ~std::uint64_t{0};

// In ReadExtent::address: read and verify, then discard.
inline constexpr std::uint64_t verify_only = 0;

// Arena blocks start at huge-page boundaries and hold at least one huge page. One chunk at any alignment (1 MiB + 8
// KiB) fits too, so reading needs no second limit.
inline constexpr std::uint64_t huge_page_bytes = std::uint64_t{2} << 20;

// The kernel moves at most 2 GiB - 4 KiB in one call (MAX_RW_COUNT); half of it is plenty.
inline constexpr std::uint64_t request_bytes_max = std::uint64_t{1} << 30;
inline constexpr std::uint32_t queue_depth_max = 4096;
inline constexpr std::uint32_t workers_max = 256;
inline constexpr std::size_t posix_threads_max = 16;

// Offsets are signed in the system's calls.
inline constexpr std::uint64_t file_bytes_max = (std::uint64_t{1} << 63) - block_alignment_bytes;

// The limit of numpy and torch. No layout has as many loops: dimensions of length 1 need none, and 2^64 bytes can be
// halved 63 times.
inline constexpr std::size_t dimensions_max = 64;

// Runs of at least this length are read faster directly into their target; shorter ones share a request with
// neighbours.
inline constexpr std::uint64_t direct_read_bytes_min = std::uint64_t{256} << 10;

// Chunks share one read across gaps up to this part (1/64) of their length. Saving one request is worth reading 64 KiB
// (30 us), yet a load of a part of a checkpoint reads at most 2 % more than that part.
inline constexpr std::uint64_t read_gap_part = 64;

// Attempts in a row without progress (EAGAIN, EBUSY, a count below the alignment) that count as a fault; pauses double
// from 10 us to 5 ms, so this takes about half a second.
inline constexpr int stalls_max = 100;

constexpr std::uint64_t round_down(std::uint64_t value, std::uint64_t unit) { return value - value % unit; }
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return round_down(value + unit - 1, unit); }
constexpr std::uint64_t block_floor(std::uint64_t value) { return round_down(value, block_alignment_bytes); }
constexpr std::uint64_t block_ceil(std::uint64_t value) { return round_up(value, block_alignment_bytes); }
constexpr std::uint64_t chunk_count(std::uint64_t length) { return length / chunk_bytes + (length % chunk_bytes != 0); }

}  // namespace flowstone
