#include "kept.h"

#include <cstring>

namespace flowstone {

KeptChunks::KeptChunks(std::uint64_t chunks, std::uint64_t budget_bytes)
    : size_(chunks), budget_bytes_(budget_bytes), chunks_(std::make_unique<Kept[]>(chunks)) {}

void KeptChunks::keep(Kept& kept, const std::byte* bytes, std::uint32_t length, std::uint64_t digest, std::uint32_t stored) {
    if (kept.bytes == nullptr || kept.length != length) {
        if (kept.bytes != nullptr) bytes_ -= kept.length;
        kept.bytes.reset();
        kept.digest = 0;
        if ((bytes_ += length) > budget_bytes_) {
            bytes_ -= length;
            return;
        }
        try {
            kept.bytes.reset(new std::byte[length]);
        } catch (const std::bad_alloc&) {  // the chunk is stored by itself next time, too
            bytes_ -= length;
            return;
        }
    }
    std::memcpy(kept.bytes.get(), bytes, length);
    kept.length = length;
    kept.digest = digest;
    kept.stored = stored;
    kept.first = 0;
    kept.more = 0;
}

void KeptChunks::let_go() {
    budget_bytes_ = 0;  // first: who keeps a chunk meanwhile has locked it, and it is freed after that
    for (std::size_t i = 0; i < size_; ++i) {
        const std::lock_guard lock(chunks_[i].mutex);
        if (chunks_[i].bytes == nullptr) continue;
        bytes_ -= chunks_[i].length;
        chunks_[i].bytes.reset();
        chunks_[i].digest = 0;
    }
}

std::vector<std::uint64_t> KeptChunks::digests() {
    std::vector<std::uint64_t> digests(size_);
    for (std::size_t i = 0; i < size_; ++i) {
        const std::lock_guard lock(chunks_[i].mutex);
        digests[i] = chunks_[i].bytes == nullptr ? 0 : chunks_[i].digest;
    }
    return digests;
}

}  // namespace flowstone
