#include "simulated_gpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <map>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace flowstone {
namespace {

// Of cuda.h.
constexpr int success = 0, invalid_value = 1, out_of_memory = 2, invalid_device = 101, invalid_context = 201, invalid_handle = 400,
              launch_failed = 719, captured_event = 907;
constexpr int global_mode = 0, local_mode = 1, relaxed_mode = 2;

[[noreturn]] void refuse(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

struct World {
    std::mutex mutex;
    std::map<int, SimulatedGpu*> gpus;
    int next = 0;
    /// Of each recording: its stream, how it was begun, and where. Whether it still stands.
    struct Recording {
        int mode;
        std::thread::id thread;
        bool stands = true;
    };
    std::map<void*, Recording> recordings;
};

World& world() {
    static World one;
    return one;
}

thread_local std::vector<SimulatedGpu*> current_contexts;
thread_local int capture_mode = global_mode;

/// Whether a call that may be unsafe is refused on this thread; then it ends the recordings that refuse it.
bool is_prohibited() {
    if (capture_mode == relaxed_mode) return false;
    const std::lock_guard lock(world().mutex);
    bool found = false;
    for (auto& [stream, recording] : world().recordings) {
        const bool own = recording.thread == std::this_thread::get_id() && recording.mode != relaxed_mode;
        const bool others = capture_mode == global_mode && recording.mode == global_mode;
        if (!own && !others) continue;
        recording.stands = false;
        found = true;
    }
    return found;
}

}  // namespace

struct SimulatedGpu::Event {
    SimulatedGpu* gpu;
    std::shared_ptr<bool> over = nullptr;  // of the last record: whether it is; null: there was none
    bool captured = false;
    void* recording = nullptr;  // the stream
};

/// A copy if it has a target, else a kernel, a record, or a wait.
struct SimulatedGpu::Item {
    std::byte* target = nullptr;
    const std::byte* source = nullptr;
    std::uint64_t bytes = 0;
    std::function<void()> kernel = nullptr;
    std::shared_ptr<bool> over = nullptr;  // of a record, also of the one that is waited for
    bool waits = false;
    std::vector<std::byte> staged = {};
};

struct SimulatedGpu::Stream {
    SimulatedGpu* gpu;
    unsigned flags = 0;
    int priority = 0;
    bool others = false;  // not made by the driver's call
    bool busy = false;
    void* recording = nullptr;  // whose stream's graph it is part of
    std::deque<Item> queue = {};
};

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
    assert(pins_.empty() && "memory was given back while the GPU could still write into it");
    assert(std::all_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->others; }) && "a stream was not destroyed");
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
    {
        const std::lock_guard lock(mutex_);
        if (into.recording != nullptr) return graph_.push_back(std::move(kernel));
    }
    Item item;
    item.kernel = std::move(kernel);
    push(into, std::move(item));
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
    for (const std::function<void()>& kernel : graph_) launch(stream, kernel);
}

void SimulatedGpu::push(Stream& stream, Item item) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stream.queue.size() < queue_max || error_ != 0; });
    if (error_ != 0) return;
    stream.queue.push_back(std::move(item));
    changed_.notify_all();
}

bool SimulatedGpu::is_pinned_locked(const std::byte* memory, std::uint64_t bytes) const {
    return std::any_of(pins_.begin(), pins_.end(),
                       [&](const auto& pin) { return pin.first <= memory && memory + bytes <= pin.first + pin.second; });
}

int SimulatedGpu::push_copy(Stream& stream, std::byte* host, std::uint64_t device, std::uint64_t bytes, bool to_host) {
    const std::uint64_t begin = device - address();
    if (device < address() || begin > bytes_ || bytes > bytes_ - begin) return invalid_value;
    Item item;
    item.target = to_host ? host : inside_ + begin;
    item.source = to_host ? inside_ + begin : host;
    item.bytes = bytes;
    bool is_pinned = false;
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(refuses_, false)) return invalid_value;
        if (stream.recording != nullptr) return success;  // a part of somebody's graph; it is never made
        is_pinned = is_pinned_locked(host, bytes);
        if (!is_pinned) ++pageable_;
    }
    if (!is_pinned && is_prohibited()) return cuda_capture_unsupported;
    if (!is_pinned && !to_host) {
        item.staged.assign(host, host + bytes);
        item.source = item.staged.data();
    }
    push(stream, std::move(item));
    if (!is_pinned && to_host) synchronize(reinterpret_cast<std::uintptr_t>(&stream));
    const std::lock_guard lock(mutex_);
    return error_;
}

SimulatedGpu::Stream* SimulatedGpu::next_ready_locked() {
    for (const auto& stream : streams_) {
        if (stream->queue.empty()) continue;
        const Item& item = stream->queue.front();
        if (item.target != nullptr && held_) continue;
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
        if (item.target != nullptr) std::this_thread::sleep_for(delay_);
        if (item.kernel) item.kernel();
        lock.lock();
        finish_locked(item);
        stream->busy = false;
        changed_.notify_all();
    }
}

void SimulatedGpu::finish_locked(Item& item) {
    if (item.target != nullptr) {
        if (copies_left_ == 0) return drop_all_locked(launch_failed);
        --copies_left_;
        ++copies_;
        std::memcpy(item.target, item.staged.empty() ? item.source : item.staged.data(), item.bytes);
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

/// The driver's functions.
struct SimulatedCalls {
    using Gpu = SimulatedGpu;
    using Result = CudaDriver::Result;

    static Gpu* current() { return current_contexts.empty() ? nullptr : current_contexts.back(); }

    /// What every call returns at once, if it is not 0. `unsafe`: a recording could take it for a part of it.
    static Result enter(bool unsafe) {
        if (current() == nullptr) return invalid_context;
        if (unsafe && is_prohibited()) return cuda_capture_unsupported;
        const std::lock_guard lock(current()->mutex_);
        return current()->error_;
    }

    static Result init(unsigned) { return success; }
    static Result device_get(int* device, int ordinal) {
        const std::lock_guard lock(world().mutex);
        *device = ordinal;
        return world().gpus.contains(ordinal) ? success : invalid_device;
    }
    static Result retain_primary(void** context, int device) {
        const std::lock_guard lock(world().mutex);
        *context = world().gpus.at(device);
        return success;
    }
    static Result release_primary(int) { return success; }
    static Result push_context(void* context) {
        current_contexts.push_back(static_cast<Gpu*>(context));
        return success;
    }
    static Result pop_context(void** context) {
        if (current() == nullptr) return invalid_context;
        *context = current();
        current_contexts.pop_back();
        return success;
    }
    static Result exchange_capture_mode(int* mode) {
        std::swap(*mode, capture_mode);
        return success;
    }
    static Result priority_range(int* least, int* greatest) {
        *least = 0, *greatest = -5;
        return enter(false);
    }
    static Result stream_create(void** stream, unsigned flags, int priority) {
        if (const Result error = enter(true)) return error;
        const std::lock_guard lock(current()->mutex_);
        current()->streams_.push_back(std::make_unique<Gpu::Stream>(Gpu::Stream{current(), flags, priority}));
        *stream = current()->streams_.back().get();
        return success;
    }
    static Result stream_destroy(void* stream) {
        if (current() == nullptr) return invalid_context;
        Gpu& gpu = *current();
        const std::lock_guard lock(gpu.mutex_);
        const auto is_it = [&](const auto& one) { return one.get() == stream && one->queue.empty() && !one->busy; };
        return gpu.streams_.remove_if(is_it) == 1 ? gpu.error_ : invalid_handle;
    }
    static Result stream_capture_status(void* stream, int* status) {
        if (const Result error = enter(false)) return error;
        auto* const one = static_cast<Gpu::Stream*>(stream);
        void* recording = nullptr;
        {
            const std::lock_guard lock(one->gpu->mutex_);
            recording = one->recording;
        }
        const std::lock_guard lock(world().mutex);
        *status = recording == nullptr ? 0 : world().recordings.at(recording).stands ? 1 : 2;
        return success;
    }
    static Result stream_synchronize(void* stream) {
        if (const Result error = enter(true)) return error;
        current()->synchronize(reinterpret_cast<std::uintptr_t>(stream));
        return enter(false);
    }
    static Result stream_wait(void* stream, void* event, unsigned) {
        if (const Result error = enter(false)) return error;
        auto* const later = static_cast<Gpu::Stream*>(stream);
        auto* const of = static_cast<Gpu::Event*>(event);
        Gpu::Item item;
        {
            const std::lock_guard lock(later->gpu->mutex_);
            if (of->captured) {
                later->recording = of->recording;
                return success;
            }
            if (of->over == nullptr || *of->over) return success;
            item.over = of->over;
            item.waits = true;
        }
        later->gpu->push(*later, std::move(item));
        return success;
    }
    static Result event_create(void** event, unsigned) {
        if (const Result error = enter(true)) return error;
        const std::lock_guard lock(current()->mutex_);
        current()->events_.push_back(std::make_unique<Gpu::Event>(Gpu::Event{current()}));
        *event = current()->events_.back().get();
        return success;
    }
    /// The event stays until the GPU goes: what was queued may refer to it.
    static Result event_destroy(void*) { return enter(false); }
    static Result event_record(void* event, void* stream) {
        if (const Result error = enter(false)) return error;
        auto* const of = static_cast<Gpu::Event*>(event);
        auto* const into = static_cast<Gpu::Stream*>(stream);
        if (of->gpu != into->gpu) return invalid_handle;
        Gpu::Item item;
        item.over = std::make_shared<bool>(false);
        std::shared_ptr<bool> before;
        {
            const std::lock_guard lock(into->gpu->mutex_);
            of->captured = into->recording != nullptr;
            of->recording = into->recording;
            if (of->captured) return success;
            before = std::exchange(of->over, item.over);
            into->gpu->pending_max_ = std::max(into->gpu->pending_max_, ++into->gpu->pending_);
        }
        try {
            into->gpu->push(*into, std::move(item));
        } catch (const std::bad_alloc&) {
            const std::lock_guard lock(into->gpu->mutex_);
            of->over = before;
            --into->gpu->pending_;
            throw;
        }
        return success;
    }
    static Result event_query(void* event) {
        if (const Result error = enter(true)) return error;
        auto* const of = static_cast<Gpu::Event*>(event);
        const std::lock_guard lock(of->gpu->mutex_);
        if (of->captured) return captured_event;
        return of->over == nullptr || *of->over ? success : cuda_not_ready;
    }
    static Result to_host(void* target, unsigned long long source, std::size_t bytes, void* stream) {
        if (const Result error = enter(false)) return error;
        return current()->push_copy(*static_cast<Gpu::Stream*>(stream), static_cast<std::byte*>(target), source, bytes, true);
    }
    static Result from_host(unsigned long long target, const void* source, std::size_t bytes, void* stream) {
        if (const Result error = enter(false)) return error;
        auto* const host = const_cast<std::byte*>(static_cast<const std::byte*>(source));
        return current()->push_copy(*static_cast<Gpu::Stream*>(stream), host, target, bytes, false);
    }
    static Result pin(void* memory, std::size_t bytes, unsigned) {
        if (const Result error = enter(true)) return error;
        const std::lock_guard lock(current()->mutex_);
        current()->pins_.emplace_back(static_cast<std::byte*>(memory), bytes);
        current()->pinned_bytes_ += bytes;
        return success;
    }
    /// After an error, too, nothing refers to the memory any more.
    static Result unpin(void* memory) {
        if (current() == nullptr) return invalid_context;
        Gpu& gpu = *current();
        const std::lock_guard lock(gpu.mutex_);
        const auto found = std::find_if(gpu.pins_.begin(), gpu.pins_.end(), [&](const auto& pin) { return pin.first == memory; });
        assert(found != gpu.pins_.end());
        gpu.pinned_bytes_ -= found->second;
        gpu.pins_.erase(found);
        return gpu.error_;
    }
    static Result error_name(Result error, const char** name) {
        static const std::map<int, const char*> names{
            {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {201, "CUDA_ERROR_INVALID_CONTEXT"},
            {719, "CUDA_ERROR_LAUNCH_FAILED"}, {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
        const auto found = names.find(error);
        *name = found == names.end() ? nullptr : found->second;
        return found == names.end() ? invalid_value : success;
    }
};

/// A call that finds no memory returns that, as the driver's do, and has changed nothing.
template <auto Call> struct Refusing;
template <class... Arguments, CudaDriver::Result (*Call)(Arguments...)> struct Refusing<Call> {
    static CudaDriver::Result call(Arguments... arguments) {
        try {
            return Call(arguments...);
        } catch (const std::bad_alloc&) {
            return out_of_memory;
        }
    }
};

const CudaDriver& simulated_driver() {
    using Calls = SimulatedCalls;
    static const CudaDriver driver{
        .init = &Refusing<&Calls::init>::call,
        .device_get = &Refusing<&Calls::device_get>::call,
        .retain_primary = &Refusing<&Calls::retain_primary>::call,
        .release_primary = &Refusing<&Calls::release_primary>::call,
        .push_context = &Refusing<&Calls::push_context>::call,
        .pop_context = &Refusing<&Calls::pop_context>::call,
        .exchange_capture_mode = &Refusing<&Calls::exchange_capture_mode>::call,
        .priority_range = &Refusing<&Calls::priority_range>::call,
        .stream_create = &Refusing<&Calls::stream_create>::call,
        .stream_destroy = &Refusing<&Calls::stream_destroy>::call,
        .stream_capture_status = &Refusing<&Calls::stream_capture_status>::call,
        .stream_synchronize = &Refusing<&Calls::stream_synchronize>::call,
        .stream_wait = &Refusing<&Calls::stream_wait>::call,
        .event_create = &Refusing<&Calls::event_create>::call,
        .event_destroy = &Refusing<&Calls::event_destroy>::call,
        .event_record = &Refusing<&Calls::event_record>::call,
        .event_query = &Refusing<&Calls::event_query>::call,
        .to_host = &Refusing<&Calls::to_host>::call,
        .from_host = &Refusing<&Calls::from_host>::call,
        .pin = &Refusing<&Calls::pin>::call,
        .unpin = &Refusing<&Calls::unpin>::call,
        .error_name = &Refusing<&Calls::error_name>::call,
    };
    return driver;
}

}  // namespace flowstone
