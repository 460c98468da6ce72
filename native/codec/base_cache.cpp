#include "codec/base_cache.h"

#include <cstring>

namespace flowstone {

BaseCache::BaseCache(std::uint64_t chunks, std::uint64_t budget_bytes)
    : size_(chunks), budget_bytes_(budget_bytes), chunks_(std::make_unique<CachedBase[]>(chunks)) {}

void BaseCache::put(CachedBase& base, const std::byte* bytes, std::uint32_t length, std::uint64_t digest,
                    std::uint32_t stored) {
    if (base.bytes == nullptr || base.length != length) {
        if (base.bytes != nullptr) bytes_ -= base.length;
        base.bytes.reset();
        base.digest = 0;
        if ((bytes_ += length) > budget_bytes_) {
            bytes_ -= length;
            return;
        }
        try {
            base.bytes.reset(new std::byte[length]);
        } catch (const std::bad_alloc&) {  // the chunk is stored without a base next time, too
            bytes_ -= length;
            return;
        }
    }
    std::memcpy(base.bytes.get(), bytes, length);
    base.length = length;
    base.digest = digest;
    base.stored = stored;
    base.first = 0;
    base.more = 0;
}

void BaseCache::release() {
    budget_bytes_ = 0;  // first: a chunk that a thread caches meanwhile is locked, and freed below
    for (std::size_t i = 0; i < size_; ++i) {
        const std::lock_guard lock(chunks_[i].mutex);
        if (chunks_[i].bytes == nullptr) continue;
        bytes_ -= chunks_[i].length;
        chunks_[i].bytes.reset();
        chunks_[i].digest = 0;
    }
}

std::vector<std::uint64_t> BaseCache::digests() {
    std::vector<std::uint64_t> digests(size_);
    for (std::size_t i = 0; i < size_; ++i) {
        const std::lock_guard lock(chunks_[i].mutex);
        digests[i] = chunks_[i].bytes == nullptr ? 0 : chunks_[i].digest;
    }
    return digests;
}

}  // namespace flowstone
