// Earlier contents of chunks, in host memory, so that later saves can store only the difference to them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace flowstone {

/// One chunk. Its mutex guards the other members.
struct CachedBase {
    std::mutex mutex;
    std::unique_ptr<std::byte[]> bytes;
    std::uint32_t length = 0;
    std::uint64_t digest = 0;       // of the cached bytes
    std::uint32_t stored = 0;       // their stored length, without a base
    std::uint32_t first = 0;        // stored length of the first chunk with them as base; 0: there is none
    std::uint64_t more = 0;         // sum of the lengths by which later chunks with this base were longer
};

/// Contents by the numbers of chunks, within a budget of bytes. Any thread.
class BaseCache {
public:
    BaseCache(std::uint64_t chunks, std::uint64_t budget_bytes);

    std::uint64_t budget_bytes() const { return budget_bytes_.load(); }
    std::uint64_t bytes() const { return bytes_.load(); }
    std::size_t size() const { return size_; }
    CachedBase& operator[](std::uint64_t chunk) { return chunks_[chunk]; }

    /// Cache these bytes of a chunk from now on, if there is room. The caller has locked it.
    void put(CachedBase& base, const std::byte* bytes, std::uint32_t length, std::uint64_t digest,
             std::uint32_t stored);
    /// Free the bytes, and cache nothing from now on, as another cache uses the budget.
    void release();
    /// For each chunk the digest of the cached bytes; 0: none are cached.
    std::vector<std::uint64_t> digests();

private:
    const std::size_t size_;
    std::atomic<std::uint64_t> budget_bytes_;
    std::unique_ptr<CachedBase[]> chunks_;
    std::atomic<std::uint64_t> bytes_{0};
};

}  // namespace flowstone
