#include "io/requests.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include "bounds.h"

namespace flowstone {
namespace {

std::unique_ptr<Backend> make_backend(const std::string& name, std::uint32_t queue_depth) {
    if (queue_depth < 1 || queue_depth > queue_depth_max) throw std::invalid_argument("queue_depth must be 1 to 4096");
    if (name == "io_uring") return make_uring_backend(queue_depth);
    if (name == "posix") return make_posix_backend(queue_depth);
    if (name == "sync") return make_sync_backend();
    throw std::invalid_argument("backend must be 'io_uring', 'posix' or 'sync', not '" + name + "'");
}

/// The requests' memory as a few long ranges, each registered with the backend.
class Ranges {
public:
    Ranges(Backend& backend, const std::vector<PlainRequest>& rows) : backend_(backend) {
        std::vector<PlainRequest> sorted = rows;
        std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
        for (const PlainRequest& row : sorted) {
            const std::uint64_t end = row.address + row.length;
            // The kernel accepts ranges of up to 1 GiB.
            if (!ranges_.empty() && row.address <= ranges_.back().end &&
                end - ranges_.back().begin <= request_bytes_max)
                ranges_.back().end = std::max(ranges_.back().end, end);
            else
                ranges_.push_back({row.address, end, -1});
        }
        for (Range& range : ranges_) {
            range.slot = backend_.register_memory({reinterpret_cast<void*>(range.begin), range.end - range.begin});
            if (range.slot < 0) {
                const int error = -range.slot;
                forget();
                throw std::system_error(error, std::generic_category(), "registering the requests' memory");
            }
        }
    }
    ~Ranges() { forget(); }
    Ranges(const Ranges&) = delete;
    Ranges& operator=(const Ranges&) = delete;

    int slot(const PlainRequest& row) const {
        const auto after =
            std::upper_bound(ranges_.begin(), ranges_.end(), row.address,
                             [](std::uint64_t address, const Range& range) { return address < range.begin; });
        if (after == ranges_.begin()) return -1;
        const Range& range = *(after - 1);
        return row.address + row.length <= range.end ? range.slot : -1;
    }

private:
    struct Range {
        std::uint64_t begin;
        std::uint64_t end;
        int slot;
    };

    void forget() {
        for (const Range& range : ranges_)
            if (range.slot >= 0) backend_.unregister_memory(range.slot);
        ranges_.clear();
    }

    Backend& backend_;
    std::vector<Range> ranges_;
};

/// The number of requests that are not done yet, and the first fault.
class Tally {
public:
    explicit Tally(std::size_t count) : left_(count) {}

    void end(const Outcome& outcome) {
        const std::lock_guard lock(mutex_);
        if (outcome.fault && !fault_) {
            fault_ = outcome.fault;
            stopping_ = true;
        }
        if (--left_ == 0) done_.notify_all();
    }

    std::optional<Fault> wait() {
        std::unique_lock lock(mutex_);
        done_.wait(lock, [&] { return left_ == 0; });
        return fault_;
    }

    const std::atomic<bool>& stopping() const { return stopping_; }

private:
    std::mutex mutex_;
    std::condition_variable done_;
    std::size_t left_;
    std::optional<Fault> fault_;
    std::atomic<bool> stopping_{false};
};

void check(const PlainRequests& requests) {
    for (const PlainRequest& row : requests.rows) {
        if (row.file >= requests.files.size()) throw std::invalid_argument("file is not an index into files");
        if (row.length == 0 || row.length > request_bytes_max)
            throw std::invalid_argument("length must be 1 byte to 1 GiB");
        if (row.offset > file_bytes_max - row.length) throw std::invalid_argument("offset is beyond any file");
    }
}

}  // namespace

std::optional<Fault> run_requests(const std::string& name, std::uint32_t queue_depth, const PlainRequests& requests) {
    check(requests);
    const std::unique_ptr<Backend> backend = make_backend(name, queue_depth);
    std::optional<Ranges> ranges;
    if (requests.register_memory) ranges.emplace(*backend, requests.rows);
    Tally tally(requests.rows.size());
    if (requests.rows.empty()) return std::nullopt;
    for (const PlainRequest& row : requests.rows) {
        auto op = std::make_unique<Op>();
        op->direction = requests.direction;
        op->file = requests.files[row.file].get();
        op->offset = row.offset;
        op->parts.push_back({reinterpret_cast<void*>(row.address), row.length});
        op->needed_bytes = row.length;
        op->memory_slot = ranges ? ranges->slot(row) : -1;
        op->stopping = &tally.stopping();
        op->done = [&tally](const Outcome& outcome) { tally.end(outcome); };
        try {
            backend->submit(std::move(op));
        } catch (const std::bad_alloc&) { tally.end({no_memory(requests.files[row.file]->path), false}); }
    }
    return tally.wait();
}

}  // namespace flowstone
