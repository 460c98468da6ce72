// Probes for the I/O that this machine, and a directory's file system, actually support.
#pragma once

#include <cstdint>
#include <string>

namespace flowstone {

/// Whether a real io_uring ring starts and completes a NOP. False in a build without io_uring.
bool has_io_uring();

/// The smallest alignment with which O_DIRECT wrote and read back a real temporary file; 0 if none did. Throws
/// std::system_error if the directory cannot be written. Blocks.
std::uint32_t probe_direct(const std::string& directory);

/// Whether a file's pages are the storage itself: a file system in memory, or one with direct access (DAX). A mapping
/// of it is written without a page cache, and fsync does what the hardware needs. False if that is not known.
bool is_byte_addressable(int fd);

/// Set the size of an empty file, with blocks reserved if the file system can do that, otherwise sparse. Never writes
/// data to emulate a reservation. Throws std::system_error (ENOSPC: not enough space).
void reserve_file(int fd, std::uint64_t size_bytes);

}  // namespace flowstone
