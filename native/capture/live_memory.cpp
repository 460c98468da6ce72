#include "capture/live_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>

namespace flowstone {
namespace {

constexpr std::uint64_t file_bytes = std::uint64_t{256} << 10;  // stays in the L2 cache, between two copies
constexpr std::uint64_t mapping_bytes = 3 * huge_page_bytes;    // two huge pages, wherever the mapping begins

// The bytes that are read, their copy, and the bytes read next fit in an L2 cache of 1 MiB.
constexpr std::uint64_t piece_bytes = std::uint64_t{256} << 10;
// Lines are prefetched this far ahead: digesting this many bytes takes long enough for them to arrive before the copy.
constexpr std::uint64_t step_bytes = 2048;
constexpr std::uint64_t line_bytes = 64;

void fetch_ahead(const std::byte* begin, const std::byte* end) {
    for (; begin < end; begin += line_bytes) __builtin_prefetch(begin, 0, 2);  // never faults
}

std::atomic<LiveAccess*> kept{nullptr};  // kept between two loans; reachable for ever, so never freed at exit

bool is_refusal(int error) { return error == ENOSYS || error == EPERM || error == EACCES || error == ENOMEM; }

}  // namespace

static_assert(chunk_bytes + LiveAccess::bounce_bytes <= huge_page_bytes &&
              LiveAccess::coding_room_bytes <= 2 * huge_page_bytes);

LiveAccess::LiveAccess(Way way) : self_(::getpid()), way_(way) {
    mapping_ =
        ::mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) throw std::bad_alloc();
    room_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(mapping_), huge_page_bytes));
    (void)::madvise(mapping_, mapping_bytes, MADV_HUGEPAGE);  // a hint: without huge pages it is slower
    (void)::madvise(mapping_, mapping_bytes, MADV_DONTFORK);
}

LiveAccess::~LiveAccess() {
    ::munmap(mapping_, mapping_bytes);
    if (file_room_ != nullptr) ::munmap(file_room_, file_bytes);
    if (file_ >= 0) ::close(file_);
}

int LiveAccess::read(std::byte* out, const std::byte* source, std::uint64_t bytes) noexcept {
    const iovec run{const_cast<std::byte*>(source), bytes};
    return read(out, std::span(&run, 1));
}

int LiveAccess::read(std::byte* out, std::span<const iovec> runs) noexcept {
    if (way_ == Way::memory_file) return read_by_file(out, runs);
    std::uint64_t bytes = 0;
    for (const iovec& run : runs) bytes += run.iov_len;
    if (bytes == 0) return 0;
    // A write into "another" process, which is this one. The kernel looks up and pins the pages of the remote side one
    // by one, and reads the local side with plain loads that may fault. So the remote side is the buffer of this
    // object, in huge pages, and the local side the caller's memory; the reverse, with process_vm_readv, takes twice as
    // long.
    const iovec ours{out, bytes};
    const ssize_t written = ::process_vm_writev(self_, runs.data(), runs.size(), &ours, 1, 0);
    if (written == static_cast<ssize_t>(bytes)) return 0;
    if (written >= 0) return EFAULT;  // it stops at unmapped memory
    if (!is_refusal(errno)) return errno;
    if (errno != ENOMEM) way_ = Way::memory_file;
    return read_by_file(out, runs);
}

int LiveAccess::read(std::byte* out, const std::byte* source, std::uint64_t bytes, std::uint64_t ahead_bytes,
                     Digester& digester) noexcept {
    const std::byte* const last = source + bytes + ahead_bytes;
    while (bytes != 0) {
        const std::uint64_t piece = std::min(bytes, piece_bytes);
        if (const int error = read(out, source, piece)) return error;
        source += piece;
        bytes -= piece;
        for (std::uint64_t at = 0; at < piece; at += step_bytes) {
            const std::uint64_t step = std::min(step_bytes, piece - at);
            fetch_ahead(std::min(source + at, last), std::min(source + at + step, last));
            digester.update(out + at, step);
        }
        out += piece;
    }
    return 0;
}

int LiveAccess::read_by_file(std::byte* out, std::span<const iovec> runs) noexcept {
    if (const int error = open_file()) return error;
    for (const iovec& run : runs) {
        const auto* source = static_cast<const std::byte*>(run.iov_base);
        for (std::uint64_t left = run.iov_len; left != 0;) {
            const ssize_t taken = ::pwrite(file_, source, std::min(left, file_bytes), 0);
            if (taken < 0 && errno == EINTR) continue;
            if (taken < 0) return errno;
            std::memcpy(out, file_room_, static_cast<std::size_t>(taken));
            out += taken;
            source += taken;
            left -= static_cast<std::uint64_t>(taken);
        }
    }
    return 0;
}

int LiveAccess::open_file() noexcept {
    if (file_room_ != nullptr) return 0;
    if (file_ < 0) file_ = ::memfd_create("flowstone-live", MFD_CLOEXEC);
    if (file_ < 0) return errno;
    if (::ftruncate(file_, static_cast<off_t>(file_bytes)) != 0) return errno;
    void* const room = ::mmap(nullptr, file_bytes, PROT_READ, MAP_SHARED, file_, 0);
    if (room == MAP_FAILED) return errno;
    file_room_ = static_cast<std::byte*>(room);
    return 0;
}

bool LiveAccess::is_own() const noexcept { return self_ == ::getpid(); }

LentAccess::LentAccess() : live_(kept.exchange(nullptr)) {
    if (live_ && live_->is_own()) return;
    (void)live_.release();  // the parent's: its addresses mean something else in this process
    live_ = std::make_unique<LiveAccess>();
}

LentAccess::~LentAccess() { live_.reset(kept.exchange(live_.release())); }

}  // namespace flowstone
