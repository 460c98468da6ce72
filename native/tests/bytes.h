// Compares bytes by memcmp, which sanitizers check at once. `==` of vectors of std::byte, and algorithms, are checked
// byte by byte, which took most of the time of tests that compare megabytes.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

namespace flowstone {

inline bool same(const std::vector<std::byte>& bytes, const std::vector<std::byte>& other) {
    return bytes.size() == other.size() &&
        (bytes.empty() || std::memcmp(bytes.data(), other.data(), bytes.size()) == 0);
}

inline bool all_are(std::byte byte, const std::byte* bytes, std::size_t length) {
    return length == 0 || (bytes[0] == byte && std::memcmp(bytes, bytes + 1, length - 1) == 0);
}

}  // namespace flowstone
