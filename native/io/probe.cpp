#include "io/probe.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "io/aligned.h"
#include "io/backend.h"
#include "bounds.h"

namespace flowstone {
namespace {

/// An unlinked temporary file, closed at destruction.
class ScratchFile {
public:
    explicit ScratchFile(const std::string& directory) {
        std::string path = directory + "/.flowstone-probe-XXXXXX";
        fd_ = ::mkostemp(path.data(), O_CLOEXEC);
        if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path);
        // Reopened by name, as segments are also opened with O_DIRECT.
        direct_fd_ = ::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC | O_NOFOLLOW);
        ::unlink(path.c_str());
    }
    ~ScratchFile() {
        ::close(fd_);
        if (direct_fd_ >= 0) ::close(direct_fd_);
    }
    ScratchFile(const ScratchFile&) = delete;
    ScratchFile& operator=(const ScratchFile&) = delete;
    int fd() const { return fd_; }
    int direct_fd() const { return direct_fd_; }

private:
    int fd_ = -1;
    int direct_fd_ = -1;
};

/// Write one block at its own alignment in file and memory, and read it back.
bool moves_blocks_of(const ScratchFile& file, std::uint32_t alignment) {
    const AlignedBytes memory = allocate_aligned(4 * block_alignment_bytes);
    // Not better aligned than requested: one unit past a 4 KiB boundary.
    std::byte* const written = memory.get() + alignment;
    std::byte* const read = memory.get() + 2 * block_alignment_bytes + alignment;
    std::memset(memory.get(), 0, 4 * block_alignment_bytes);
    std::memset(written, 0x5a, alignment);
    if (::pwrite(file.direct_fd(), written, alignment, alignment) != static_cast<ssize_t>(alignment)) return false;
    if (::pread(file.direct_fd(), read, alignment, alignment) != static_cast<ssize_t>(alignment)) return false;
    return std::memcmp(written, read, alignment) == 0;
}

}  // namespace

bool is_byte_addressable(int fd) {
    struct statfs file_system{};
    if (::fstatfs(fd, &file_system) != 0) return false;
    if (file_system.f_type == TMPFS_MAGIC || file_system.f_type == RAMFS_MAGIC) return true;
    struct statx found{};
    return ::statx(fd, "", AT_EMPTY_PATH, 0, &found) == 0 && (found.stx_attributes & STATX_ATTR_DAX) != 0;
}

bool has_io_uring() {
    try {
        make_uring_backend(1);  // this calls the kernel
        return true;
    } catch (const std::system_error&) {
        return false;  // for any reason, as the other backend works
    }
}

std::uint32_t probe_direct(const std::string& directory) {
    const ScratchFile file(directory);
    if (::ftruncate(file.fd(), 4 * static_cast<off_t>(block_alignment_bytes)) != 0)
        throw std::system_error(errno, std::generic_category(), directory);
    if (file.direct_fd() < 0) return 0;
    for (const std::uint32_t alignment : {512U, 1024U, 2048U, 4096U})
        if (moves_blocks_of(file, alignment)) return alignment;
    return 0;
}

void reserve_file(int fd, std::uint64_t size_bytes) {
    const auto size = static_cast<off_t>(size_bytes);
    int result = 0;
    do result = size == 0 ? 0 : ::fallocate(fd, 0, 0, size);
    while (result != 0 && errno == EINTR);
    if (result == 0 || (errno == EOPNOTSUPP && ::ftruncate(fd, size) == 0)) return;
    throw std::system_error(errno, std::generic_category(), "fallocate");
}

}  // namespace flowstone
