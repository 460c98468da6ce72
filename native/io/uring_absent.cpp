// Replaces uring.cpp in a build without io_uring.
#include <cerrno>
#include <system_error>

#include "io/backend.h"

namespace flowstone {

std::unique_ptr<Backend> make_uring_backend(std::uint32_t, FaultInjector, Priority) {
    throw std::system_error(ENOSYS, std::generic_category(), "this build has no io_uring backend");
}

}  // namespace flowstone
