// A file's bytes, mapped into this process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowstone {

/// The first `bytes` bytes of a file, shared with all that map it, until the object is gone. Forked children do not have
/// them. Touches no page.
///
/// The file must not become shorter meanwhile: the kernel would kill a process that touches what is gone.
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

/// Whether the system gives huge pages to files in memory where a mapping that asks for them is touched, and nowhere else.
bool has_huge_pages_by_advice();

/// Have the system give a file in memory all pages of [begin, end), in huge pages if it allows that; it has at least that size then. What
/// the file has stays. Blocks. Throws std::system_error (ENOMEM, ENOSPC: not enough memory).
void reserve_memory(int fd, std::uint64_t begin, std::uint64_t end);

}  // namespace flowstone
