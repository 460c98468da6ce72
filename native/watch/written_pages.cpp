#include "watch/written_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "bounds.h"
#include "watch/memory_areas.h"
#include "io/proc_file.h"

namespace flowstone {
namespace {

// The kernel's interfaces, declared here: the headers of most systems are older than Linux 6.7. They never change.

struct UffdApi {
    std::uint64_t api, features, ioctls;
};
struct UffdRegister {
    std::uint64_t start, length, mode, ioctls;
};
struct UffdWriteProtect {
    std::uint64_t start, length, mode;
};

constexpr int uffd_user_mode_only = 1;  // works without privileges
constexpr std::uint64_t uffd_api = 0xAA;
constexpr std::uint64_t feature_wp_unpopulated = 1U << 13;
constexpr std::uint64_t feature_wp_async = 1U << 15;
constexpr std::uint64_t register_mode_wp = 2;
constexpr std::uint64_t write_protect = 1;
constexpr unsigned long uffd_api_call = _IOWR(0xAA, 0x3F, UffdApi);
constexpr unsigned long uffd_register_call = _IOWR(0xAA, 0x00, UffdRegister);
constexpr unsigned long uffd_write_protect_call = _IOWR(0xAA, 0x06, UffdWriteProtect);

struct Region {
    std::uint64_t start, end, categories;
};
struct Scan {
    std::uint64_t size = sizeof(Scan), flags = 0, start = 0, end = 0, walk_end = 0, regions = 0, region_count = 0,
                  pages_max = 0;
    std::uint64_t inverted = 0, all_of = 0, any_of = 0, told = 0;
};
constexpr unsigned long scan_call = _IOWR('f', 16, Scan);
constexpr std::uint64_t scan_protects = 1, scan_only_prepared = 2;
constexpr std::uint64_t is_prepared = 1, is_written = 2, is_present = 8, is_swapped = 16, is_huge = 64;

#ifdef SYS_userfaultfd
constexpr long userfaultfd_number = SYS_userfaultfd;
#else
constexpr long userfaultfd_number = -1;
#endif

Scan scan_of(const Reach& reach) {
    Scan scan;
    scan.start = reach.begin;
    scan.end = reach.end;
    return scan;
}

std::string refused(const char* what, int error) {
    return std::string(what) + " is refused (" + std::strerror(error) + ")";
}

/// Bounds at which areas may be cut: at huge pages, since another cut would split one.
Reach widened(const Reach& reach, const Reach& within) {
    return {std::max(round_down(reach.begin, huge_page_bytes), within.begin),
            std::min(round_up(reach.end, huge_page_bytes), within.end)};
}

}  // namespace

std::uint64_t page_bytes() {
    static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
}

bool pages_are_merged() {
    if (!read_whole("/sys/kernel/mm/ksm/run").starts_with('1')) return false;
    return read_whole("/proc/self/ksm_stat").find("ksm_rmap_items 0\n") == std::string::npos;
}

std::unique_ptr<WrittenPages> WrittenPages::open(std::string& refusal) {
    Descriptor faults(static_cast<int>(::syscall(userfaultfd_number, O_CLOEXEC | O_NONBLOCK | uffd_user_mode_only)));
    if (faults.number() < 0) return refusal = refused("userfaultfd", errno), nullptr;
    UffdApi api{uffd_api, feature_wp_async | feature_wp_unpopulated, 0};
    if (::ioctl(faults.number(), uffd_api_call, &api) != 0)
        return refusal = "this kernel cannot report which pages were written (Linux 6.7 can)", nullptr;
    Descriptor pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    if (pagemap.number() < 0) return refusal = refused("/proc/self/pagemap", errno), nullptr;
    if (page_bytes() != block_alignment_bytes) return refusal = "the page size is not 4 KiB", nullptr;
    std::unique_ptr<WrittenPages> opened(new WrittenPages(faults.take(), pagemap.take()));
    if (!opened->works()) return refusal = "this kernel does not report which pages were written", nullptr;
    return opened;
}

WrittenPages::~WrittenPages() { forget(); }

void WrittenPages::forget() {
    if (faults_ >= 0) ::close(faults_);
    if (pagemap_ >= 0) ::close(pagemap_);
    faults_ = pagemap_ = -1;
}

/// Test with three pages, one written and one never touched, whether the written one is found.
bool WrittenPages::works() const {
    const std::uint64_t page = page_bytes();
    void* const memory = ::mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    auto* const bytes = static_cast<volatile char*>(memory);
    const auto begin = reinterpret_cast<std::uint64_t>(memory);
    const Reach all{begin, begin + 3 * page};
    bytes[0] = 1;
    bytes[page] = 1;
    bool works = register_reach(all) && protect(all, false) == 0 && !first_written(all);
    bytes[page] = 2;
    const std::optional<Reach> found = works ? first_written(all) : std::nullopt;
    works = found && found->begin == begin + page && found->end == begin + 2 * page;
    ::munmap(memory, 3 * page);
    return works;
}

bool WrittenPages::register_reach(const Reach& reach) const {
    UffdRegister call{reach.begin, reach.bytes(), register_mode_wp, 0};
    return ::ioctl(faults_, uffd_register_call, &call) == 0;
}

int WrittenPages::check_ours(const Reach& reach) const {
    // Scan for pages that are not prepared: prepared areas are skipped as a whole, and an unprepared one ends the scan.
    Scan scan = scan_of(reach);
    scan.flags = scan_only_prepared;
    scan.inverted = is_prepared;
    scan.all_of = is_prepared;
    if (::ioctl(pagemap_, scan_call, &scan) < 0) return errno;
    // Registering memory of this userfaultfd again changes nothing; that of another userfaultfd is refused.
    return register_reach(reach) ? 0 : errno;
}

int WrittenPages::set_protection(const Reach& reach, std::uint64_t mode) const {
    UffdWriteProtect call{reach.begin, reach.bytes(), mode};
    while (::ioctl(faults_, uffd_write_protect_call, &call) != 0)
        if (errno != EAGAIN) return errno;  // another thread forks: try again soon
    return 0;
}

int WrittenPages::protect(const Reach& reach, bool huge) const {
    if (const int error = check_ours(reach)) return error;
    if (huge) return set_protection(reach, write_protect);
    Scan scan = scan_of(reach);
    scan.flags = scan_protects | scan_only_prepared;
    scan.all_of = is_prepared;
    if (::ioctl(pagemap_, scan_call, &scan) < 0) return errno;
    return scan.walk_end == reach.end ? 0 : EAGAIN;
}

int WrittenPages::protect(const Reach& reach, std::vector<Reach>& written) const {
    std::array<Region, 256> regions;
    // If the scan ends with an error, its results so far are lost, so check first that all memory is prepared.
    if (const int error = check_ours(reach)) return error;
    for (std::uint64_t at = reach.begin; at < reach.end;) {
        Scan scan = scan_of({at, reach.end});
        scan.flags = scan_protects | scan_only_prepared;
        scan.all_of = is_prepared;
        scan.told = is_written | is_present | is_swapped;
        scan.regions = reinterpret_cast<std::uint64_t>(regions.data());
        scan.region_count = regions.size();
        const int count = ::ioctl(pagemap_, scan_call, &scan);
        if (count < 0 || scan.walk_end <= at) {
            const int error = count < 0 ? errno : EAGAIN;
            written.push_back({at, reach.end});
            return error;
        }
        for (const Region& region : std::span(regions).first(static_cast<std::size_t>(count)))
            if ((region.categories & is_written) != 0 || (region.categories & (is_present | is_swapped)) == 0)
                written.push_back({region.start, region.end});
        at = scan.walk_end;
    }
    return 0;
}

void WrittenPages::unprotect(const Reach& reach) const {
    if (check_ours(reach) == 0 && set_protection(reach, 0) == 0) return;
    // Some memory in between is not prepared, or unmapped, and later memory was skipped: protect the page runs that are
    // still prepared.
    std::array<Region, 64> regions;
    for (std::uint64_t at = reach.begin; at < reach.end;) {
        Scan scan = scan_of({at, reach.end});
        scan.inverted = is_written;
        scan.all_of = is_prepared | is_written;
        scan.regions = reinterpret_cast<std::uint64_t>(regions.data());
        scan.region_count = regions.size();
        const int count = ::ioctl(pagemap_, scan_call, &scan);
        if (count < 0 || scan.walk_end <= at) return;
        for (const Region& region : std::span(regions).first(static_cast<std::size_t>(count)))
            if (register_reach({region.start, region.end})) set_protection({region.start, region.end}, 0);
        at = scan.walk_end;
    }
}

std::optional<Reach> WrittenPages::first_written(const Reach& reach) const {
    std::array<Region, 2> regions{};
    Scan scan = scan_of(reach);
    scan.flags = scan_only_prepared;
    // Scan for unwritten pages (unchanged, in memory or swapped out), since unmapped pages are not reported.
    scan.inverted = is_written;
    scan.all_of = is_written;
    scan.any_of = is_present | is_swapped;
    scan.regions = reinterpret_cast<std::uint64_t>(regions.data());
    scan.region_count = regions.size();
    const int count = ::ioctl(pagemap_, scan_call, &scan);
    if (count <= 0) return reach;  // unmapped, or mapped anew
    if (regions[0].start > reach.begin) return Reach{reach.begin, regions[0].start};
    if (regions[0].end >= reach.end) return std::nullopt;
    return Reach{regions[0].end, count > 1 ? regions[1].start : reach.end};
}

std::uint64_t WrittenPages::first_small(const Reach& reach) const {
    Region region{};
    Scan scan = scan_of(reach);
    scan.inverted = is_huge;
    scan.all_of = is_huge;
    scan.pages_max = 1;
    scan.regions = reinterpret_cast<std::uint64_t>(&region);
    scan.region_count = 1;
    const int count = ::ioctl(pagemap_, scan_call, &scan);
    return count < 0 ? reach.begin : count == 0 ? reach.end : region.start;
}

bool WrittenPages::read_pagemap(std::uint64_t begin, std::span<std::uint64_t> entries) const {
    const auto offset = static_cast<off_t>(begin / page_bytes() * sizeof(entries[0]));
    return ::pread(pagemap_, entries.data(), entries.size_bytes(), offset) ==
        static_cast<ssize_t>(entries.size_bytes());
}

std::vector<bool> WrittenPages::prepare(std::span<const Reach> reaches) const {
    return register_own(reaches, [this](const Reach& reach) { return register_reach(reach); });
}

std::vector<bool> register_own(std::span<const Reach> reaches,
                               const std::function<bool(const Reach&)>& register_reach) {
    AreaRoom room;
    std::optional<std::vector<MemoryArea>> asked = asked_areas(reaches);
    if (!asked) {
        asked = all_areas();
        room.know(asked->size());
    }
    const std::vector<MemoryArea>& areas = *asked;
    std::vector<bool> ready(reaches.size(), false);
    std::vector<Reach> wanted(areas.size(),
                              Reach{~std::uint64_t{0}, 0});  // for each area: from the first to the last reach
    const auto first_at = [&](std::uint64_t address) {
        return std::partition_point(areas.begin(), areas.end(),
                                    [&](const MemoryArea& area) { return area.reach.end <= address; });
    };
    for (std::size_t i = 0; i < reaches.size(); ++i) {
        std::uint64_t at = reaches[i].begin;
        for (auto area = first_at(at);
             area != areas.end() && area->is_own && area->reach.begin <= at && at < reaches[i].end; ++area)
            at = area->reach.end;
        ready[i] = at >= reaches[i].end;
        if (!ready[i]) continue;
        for (auto area = first_at(reaches[i].begin); area != areas.end() && area->reach.begin < reaches[i].end;
             ++area) {
            Reach& own = wanted[static_cast<std::size_t>(area - areas.begin())];
            const Reach whole = widened(reaches[i], area->reach);
            own = {std::min(own.begin, whole.begin), std::max(own.end, whole.end)};
        }
    }
    for (const Reach& own : wanted) {
        // Registering the middle of an area cuts it in three.
        if (own.begin >= own.end || (room.take(2) && register_reach(own))) continue;
        for (std::size_t i = 0; i < reaches.size(); ++i) ready[i] = ready[i] && !reaches[i].overlaps(own);
    }
    return ready;
}

}  // namespace flowstone
