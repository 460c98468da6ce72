// Errors as values: what the world did to one range of one file.
#pragma once

#include <cstdint>
#include <string>

namespace flowstone {

/// One failed system call. `operation` is "write", "read", or "end of file" (then `error` is 0).
struct Fault {
    std::string operation;
    int error = 0;  // errno
    std::string path;
    std::uint64_t offset = 0;  // bytes; what had arrived before is not part of the range
    std::uint64_t length = 0;  // bytes
};

}  // namespace flowstone
