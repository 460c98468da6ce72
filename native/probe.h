// What this machine and a directory's file system really do.
#pragma once

#include <cstdint>
#include <string>

namespace flowstone {

/// Whether a real ring starts and moves a NOP. False in a build without io_uring.
bool has_io_uring();

/// The least alignment with which O_DIRECT wrote and read back a real temporary file, 0 where none
/// did. Throws std::system_error if the directory cannot be written. Blocks.
std::uint32_t probe_direct(const std::string& directory);

/// Give an empty file its size, with its blocks reserved where the file system can; sparse elsewhere.
/// Never writes data to emulate a reservation. Throws std::system_error (ENOSPC: the space is not there).
void reserve_file(int fd, std::uint64_t size_bytes);

}  // namespace flowstone
