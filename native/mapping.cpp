#include "mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "bounds.h"

namespace flowstone {

Mapping::Mapping(int fd, std::uint64_t bytes, bool writable) : bytes_(bytes) {
    if (bytes == 0 || bytes > file_bytes_max) throw std::invalid_argument("bytes: a mapping has some, and no more than a file");
    const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    memory_ = ::mmap(nullptr, bytes, access, MAP_SHARED, fd, 0);
    if (memory_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a file");
    // Hints: small pages are slower; and a child that inherits the mapping would keep the memory of a removed file.
    (void)::madvise(memory_, bytes, MADV_HUGEPAGE);
    (void)::madvise(memory_, bytes, MADV_DONTFORK);
}

Mapping::~Mapping() { ::munmap(memory_, bytes_); }

}  // namespace flowstone
