// The order of windows whose files are on several paths.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/backend.h"

namespace flowstone {

/// Reorder the windows of [begin, end) so that their files' paths take turns, with the order within each path
/// unchanged. So about the same share of each path has begun at any time. Null files count as path 0.
template <class Iterator>
void interleave_paths(Iterator begin, Iterator end, const std::vector<std::shared_ptr<const File>>& files) {
    using Window = typename std::iterator_traits<Iterator>::value_type;
    const auto path_of = [&](const Window& window) {
        return files[window.file] == nullptr ? 0U : files[window.file]->of_path;
    };
    std::unordered_map<std::uint32_t, std::uint64_t> bytes;
    for (Iterator at = begin; at != end; ++at) bytes[path_of(*at)] += at->end - at->begin;
    if (bytes.size() < 2) return;
    std::unordered_map<std::uint32_t, std::uint64_t> begun;
    std::vector<std::pair<double, Window>> ordered;
    ordered.reserve(static_cast<std::size_t>(end - begin));
    for (Iterator at = begin; at != end; ++at) {
        std::uint64_t& before = begun[path_of(*at)];
        ordered.emplace_back(
            static_cast<double>(before) / static_cast<double>(std::max<std::uint64_t>(bytes[path_of(*at)], 1)), *at);
        before += at->end - at->begin;
    }
    std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::transform(ordered.begin(), ordered.end(), begin, [](const auto& one) { return one.second; });
}

}  // namespace flowstone
