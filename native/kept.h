// What chunks were: their bytes, kept in host memory, so that later saves can code what has changed of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace flowstone {

/// One chunk. Its mutex guards the rest.
struct Kept {
    std::mutex mutex;
    std::unique_ptr<std::byte[]> bytes;
    std::uint32_t length = 0;
    std::uint64_t digest = 0;       // of these bytes
    std::uint32_t stored = 0;       // how long they are where they are stored by themselves
    std::uint32_t first = 0;        // how long the first chunk was that has them as base; 0: none was
    std::uint64_t more = 0;         // by how much later ones were longer, in all
};

/// By the numbers of chunks, within a budget of bytes. Any thread.
class KeptChunks {
public:
    KeptChunks(std::uint64_t chunks, std::uint64_t budget_bytes);

    std::uint64_t budget_bytes() const { return budget_bytes_.load(); }
    std::uint64_t bytes() const { return bytes_.load(); }
    std::size_t size() const { return size_; }
    Kept& operator[](std::uint64_t chunk) { return chunks_[chunk]; }

    /// Keep these bytes of a chunk from now on, if there is room. The caller has locked it.
    void keep(Kept& kept, const std::byte* bytes, std::uint32_t length, std::uint64_t digest, std::uint32_t stored);
    /// Keep nothing, and nothing from now on: its budget is another one's. Frees the bytes.
    void let_go();
    /// For each chunk the digest of the kept bytes; 0: there are none.
    std::vector<std::uint64_t> digests();

private:
    const std::size_t size_;
    std::atomic<std::uint64_t> budget_bytes_;
    std::unique_ptr<Kept[]> chunks_;
    std::atomic<std::uint64_t> bytes_{0};
};

}  // namespace flowstone
