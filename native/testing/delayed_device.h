// A device made of host memory, for tests where there is no other.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "device.h"

namespace flowstone {

/// Its memory lies twice in the address space: at `address`, where touching it is a fault that ends the
/// process, as a pointer of a real device may be; and at `inside`, for whoever plays the device's own kernels.
/// A thread makes the copies, in order, each after a delay.
class DelayedDevice final : public Device {
public:
    /// Throws std::system_error.
    DelayedDevice(std::uint64_t bytes, std::chrono::microseconds delay);
    /// Makes what is queued.
    ~DelayedDevice() override;
    DelayedDevice(const DelayedDevice&) = delete;
    DelayedDevice& operator=(const DelayedDevice&) = delete;

    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(outside_); }
    std::byte* inside() const { return inside_; }

    /// Begin nothing, until `hold(false)`.
    void hold(bool held);
    /// Let every copy fail from now on, but for the next `copies`.
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
    /// False where there is no memory for one more; the item then stays.
    bool push(Item& item);
    void run(const std::stop_token& stop);
    void perform(Item& item);
    /// The memory behind an address of the device's; throws std::logic_error for what is not wholly its own.
    std::byte* behind(std::uint64_t address, std::uint64_t bytes) const;

    const std::uint64_t bytes_;
    const std::chrono::microseconds delay_;
    std::byte* inside_ = nullptr;
    void* outside_ = nullptr;
    mutable std::mutex mutex_;
    std::condition_variable_any changed_;
    std::deque<Item> queue_;
    bool busy_ = false;  // with one that is not in the queue any more
    bool held_ = false;
    int error_ = 0;  // of a copy that failed: sticky, as a real device's is
    std::uint64_t copies_ = 0;
    std::uint64_t copies_left_ = UINT64_MAX;
    std::uint64_t pinned_bytes_ = 0;
    std::deque<std::pair<std::byte*, std::uint64_t>> pins_;
    std::jthread thread_;
};

}  // namespace flowstone
