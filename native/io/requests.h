// Plain requests, for studies of a device: no plan, no digests, no arena.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/backend.h"

namespace flowstone {

struct PlainRequest {
    std::uint64_t offset;   // bytes, in the file
    std::uint64_t address;  // of the memory
    std::uint64_t length;   // bytes, more than 0
    std::uint32_t file;
};

/// On an O_DIRECT file every offset, address and length is a multiple of its alignment.
struct PlainRequests {
    Direction direction = Direction::read;
    std::vector<std::shared_ptr<const File>> files;
    std::vector<PlainRequest> rows;
    bool register_memory = false;
};

/// Move all requests in order, at most `queue_depth` in flight, with a new backend ("io_uring", "posix", "sync").
/// Blocks until all are done or one has failed; returns the fault.
///
/// Throws std::invalid_argument (arguments), std::system_error (the backend cannot start, or memory
/// cannot be registered).
std::optional<Fault> run_requests(const std::string& backend, std::uint32_t queue_depth, const PlainRequests& requests);

}  // namespace flowstone
