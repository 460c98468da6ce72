#include "delayed_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace flowstone {
namespace {

constexpr int failure = 719;

[[noreturn]] void refuse(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

DelayedDevice::DelayedDevice(std::uint64_t bytes, std::chrono::microseconds delay) : bytes_(bytes), delay_(delay) {
    const int fd = ::memfd_create("flowstone-delayed-device", MFD_CLOEXEC);
    if (fd < 0) refuse("memfd_create");
    if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) refuse("ftruncate");
    void* const inside = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    outside_ = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (inside == MAP_FAILED || outside_ == MAP_FAILED) refuse("mmap");
    inside_ = static_cast<std::byte*>(inside);
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });  // if it fails, the test fails too
}

DelayedDevice::~DelayedDevice() {
    hold(false);
    thread_.request_stop();
    thread_.join();
    assert(pins_.empty());
    ::munmap(inside_, bytes_);
    ::munmap(outside_, bytes_);
}

void DelayedDevice::hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
}

void DelayedDevice::fail_after(std::uint64_t copies) {
    const std::lock_guard lock(mutex_);
    copies_left_ = copies;
}

std::uint64_t DelayedDevice::copies() const {
    const std::lock_guard lock(mutex_);
    return copies_;
}

std::uint64_t DelayedDevice::pinned_bytes() const {
    const std::lock_guard lock(mutex_);
    return pinned_bytes_;
}

int DelayedDevice::to_host(std::byte* target, std::uint64_t source, std::uint64_t bytes) {
    Item item{target, behind(source, bytes), bytes, nullptr};
    return push(item) ? 0 : failure;
}

int DelayedDevice::from_host(std::uint64_t target, const std::byte* source, std::uint64_t bytes) {
    Item item{behind(target, bytes), source, bytes, nullptr};
    return push(item) ? 0 : failure;
}

void DelayedDevice::then(Done done) {
    Item item{nullptr, nullptr, 0, std::move(done)};
    if (push(item)) return;
    {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
    }
    item.done(failure);
}

bool DelayedDevice::pin(std::byte* memory, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    pins_.emplace_back(memory, bytes);
    pinned_bytes_ += bytes;
    return true;
}

void DelayedDevice::unpin(std::byte* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(pins_.begin(), pins_.end(), [&](const auto& pin) { return pin.first == memory; });
    assert(found != pins_.end());
    pinned_bytes_ -= found->second;
    pins_.erase(found);
}

bool DelayedDevice::push(Item& item) {
    const std::lock_guard lock(mutex_);
    try {
        queue_.push_back(std::move(item));
    } catch (const std::bad_alloc&) {
        return false;  // the item is unchanged
    }
    changed_.notify_all();
    return true;
}

void DelayedDevice::run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [&] { return !held_ && !queue_.empty(); }), !queue_.empty()) {
        Item item = std::move(queue_.front());
        queue_.pop_front();
        busy_ = true;
        lock.unlock();
        perform(item);
        item.done = nullptr;
        lock.lock();
        busy_ = false;
        changed_.notify_all();
    }
}

void DelayedDevice::perform(Item& item) {
    if (item.target != nullptr) std::this_thread::sleep_for(delay_);
    int error = 0;
    {
        const std::lock_guard lock(mutex_);
        if (item.target != nullptr && error_ == 0) {
            if (copies_left_ == 0) error_ = failure;
            --copies_left_;
            ++copies_;
        }
        error = error_;
    }
    if (item.target != nullptr && error == 0) std::memcpy(item.target, item.source, item.bytes);
    if (item.done) item.done(error);
}

std::byte* DelayedDevice::behind(std::uint64_t address, std::uint64_t bytes) const {
    const std::uint64_t begin = address - this->address();
    if (address < this->address() || begin > bytes_ || bytes > bytes_ - begin) throw std::logic_error("not the device's memory");
    return inside_ + begin;
}

}  // namespace flowstone
