// What this process's memory consists of: the kernel's areas (its mappings).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace flowstone {

/// Addresses [begin, end), whole pages.
struct Reach {
    std::uint64_t begin;
    std::uint64_t end;

    std::uint64_t bytes() const { return end - begin; }
    bool overlaps(const Reach& other) const { return begin < other.end && other.begin < end; }
    bool operator==(const Reach&) const = default;
};

struct MemoryArea {
    Reach reach;
    bool is_own;  // may be written, no other process has page tables for it, and no file is behind it

    bool operator==(const MemoryArea&) const = default;
};

/// All, ascending: about a microsecond for each, and many jobs have thousands.
std::vector<MemoryArea> all_areas();

/// Those that the reaches have a part of, ascending; asked for one by one, of Linux 6.11 on. None if the system refuses.
std::optional<std::vector<MemoryArea>> asked_areas(std::span<const Reach> reaches);

/// How many areas may be made of those that there are, by cutting them. One object for each time that some are made.
class AreaRoom {
public:
    /// Whether there may be so many more; they count as made from now on.
    bool take(std::size_t more);
    /// There are so many.
    void know(std::size_t count);

    // Half of what Linux allows a process by default (vm.max_map_count): the rest is the caller's.
    static constexpr std::size_t areas_max = 32'768;
    // Made between two counts: more than the half by so many at most, however many the caller has made meanwhile.
    static constexpr std::size_t uncounted_max = 256;

private:
    bool is_counted_ = false;
};

}  // namespace flowstone
