#include "watch/memory_areas.h"

#include <fcntl.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

#include "io/proc_file.h"

namespace flowstone {
namespace {

/// The kernel's PROCMAP_QUERY, declared here: the headers of most systems are older than Linux 6.11. It never changes.
struct Query {
    std::uint64_t size = sizeof(Query), flags = 0, address = 0;
    std::uint64_t begin = 0, end = 0, permissions = 0, page_bytes = 0, offset = 0, inode = 0;  // the answer
    std::uint32_t device_major = 0, device_minor = 0, name_bytes = 0, build_id_bytes = 0;
    std::uint64_t name = 0, build_id = 0;
};
constexpr unsigned long query_call = _IOWR('f', 17, Query);
constexpr std::uint64_t this_or_next = 16;
constexpr std::uint64_t is_writable = 2, is_shared = 8;

constexpr const char* list_path = "/proc/self/maps";

bool is_own(const Query& found) {
    const bool is_file = found.inode != 0 || found.device_major != 0 || found.device_minor != 0;
    return (found.permissions & is_writable) != 0 && (found.permissions & is_shared) == 0 && !is_file;
}

/// `rest` is a line from the permissions on: "rw-p offset device inode name". A name may contain any text.
bool is_own(std::string_view rest) {
    if (rest.size() < 5 || rest[1] != 'w' || rest[3] != 'p') return false;
    rest.remove_prefix(std::min(rest.find(' ', 5), rest.size()));
    return rest == " 00:00 0" || rest.starts_with(" 00:00 0 ");
}

std::atomic<std::size_t> known_count{0};      // the last count, and areas taken since
std::atomic<std::size_t> uncounted_left{0};   // areas until the next count

}  // namespace

std::vector<MemoryArea> all_areas() {
    const std::string text = read_whole(list_path);
    std::vector<MemoryArea> areas;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find('\n', at), text.size());
        const std::string_view line = std::string_view(text).substr(at, end - at);  // "begin-end", then the rest
        at = end + 1;
        MemoryArea area{};
        const char* const last = line.data() + line.size();
        const auto begin = std::from_chars(line.data(), last, area.reach.begin, 16);
        if (begin.ec != std::errc() || begin.ptr == last) continue;
        const auto stop = std::from_chars(begin.ptr + 1, last, area.reach.end, 16);
        if (stop.ec != std::errc() || stop.ptr == last) continue;
        area.is_own = is_own(std::string_view(stop.ptr + 1, static_cast<std::size_t>(last - stop.ptr - 1)));
        areas.push_back(area);
    }
    return areas;
}

std::optional<std::vector<MemoryArea>> asked_areas(std::span<const Reach> reaches) {
    const Descriptor list(::open(list_path, O_RDONLY | O_CLOEXEC));
    std::vector<Reach> ascending(reaches.begin(), reaches.end());
    std::sort(ascending.begin(), ascending.end(), [](const Reach& a, const Reach& b) { return a.begin < b.begin; });
    std::vector<MemoryArea> areas;
    for (const Reach& reach : ascending) {
        std::uint64_t at = areas.empty() ? reach.begin : std::max(reach.begin, areas.back().reach.end);
        while (at < reach.end) {
            Query query;
            query.flags = this_or_next;
            query.address = at;
            if (::ioctl(list.number(), query_call, &query) != 0) {
                if (errno == ENOENT) break;  // there are no more
                return std::nullopt;
            }
            if (query.end <= at) return std::nullopt;  // an unknown kernel
            if (query.begin >= reach.end) break;
            areas.push_back({{query.begin, query.end}, is_own(query)});
            at = query.end;
        }
    }
    return areas;
}

void AreaRoom::know(std::size_t count) {
    known_count = count;
    uncounted_left = uncounted_max;
    is_counted_ = true;
}

bool AreaRoom::take(std::size_t more) {
    if (!is_counted_ && (known_count + more > areas_max || uncounted_left < more)) know(all_areas().size());
    if (known_count + more > areas_max) return false;
    known_count += more;
    // Other threads may take some at the same time.
    std::size_t left = uncounted_left;
    while (!uncounted_left.compare_exchange_weak(left, left - std::min(left, more))) {}
    return true;
}

}  // namespace flowstone
