// Errors as values: what the world did to one range of one file.
#pragma once

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace flowstone {

/// One failed system call. `operation` is "write", "read", "capture", "end of file" (then `error` is 0), or "find memory for".
/// None of them takes memory to tell: where there is none, nobody could.
struct Fault {
    std::string operation;
    int error = 0;  // errno
    std::shared_ptr<const std::string> path;  // null: of no file
    std::uint64_t offset = 0;  // bytes; what had arrived before is not part of the range
    std::uint64_t length = 0;  // bytes
};

/// There was no memory for what had to be done.
inline Fault no_memory(std::shared_ptr<const std::string> path) { return {"find memory for", ENOMEM, std::move(path), 0, 0}; }

}  // namespace flowstone
