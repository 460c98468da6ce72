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

}  // namespace flowstone
