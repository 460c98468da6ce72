#include "io/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "bounds.h"
#include "io/proc_file.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14; older C libraries do not name it
#endif

namespace flowstone {
namespace {

constexpr const char* of_all_sizes = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
constexpr const char* of_two_mib =
    "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled";  // since Linux 6.11

bool chooses(const std::string& text, const char* choice) { return text.find(choice) != std::string::npos; }

/// Pages that are refused here are allocated at their first touch.
void touch_huge(int fd, std::uint64_t begin, std::uint64_t end) {
    struct stat found{};
    if (::fstat(fd, &found) != 0) return;
    if (static_cast<std::uint64_t>(found.st_size) < end && ::ftruncate(fd, static_cast<off_t>(end)) != 0) return;
    void* const memory =
        ::mmap(nullptr, end - begin, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(begin));
    if (memory == MAP_FAILED) return;
    // One call for each huge page, as other threads of this process cannot map memory during a call.
    bool goes_on = ::madvise(memory, end - begin, MADV_HUGEPAGE) == 0;
    for (std::uint64_t at = 0; goes_on && at < end - begin; at += huge_page_bytes)
        goes_on = ::madvise(static_cast<std::byte*>(memory) + at, 1, MADV_POPULATE_WRITE) == 0;
    ::munmap(memory, end - begin);
}

}  // namespace

Mapping::Mapping(int fd, std::uint64_t bytes, bool writable) : bytes_(bytes) {
    if (bytes == 0 || bytes > file_bytes_max)
        throw std::invalid_argument("bytes must be at least 1, and no more than a file can have");
    const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    memory_ = ::mmap(nullptr, bytes, access, MAP_SHARED, fd, 0);
    if (memory_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a file");
    // Both are hints: small pages are slower; and a child that inherits the mapping would keep the memory of a removed
    // file.
    (void)::madvise(memory_, bytes, MADV_HUGEPAGE);
    (void)::madvise(memory_, bytes, MADV_DONTFORK);
}

Mapping::~Mapping() { ::munmap(memory_, bytes_); }

bool has_huge_pages_by_advice() {
    const std::string own = read_whole(of_two_mib);
    if (own.empty() || chooses(own, "[inherit]")) return chooses(read_whole(of_all_sizes), "[advise]");
    return chooses(own, "[advise]");
}

void reserve_memory(int fd, std::uint64_t begin, std::uint64_t end) {
    if (begin >= end) return;
    if (begin % block_alignment_bytes != 0 || end > file_bytes_max)
        throw std::invalid_argument("begin and end must be at pages of a file");
    // fallocate ignores this advice. It is called afterwards in any case, as it fails if memory is short.
    if (end - begin >= huge_page_bytes && has_huge_pages_by_advice()) touch_huge(fd, begin, end);
    int result = 0;
    do result = ::fallocate(fd, 0, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
    while (result != 0 && errno == EINTR);
    if (result != 0) throw std::system_error(errno, std::generic_category(), "fallocate");
}

}  // namespace flowstone
