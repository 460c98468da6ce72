#include "tests/simulated/simulated_gpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "codec/digest.h"
#include "gpu/digest_kernel.h"
#include "tests/simulated/simulated_world.h"

namespace flowstone {

using namespace simulated;

namespace {

[[noreturn]] void refuse(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

SimulatedGpu::SimulatedGpu(std::uint64_t bytes, std::chrono::microseconds delay) : bytes_(bytes), delay_(delay) {
    const int fd = ::memfd_create("flowstone-simulated-gpu", MFD_CLOEXEC);
    if (fd < 0) refuse("memfd_create");
    if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) refuse("ftruncate");
    void* const inside = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    outside_ = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (inside == MAP_FAILED || outside_ == MAP_FAILED) refuse("mmap");
    inside_ = static_cast<std::byte*>(inside);
    {
        const std::lock_guard lock(world().mutex);
        ordinal_ = world().next++;
        world().gpus[ordinal_] = this;
    }
    current_ = make_stream();
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });  // if it fails, the test fails too
}

SimulatedGpu::~SimulatedGpu() {
    hold(false);
    thread_.request_stop();
    thread_.join();
    assert(host_memory_.empty() && "host memory of the driver's was not given back");
    assert(modules_.empty() && "a module was not unloaded");
    assert(pins_.empty() && "memory was given back while the GPU could still write into it");
    assert(std::all_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->others; }) &&
           "a stream was not destroyed");
    const std::lock_guard lock(world().mutex);
    world().gpus.erase(ordinal_);
    ::munmap(inside_, bytes_);
    ::munmap(outside_, bytes_);
}

void SimulatedGpu::hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
}

void SimulatedGpu::fail_after(std::uint64_t copies) {
    const std::lock_guard lock(mutex_);
    copies_left_ = copies;
}

void SimulatedGpu::refuse_next() {
    const std::lock_guard lock(mutex_);
    refuses_ = true;
}

void SimulatedGpu::limit_pinned(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    pinned_max_ = bytes;
}

std::vector<SimulatedGpu::StreamFacts> SimulatedGpu::streams() const {
    const std::lock_guard lock(mutex_);
    std::vector<StreamFacts> found;
    for (const auto& stream : streams_)
        if (!stream->others) found.push_back({stream->flags, stream->priority});
    return found;
}

std::uintptr_t SimulatedGpu::make_stream() {
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::make_unique<Stream>(Stream{this, 0, 0, true}));
    return reinterpret_cast<std::uintptr_t>(streams_.back().get());
}

void SimulatedGpu::launch(std::uintptr_t stream, std::function<void()> kernel) {
    Stream& into = *reinterpret_cast<Stream*>(stream);
    (void)launch_module(
        into,
        [kernel = std::move(kernel)] {
            kernel();
            return success;
        },
        false);
}

int SimulatedGpu::launch_module(Stream& stream, std::function<int()> kernel, bool is_module,
                                std::uint64_t copied_bytes) {
    {
        const std::lock_guard lock(mutex_);
        if (stream.recording != nullptr) {
            graph_.push_back(std::move(kernel));
            return success;
        }
        if (is_module) ++modules_pending_;
    }
    Item item;
    item.is_module = is_module;
    item.copied_bytes = stream.others ? 0 : copied_bytes;
    item.kernel = std::move(kernel);
    push(stream, std::move(item));
    const std::lock_guard lock(mutex_);
    return error_;
}

void SimulatedGpu::settle() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
        const bool is_busy =
            std::any_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->busy; });
        return error_ != 0 || modules_pending_ == 0 || (!is_busy && next_ready_locked() == nullptr);
    });
}

void SimulatedGpu::fill(bool is_full) {
    const std::lock_guard lock(mutex_);
    is_full_ = is_full;
}

void SimulatedGpu::refuse_modules() {
    const std::lock_guard lock(mutex_);
    refuses_modules_ = true;
}

void SimulatedGpu::unmap(std::uint64_t begin, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    gone_ = {begin, begin + bytes};
}

/// Where a kernel finds memory: the GPU's, or pinned host memory. Null: it is neither.
std::byte* SimulatedGpu::reach(std::uint64_t address, std::uint64_t bytes) const {
    const std::uint64_t begin = address - this->address();
    if (address >= this->address() && begin <= bytes_ && bytes <= bytes_ - begin)
        return is_there(begin, bytes) ? inside_ + begin : nullptr;
    const auto find = [&](const auto& ranges, std::byte* host) {
        const auto holds = [&](const auto& range) {
            return range.first <= host && host + bytes <= range.first + range.second;
        };
        return std::any_of(ranges.begin(), ranges.end(), holds) ? host : nullptr;
    };
    const std::lock_guard lock(mutex_);
    std::byte* const made = find(host_memory_, reinterpret_cast<std::byte*>(address));
    return made != nullptr ? made : find(pins_, reinterpret_cast<std::byte*>(address - pinned_skew));
}

/// The rows of a kernel's table, as the kernels' text reads them, not as our structs have them. `act` gets an address,
/// and two numbers of 32 bits; false: it has met memory that is not there.
template <class Act> int SimulatedGpu::each_row(std::uint64_t table, std::uint32_t rows, Act act) const {
    const std::byte* const entries = rows == 0 ? nullptr : reach(table, std::uint64_t{rows} * 16);
    if (rows != 0 && (entries == nullptr || table % 8 != 0)) return illegal_address;
    for (std::uint32_t i = 0; i < rows; ++i) {
        std::uint64_t address = 0;
        std::uint32_t first = 0, second = 0;
        std::memcpy(&address, entries + 16 * std::uint64_t{i}, 8);
        std::memcpy(&first, entries + 16 * std::uint64_t{i} + 8, 4);
        std::memcpy(&second, entries + 16 * std::uint64_t{i} + 12, 4);
        if (!act(address, first, second)) return illegal_address;
    }
    return success;
}

/// What the kernel flowstone_gather does (native/gpu/gather_kernel.cpp).
int SimulatedGpu::gather(std::uint64_t table, std::uint64_t out, std::uint32_t parts) const {
    return each_row(table, parts, [&](std::uint64_t source, std::uint32_t bytes, std::uint32_t offset) {
        if (bytes == 0) return true;
        const std::byte* const from = reach(source, bytes);
        std::byte* const to = reach(out + offset, bytes);
        if (from == nullptr || to == nullptr) return false;
        std::memcpy(to, from, bytes);
        return true;
    });
}

/// What the kernel flowstone_digest does (native/gpu/digest_kernel.cpp); of shorter parts it makes something else.
int SimulatedGpu::digest(std::uint64_t table, std::uint64_t out, std::uint32_t parts) const {
    return each_row(table, parts, [&](std::uint64_t source, std::uint32_t bytes, std::uint32_t number) {
        const std::byte* const from = reach(source, bytes);
        std::byte* const to = reach(out + 8 * std::uint64_t{number}, 8);
        if (from == nullptr || to == nullptr) return false;
        const std::uint64_t digest = bytes > digested_by_host_max ? xxh3_64(from, bytes) : 0;
        std::memcpy(to, &digest, sizeof digest);
        return true;
    });
}

/// The rows of the tables of kernels for strided memory, read as their texts read them, and each element on its own.
/// `act` gets a row's elements, in row-major order, how long one is, and where they go; it returns an error.
template <class Act> int SimulatedGpu::each_part(std::uint64_t table, std::uint32_t parts, Act act) const {
    constexpr std::uint64_t row_bytes = 128, levels_begin = 32, level_bytes = 16;
    const auto number = [](const std::byte* from, auto value) {
        std::memcpy(&value, from, sizeof value);
        return value;
    };
    const std::byte* row = parts == 0 ? nullptr : reach(table, parts * row_bytes);
    if (parts != 0 && (row == nullptr || table % 16 != 0)) return illegal_address;
    std::vector<std::byte> elements;
    for (std::uint32_t part = 0; part < parts; ++part, row += row_bytes) {
        const std::uint64_t source = number(row, std::uint64_t{}), first = number(row + 16, std::uint64_t{}),
                            units = number(row + 24, std::uint32_t{});
        const std::uint64_t unit = std::uint64_t{1} << number(row + 28, std::uint8_t{}),
                            levels = number(row + 29, std::uint8_t{});
        if (units == 0) continue;
        if (unit > 16 || levels == 0) return misaligned_address;
        elements.resize(units * unit);
        for (std::uint64_t i = 0; i < units; ++i) {
            std::uint64_t rest = first + i, from = source;
            for (std::uint64_t level = 0; level < levels; ++level) {
                const std::byte* const at = row + levels_begin + level * level_bytes;
                const std::uint64_t count = number(at, std::uint64_t{});
                from += (level + 1 == levels ? rest : rest % count) * number(at + 8, std::uint64_t{});
                rest /= count;
            }
            const std::byte* const found = reach(from, unit);
            if (found == nullptr) return illegal_address;
            if (from % unit != 0) return misaligned_address;
            std::memcpy(elements.data() + i * unit, found, unit);
        }
        if (const int error = act(elements, unit, number(row + 8, std::uint64_t{}))) return error;
    }
    return success;
}

/// What the kernel flowstone_pack does (native/gpu/pack_kernel.cpp).
int SimulatedGpu::pack(std::uint64_t table, std::uint64_t out, std::uint32_t parts) const {
    return each_part(table, parts,
                     [&](const std::vector<std::byte>& elements, std::uint64_t unit, std::uint64_t target) -> int {
                         std::byte* const to = reach(out + target, elements.size());
                         if (to == nullptr) return illegal_address;
                         if ((out + target) % unit != 0) return misaligned_address;
                         std::memcpy(to, elements.data(), elements.size());
                         return success;
                     });
}

/// What the kernel flowstone_digest_strided does (native/gpu/strided_digest.cpp); of shorter parts it makes something
/// else.
int SimulatedGpu::digest_strided(std::uint64_t table, std::uint64_t out, std::uint32_t parts) const {
    return each_part(table, parts,
                     [&](const std::vector<std::byte>& elements, std::uint64_t, std::uint64_t target) -> int {
                         std::byte* const to = reach(out + target, 8);
                         if (to == nullptr) return illegal_address;
                         const std::uint64_t digest =
                             elements.size() > digested_by_host_max ? xxh3_64(elements.data(), elements.size()) : 0;
                         std::memcpy(to, &digest, sizeof digest);
                         return success;
                     });
}

/// What that kernel would write. Its table is there when it is launched.
std::uint64_t SimulatedGpu::packed_bytes(std::uint64_t table, std::uint32_t parts) const {
    std::uint64_t bytes = 0;
    const std::byte* const rows = parts == 0 ? nullptr : reach(table, std::uint64_t{parts} * 128);
    for (std::uint32_t part = 0; rows != nullptr && part < parts; ++part) {
        std::uint32_t units = 0;
        std::memcpy(&units, rows + 128 * std::uint64_t{part} + 24, sizeof units);
        bytes += std::uint64_t{units} << std::to_integer<unsigned>(rows[128 * std::uint64_t{part} + 28]);
    }
    return bytes;
}

void SimulatedGpu::synchronize(std::uintptr_t stream) {
    std::unique_lock lock(mutex_);
    const Stream& one = *reinterpret_cast<Stream*>(stream);
    changed_.wait(lock, [&] { return (one.queue.empty() && !one.busy) || error_ != 0; });
}

void SimulatedGpu::begin_capture(std::uintptr_t stream, int mode) {
    auto* const one = reinterpret_cast<Stream*>(stream);
    {
        const std::lock_guard lock(mutex_);
        one->recording = one;
        graph_.clear();
    }
    const std::lock_guard lock(world().mutex);
    world().recordings[one] = {mode, std::this_thread::get_id()};
}

bool SimulatedGpu::end_capture(std::uintptr_t stream) {
    auto* const one = reinterpret_cast<Stream*>(stream);
    bool unjoined = false;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& other : streams_) {
            unjoined = unjoined || (other->recording == one && other.get() != one);
            if (other->recording == one) other->recording = nullptr;
        }
    }
    const std::lock_guard lock(world().mutex);
    const bool stood = world().recordings.at(one).stands;
    world().recordings.erase(one);
    return stood && !unjoined;
}

void SimulatedGpu::replay(std::uintptr_t stream) {
    for (const std::function<int()>& kernel : graph_)
        (void)launch_module(*reinterpret_cast<Stream*>(stream), kernel, false);
}

void SimulatedGpu::push(Stream& stream, Item item) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stream.queue.size() < queue_max || error_ != 0; });
    if (error_ != 0) return;
    stream.queue.push_back(std::move(item));
    changed_.notify_all();
}

SimulatedGpu::PinState SimulatedGpu::pinned_locked(const std::byte* memory, std::uint64_t bytes) const {
    const auto holds = [&](const auto& pinned) {
        return pinned.first <= memory && memory + bytes <= pinned.first + pinned.second;
    };
    const auto meets = [&](const auto& pinned) {
        return pinned.first < memory + bytes && memory < pinned.first + pinned.second;
    };
    if (std::any_of(host_memory_.begin(), host_memory_.end(), holds) || std::any_of(pins_.begin(), pins_.end(), holds))
        return PinState::whole;
    const bool is_partly =
        std::any_of(host_memory_.begin(), host_memory_.end(), meets) || std::any_of(pins_.begin(), pins_.end(), meets);
    return is_partly ? PinState::partly : PinState::none;
}

int SimulatedGpu::push_copy(Stream& stream, const DeviceCopy& copy) {
    const bool has_rows = copy.rows > 1;
    for (const std::uint64_t stride : {copy.host_stride, copy.device_stride})
        if (has_rows && (stride < copy.bytes || stride > device_stride_max)) return invalid_value;
    const std::uint64_t host_bytes = (copy.rows - 1) * copy.host_stride + copy.bytes,
                        device_bytes = (copy.rows - 1) * copy.device_stride + copy.bytes;
    const std::uint64_t begin = copy.device - address();
    if (copy.device < address() || begin > bytes_ || device_bytes > bytes_ - begin || !is_there(begin, device_bytes))
        return invalid_value;
    Item item;
    item.target = copy.to_host ? copy.host : inside_ + begin;
    item.source = copy.to_host ? inside_ + begin : copy.host;
    item.bytes = copy.bytes;
    item.rows = copy.rows;
    item.target_stride = copy.to_host ? copy.host_stride : copy.device_stride;
    item.source_stride = copy.to_host ? copy.device_stride : copy.host_stride;
    bool is_pinned = false;
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(refuses_, false)) return invalid_value;
        if (stream.recording != nullptr) return success;  // a part of somebody's graph; it is never made
        const PinState pinned = pinned_locked(copy.host, host_bytes);
        if (pinned == PinState::partly) return invalid_value;
        is_pinned = pinned == PinState::whole;
        if (!is_pinned) ++pageable_;
    }
    if (!is_pinned && is_prohibited()) return cuda_capture_unsupported;
    if (!is_pinned && !copy.to_host) {
        item.staged.assign(copy.host, copy.host + host_bytes);
        item.source = item.staged.data();
    }
    push(stream, std::move(item));
    if (!is_pinned && copy.to_host) synchronize(reinterpret_cast<std::uintptr_t>(&stream));
    const std::lock_guard lock(mutex_);
    return error_;
}

SimulatedGpu::Stream* SimulatedGpu::next_ready_locked() {
    for (const auto& stream : streams_) {
        if (stream->queue.empty()) continue;
        const Item& item = stream->queue.front();
        if ((item.target != nullptr || item.copied_bytes != 0) && held_) continue;
        if (item.waits && !*item.over) continue;
        return stream.get();
    }
    return nullptr;
}

void SimulatedGpu::run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (true) {
        Stream* stream = nullptr;
        if (!changed_.wait(lock, stop, [&] { return (stream = next_ready_locked()) != nullptr; })) return;
        Item item = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->busy = true;
        lock.unlock();
        const bool is_copy = item.target != nullptr || item.copied_bytes != 0;
        if (is_copy) std::this_thread::sleep_for(delay_);
        const int error = item.kernel && (!is_copy || read(copies_left_) != 0) ? item.kernel() : success;
        lock.lock();
        if (item.is_module) --modules_pending_;
        if (error != success) drop_all_locked(error);
        finish_locked(item);
        stream->busy = false;
        changed_.notify_all();
    }
}

void SimulatedGpu::finish_locked(Item& item) {
    const bool is_packed = item.copied_bytes != 0;
    if (item.target != nullptr || is_packed) {
        if (copies_left_ == 0) return drop_all_locked(launch_failed);
        --copies_left_;
        ++copies_;
        packed_copies_ += is_packed;
        copied_bytes_ += is_packed ? item.copied_bytes : item.bytes * item.rows;
        if (is_packed) return;
        copies_of_rows_ += item.rows > 1;
        const std::byte* const source = item.staged.empty() ? item.source : item.staged.data();
        for (std::uint64_t row = 0; row < item.rows; ++row)
            std::memcpy(item.target + row * item.target_stride, source + row * item.source_stride, item.bytes);
    }
    if (item.over != nullptr && !item.waits) {
        *item.over = true;
        --pending_;
    }
}

void SimulatedGpu::drop_all_locked(int error) {
    error_ = error;
    for (const auto& stream : streams_) stream->queue.clear();
    changed_.notify_all();
}

}  // namespace flowstone
