// A device made of host memory, for tests on machines without one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "device.h"

namespace flowstone {

/// Its memory is mapped twice: at `address`, where an access kills the process, as with a pointer of a real device; and
/// at `inside`, for tests that play the device's own kernels. A thread makes the copies, in order, each after a delay.
class DelayedDevice final : public Device {
public:
    /// Throws std::system_error.
    DelayedDevice(std::uint64_t bytes, std::chrono::microseconds delay);
    /// Makes the queued copies.
    ~DelayedDevice() override;
    DelayedDevice(const DelayedDevice&) = delete;
    DelayedDevice& operator=(const DelayedDevice&) = delete;

    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(outside_); }
    std::byte* inside() const { return inside_; }

    /// Begin no copies, until `hold(false)`.
    void hold(bool held);
    /// Make every copy fail from now on, except the next `copies`.
    void fail_after(std::uint64_t copies);
    /// Copies made so far.
    std::uint64_t copies() const;
    std::uint64_t pinned_bytes() const;

    int to_host(std::byte* target, std::uint64_t source, std::uint64_t bytes) override;
    int from_host(std::uint64_t target, const std::byte* source, std::uint64_t bytes) override;
    void then(Done done) override;
    bool pin(std::byte* memory, std::uint64_t bytes) override;
    void unpin(std::byte* memory) override;
    std::string name() const override { return "delayed:0"; }
    std::string describe(int) const override { return "DELAYED_ERROR"; }

private:
    struct Item {
        std::byte* target;  // null: a callback
        const std::byte* source;
        std::uint64_t bytes;
        Done done;
    };
    /// False if there is no memory for one more; the item is then unchanged.
    bool push(Item& item);
    void run(const std::stop_token& stop);
    void perform(Item& item);
    /// The memory behind a device address; throws std::logic_error for a range that is not wholly the device's.
    std::byte* behind(std::uint64_t address, std::uint64_t bytes) const;

    const std::uint64_t bytes_;
    const std::chrono::microseconds delay_;
    std::byte* inside_ = nullptr;
    void* outside_ = nullptr;
    mutable std::mutex mutex_;
    std::condition_variable_any changed_;
    std::deque<Item> queue_;
    bool busy_ = false;  // with an item that was already taken from the queue
    bool held_ = false;
    int error_ = 0;  // of a failed copy: sticky, as on a real device
    std::uint64_t copies_ = 0;
    std::uint64_t copies_left_ = UINT64_MAX;
    std::uint64_t pinned_bytes_ = 0;
    std::deque<std::pair<std::byte*, std::uint64_t>> pins_;
    std::jthread thread_;
};

}  // namespace flowstone
