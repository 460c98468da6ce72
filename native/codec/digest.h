// XXH3-64, seed 0 (https://github.com/Cyan4973/xxHash), as fast as the processor can.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/xxh3.h"

namespace flowstone {

std::uint64_t xxh3_64(const void* bytes, std::size_t length);

/// A digest of bytes that arrive in parts.
class Digester {
public:
    Digester();
    void update(const void* bytes, std::size_t length);
    std::uint64_t value() const;

private:
    FlowstoneXxh3 state_;
};

}  // namespace flowstone
