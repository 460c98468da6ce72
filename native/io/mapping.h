// A file's bytes, mapped into this process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowstone {

/// A shared mapping of the first `bytes` bytes of a file, as long as the object lives. Forked children do not inherit
/// it. Touches no page.
///
/// The file must not become shorter meanwhile: the kernel would kill a process that touches removed pages.
class Mapping {
public:
    /// Throws std::invalid_argument for no bytes, std::system_error.
    Mapping(int fd, std::uint64_t bytes, bool writable);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(memory_); }
    std::uint64_t bytes() const { return bytes_; }

private:
    void* memory_;
    std::uint64_t bytes_;
};

/// Whether the system gives huge pages to files in memory only in mappings that ask for them.
bool has_huge_pages_by_advice();

/// Allocate all pages of [begin, end) of a file in memory, in huge pages if the system allows that; a shorter file is
/// extended to `end`. Its content stays. Blocks. Throws std::system_error (ENOMEM, ENOSPC: not enough memory).
void reserve_memory(int fd, std::uint64_t begin, std::uint64_t end);

}  // namespace flowstone
