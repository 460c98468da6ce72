// The areas of this process's memory: the kernel's mappings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace flowstone {

/// Addresses [begin, end), in complete pages.
struct Reach {
    std::uint64_t begin;
    std::uint64_t end;

    std::uint64_t bytes() const { return end - begin; }
    bool overlaps(const Reach& other) const { return begin < other.end && other.begin < end; }
    bool operator==(const Reach&) const = default;
};

struct MemoryArea {
    Reach reach;
    bool is_own;  // writable, private to this process, and not a file's

    bool operator==(const MemoryArea&) const = default;
};

/// All areas, ascending: takes about a microsecond for each, and many jobs have thousands.
std::vector<MemoryArea> all_areas();

/// The areas that overlap `reaches`, ascending, queried one by one (Linux 6.11). nullopt if the system refuses.
std::optional<std::vector<MemoryArea>> asked_areas(std::span<const Reach> reaches);

/// Limits how many areas may be created by cutting existing ones. One object for each operation that cuts areas.
class AreaRoom {
public:
    /// Whether `more` areas may be created; then they count as created.
    bool take(std::size_t more);
    /// Set the current number of areas.
    void know(std::size_t count);

    // Half of Linux's default limit for a process (vm.max_map_count); the other half is for the caller.
    static constexpr std::size_t areas_max = 32'768;
    // The most areas created between two counts, so that the limit is exceeded by at most this number.
    static constexpr std::size_t uncounted_max = 256;

private:
    bool is_counted_ = false;
};

}  // namespace flowstone
