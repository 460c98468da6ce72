// A job's registrations of files and memory with the backend, which save the system lookups for every request.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/arena.h"
#include "io/backend.h"

namespace flowstone {

/// Registers files (`with_files`) at construction, and an arena block when the job gets it for the second time: pinning
/// costs about one request, so it pays off for blocks that are reused. `block` may be called by one thread only.
class Registrations {
public:
    Registrations(std::shared_ptr<Backend> backend, const std::vector<std::shared_ptr<const File>>& files,
                  bool with_files)
        : backend_(std::move(backend)), files_(files.size(), -1) {
        if (!with_files || files.size() > files_max) return;
        for (std::size_t i = 0; i < files.size(); ++i)
            if (files[i] != nullptr) files_[i] = backend_->register_file(files[i]->fd);
    }
    /// No op may be in progress.
    ~Registrations() {
        for (const int slot : files_)
            if (slot >= 0) backend_->unregister_file(slot);
        for (const auto& [block, slot] : blocks_)
            if (slot >= 0) backend_->unregister_memory(slot);
    }
    Registrations(const Registrations&) = delete;
    Registrations& operator=(const Registrations&) = delete;

    int file(std::uint32_t file) const { return files_[file]; }

    int block(const Block& block, std::uint64_t block_bytes) {
        const auto [found, is_new] = blocks_.try_emplace(block.index(), unregistered);
        if (!is_new && found->second == unregistered)
            found->second = backend_->register_memory({block.bytes(), block_bytes});
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
