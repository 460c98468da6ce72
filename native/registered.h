// A job's registrations with the backend, so that the system need not look things up for every request.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena.h"
#include "backend.h"

namespace flowstone {

/// Registers files (`with_files`) at construction, and an arena block when the job gets it for the second time: pinning
/// costs about one request, so it pays off for blocks that are reused. `block` may be called by one thread only.
class Registered {
public:
    Registered(std::shared_ptr<Backend> backend, const std::vector<std::shared_ptr<const File>>& files, bool with_files)
        : backend_(std::move(backend)), files_(files.size(), -1) {
        if (!with_files || files.size() > files_max) return;
        for (std::size_t i = 0; i < files.size(); ++i)
            if (files[i] != nullptr) files_[i] = backend_->register_file(files[i]->fd);
    }
    /// No op may be under way.
    ~Registered() {
        for (const int slot : files_)
            if (slot >= 0) backend_->unregister_file(slot);
        for (const auto& [block, slot] : blocks_)
            if (slot >= 0) backend_->unregister_memory(slot);
    }
    Registered(const Registered&) = delete;
    Registered& operator=(const Registered&) = delete;

    int file(std::uint32_t file) const { return files_[file]; }

    int block(const Block& block, std::uint64_t block_bytes) {
        const auto [found, is_new] = blocks_.try_emplace(block.index(), unregistered);
        if (!is_new && found->second == unregistered) found->second = backend_->register_memory({block.bytes(), block_bytes});
        return found->second;
    }

private:
    static constexpr std::size_t files_max = 16;  // a job of many files makes few requests to each
    static constexpr int unregistered = std::numeric_limits<int>::min();  // never an -errno

    std::shared_ptr<Backend> backend_;
    std::vector<int> files_;
    std::unordered_map<std::uint32_t, int> blocks_;
};

}  // namespace flowstone
