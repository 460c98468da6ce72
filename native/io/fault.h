// Errors as values: a failure on one range of one file.
#pragma once

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace flowstone {

/// One failed system call. `operation` is "write", "read", "capture", "end of file" (then `error` is 0), or "find
/// memory for". Creating a Fault allocates nothing, so that lack of memory can be reported.
struct Fault {
    std::string operation;
    int error = 0;  // errno
    std::shared_ptr<const std::string> path;  // null: no file
    std::uint64_t offset = 0;  // bytes; bytes moved before the failure are not in the range
    std::uint64_t length = 0;  // bytes
};

/// The fault for lack of memory.
inline Fault no_memory(std::shared_ptr<const std::string> path) {
    return {"find memory for", ENOMEM, std::move(path), 0, 0};
}

}  // namespace flowstone
